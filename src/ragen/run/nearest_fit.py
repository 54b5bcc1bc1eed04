"""Refuse a run that cannot fit on its GPU, and name the nearest setting that can.

    check_fits(model, config, capacity)          # -> its MemoryPlan; ConfigError if even the least does not fit
    check_named(config, capacity)                # the same for the models that the config names, without loading any
    nearest(model, config, capacity)             # -> ["actor_rollout_ref.model.lora_rank=64", …], or None

Settings are tried in the order of what they change: first only memory (recomputing layers), then the longest episode,
then what is trained (an adapter), then the algorithm (no critic), then the model. The plan itself checks each.
"""

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from ragen.config.model_name import RANDOM
from ragen.errors import ConfigError
from ragen.machine import gpu_memory
from ragen.run.memory_plan import ACTOR, CONTEXT, CRITIC, GB, MemoryPlan, models_of, offloaded_by_key, plan
from ragen.run.model_shape import PUBLISHED, ModelShape, shape_of

if TYPE_CHECKING:
    from ragen.config.schema import Config, TrainedModel

RANK = 64
ACTOR_MODEL, CRITIC_MODEL = "actor_rollout_ref.model", "critic.model"
LENGTH = "actor_rollout_ref.rollout.max_model_len"
OFFLOAD_KEYS = {
    ACTOR: "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    CRITIC: "critic.model.fsdp_config.optimizer_offload",
}
Change = dict[str, Any]  # keys and their values


def check_fits(
    model: ModelShape,
    config: "Config",
    capacity: int,
    critic: ModelShape | None = None,
    host_memory: int | None = None,
) -> MemoryPlan:
    """The plan of a run. Raises `ConfigError` if it cannot fit."""
    found = plan(model, config, capacity, critic, host_memory)
    if found.fits:
        return found
    overrides = nearest(model, config, capacity, critic, host_memory)
    if overrides is None:
        advice = "No setting was found that fits: use a smaller model or a GPU with more memory"
    else:
        advice = f"The nearest setting that fits: {' '.join(overrides)}"
    needs = f"{(found.peak + CONTEXT) / GB:.0f} GB on a GPU, and this one has {capacity / GB:.0f} GB"
    if found.fills_host and host_memory is not None:
        each = config.trainer.n_gpus_per_node * found.host
        needs = f"{each / GB:.0f} GB of main memory for optimizer_offload, and {host_memory / GB:.0f} GB are free"
    raise ConfigError(f"{model.name} needs {needs}: {found.parts()}. {advice}", code="does-not-fit")


def check_named(config: "Config", capacity: int | None, host_memory: int | None = None) -> MemoryPlan | None:
    """The plan of a run on a GPU with `capacity` bytes; None without a GPU, and if the model's shape is not known.

    Raises `ConfigError` if it cannot fit.
    """
    if capacity is None:
        return None
    model = shape_of(config.model_path if config.rl_or_sft == "rl" else config.sft.training.base_model)
    critic = shape_of(config.critic.model.path) if config.rl_or_sft == "rl" else None
    return None if model is None else check_fits(model, config, capacity, critic, host_memory)


def gpu_of(config: "Config") -> int | None:
    """The memory of a GPU that a run here would use; None if it uses none."""
    return gpu_memory() if config.system.CUDA_VISIBLE_DEVICES else None


def nearest(
    model: ModelShape,
    config: "Config",
    capacity: int,
    critic: ModelShape | None = None,
    host_memory: int | None = None,
) -> list[str] | None:
    """Overrides with which the run fits; None if none of those that are tried does."""
    for change in _changes(model, config, critic):
        smaller, shape, of_critic = changed(config, change), model, critic
        if name := change.get("model_path") or change.get("sft.training.base_model"):
            shape, of_critic = shape_of(name) or model, None  # the critic has the same one
        found = plan(shape, smaller, capacity, of_critic, host_memory)
        if found.fits:
            return [f"{key}={value}" for key, value in change.items()]
    return None


def _changes(model: ModelShape, config: "Config", critic: ModelShape | None) -> Iterator[Change]:
    """What could be set instead, small changes first."""
    has_critic = any(one.role == CRITIC for one in models_of(model, config, critic))
    recompute, adapters = _recompute(config, has_critic), _adapters(config, has_critic)
    no_critic: Change = {"algorithm.adv_estimator": "grpo"} if has_critic else {}
    lengths: list[Change] = [{}, *({LENGTH: length} for length in _lengths(config))]
    for parts in chain(
        [[_on_the_gpu(config)]],
        product([recompute], lengths),
        product([adapters], [{}, recompute], lengths),
        product([adapters | no_critic], [{}, recompute], lengths),
        product(
            _models(model, config, has_critic), [{}, recompute, recompute | adapters, recompute | adapters | no_critic]
        ),
    ):
        change = {key: value for part in parts for key, value in part.items()}
        if no_critic.items() <= change.items() and no_critic:
            change = {key: value for key, value in change.items() if not key.startswith(CRITIC_MODEL)}
        if change:
            yield change


def _on_the_gpu(config: "Config") -> Change:
    """The state of optimizers that the user wants in main memory."""
    return {OFFLOAD_KEYS[role]: False for role in offloaded_by_key(config)} if config.rl_or_sft == "rl" else {}


def _recompute(config: "Config", has_critic: bool) -> Change:
    if config.rl_or_sft == "sft":
        training, least = config.sft.training, config.sft.training.num_gpus
        smaller = {"sft.training.micro_batch_size": least} if training.micro_batch_size > least else {}
        enabled = training.enable_gradient_checkpointing
        return smaller | ({} if enabled else {"sft.training.enable_gradient_checkpointing": True})
    return {
        f"{key}.enable_gradient_checkpointing": True
        for key, settings in _trained(config, has_critic).items()
        if not settings.enable_gradient_checkpointing
    }


def _trained(config: "Config", has_critic: bool) -> dict[str, "TrainedModel"]:
    critic = {CRITIC_MODEL: config.critic.model} if has_critic else {}
    return {ACTOR_MODEL: config.actor_rollout_ref.model, **critic}


def _lengths(config: "Config") -> Iterator[int]:
    """Halves of the longest sequence, with room for a prompt as long as a reply."""
    length = config.actor_rollout_ref.rollout.max_model_len // 2
    while config.rl_or_sft != "sft" and length >= 2 * config.actor_rollout_ref.rollout.response_length:
        yield length
        length //= 2


def _adapters(config: "Config", has_critic: bool) -> Change:
    if config.rl_or_sft == "sft":
        return {} if config.sft.training.lora_rank else {"sft.training.lora_rank": RANK}
    return {
        f"{key}.lora_rank": RANK for key, settings in _trained(config, has_critic).items() if not settings.lora_rank
    }


def _models(model: ModelShape, config: "Config", has_critic: bool) -> Iterator[Change]:
    """Smaller ones, large ones first, of the same kind. The critic is named too: it may have been set."""
    keys = ["sft.training.base_model" if config.rl_or_sft == "sft" else "model_path"]
    keys += [f"{CRITIC_MODEL}.path"] * has_critic
    for shape in PUBLISHED:
        if shape.num_parameters < model.num_parameters:
            yield dict.fromkeys(keys, f"{RANDOM}{shape.short_name}" if model.name.startswith(RANDOM) else shape.name)


def changed(config: "Config", change: Change) -> "Config":
    """A config with these values."""
    made = deepcopy(config)
    for key, value in change.items():
        *parents, name = key.split(".")
        node: Any = made
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, name, value)
    return made
