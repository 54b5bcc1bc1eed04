"""The v1 command line, `bash train.sh ENV model.* training.* optimization.* …`, mapped onto the tree.

    translate("training.n_rollout", 8, "sokoban")      # {"es_manager.train.group_size": 8}

An environment name starts from the defaults of `KEYS` and from that environment's v1 board and rules. Without one, only
typed keys are translated, so v1 keys and tree keys mix in one command. A typed value is checked once, under the name
that was typed (`Key.checked`). Some values follow from several keys (`derived`): they are computed once the rest of the
tree is known and its numbers are within their ranges.

Differences from v1: KL is added to the loss, never subtracted; only sampled tokens are trained, so `state_masking` is
always on; the device list follows `system.n_gpus` when none is given.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from ragen.coerce import convert
from ragen.config.schema import Config, Sft
from ragen.config.tree import check_choice, leaves, schema_fields
from ragen.env.registry import catalogue
from ragen.errors import ConfigError, refused, shown

TRAIN_LEVELS = 10_000  # `train_data_num` null
VAL_LEVELS = 512  # `val_data_num` null


@dataclass(frozen=True)
class Key:
    """One v1 key. Without targets, it has no effect or `derived` reads it."""

    type: Any
    default: Any
    targets: tuple[str, ...] = ()  # the tree keys that take its value
    value: Callable[[Any], Any] = lambda value: value
    null_is_unset: bool = False
    minimum: int | None = None  # only where no target has a range
    no_effect: str = ""

    def tree_values(self, value: Any) -> dict[str, Any]:
        if value is None and self.null_is_unset:
            return {}
        return {target: self.value(value) for target in self.targets}

    def checked(self, value: Any, name: str) -> Any:
        """A typed value, converted to the key's type; errors call the key `name`. The text None means null."""
        if value == "None" and type(None) in get_args(self.type):
            value = None
        converted = convert(value, self.type, name)
        if self.minimum is not None and converted is not None and converted < self.minimum:
            raise refused(name, value, f"must be at least {self.minimum}", code="range")
        for target in self.targets:
            check_choice(converted, _CHOICES.get(target, ()), name)
        return converted


_CHOICES = {key: spec.metadata["choices"] for key, spec, _ in schema_fields(Config) if "choices" in spec.metadata}


class Environment(NamedTuple):
    """What an environment name stands for. The penalty is what a turn without a valid action costs in all."""

    tag: str
    format_penalty: float


ENVIRONMENTS = {
    "sokoban": Environment("SokobanV1", -1.1),  # an invalid answer costs 1 besides the 0.1 of a step
    "frozenlake": Environment("FrozenLakeV1", -1.0),
    "two_armed_bandit": Environment("TwoArmedBandit", 0.0),
}

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NEVER_WIRED = "v1 declared this key and never used it"
IN_RUN_DIRECTORY = "episodes are kept in the run directory"


def _or(number: int) -> Callable[[int | None], int]:
    """What null stands for."""
    return lambda value: number if value is None else value


KEYS = {
    "system.cuda_visible_devices": Key(str | None, None, ("system.CUDA_VISIBLE_DEVICES",), null_is_unset=True),
    "system.n_gpus": Key(int, 1, ("trainer.n_gpus_per_node",)),
    "system.multi_processing": Key(str, "ray", no_effect="workers are ordinary processes"),
    "system.vllm_attention_backend": Key(str, "XFORMERS", no_effect="belongs to the vLLM engine"),
    "model.base_model": Key(str, "Qwen/Qwen2.5-0.5B-Instruct", ("model_path",)),
    "model.experiment_name": Key(str, "ragen-main-exp", ("trainer.experiment_name",)),
    "model.gradient_checkpointing": Key(
        bool,
        True,
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "critic.model.enable_gradient_checkpointing"),
    ),
    "training.micro_batch_size": Key(int, 1, minimum=1),  # derived: a total, divided by the number of GPUs
    "training.train_batch_size": Key(int, 8, ("es_manager.train.env_groups",)),
    "training.n_rollout": Key(int, 16, ("es_manager.train.group_size",)),
    "training.ppo_batch_size": Key(int, 128, ("ppo_mini_batch_size",)),
    "training.val_batch_size": Key(int, 10, ("data.val_batch_size",)),
    "training.train_data_num": Key(int | None, None, ("data.train_data_num",), _or(TRAIN_LEVELS)),
    "training.val_data_num": Key(int | None, 50, ("es_manager.val.env_groups",), _or(VAL_LEVELS)),
    "training.max_turns": Key(int, 5, ("agent_proxy.max_turn",)),
    "training.max_start_length": Key(int, 400, minimum=1),
    "training.max_obs_length": Key(int, 200, minimum=0),
    "training.max_response_length": Key(int, 400, (f"{ROLLOUT}.response_length",)),
    "training.rollout_tp_size": Key(int, 1, (f"{ROLLOUT}.tensor_model_parallel_size",)),
    "training.temperature": Key(float, 0.7, (f"{ROLLOUT}.temperature",)),
    "training.total_epochs": Key(int, 5, minimum=1),
    "training.total_training_steps": Key(int | None, None, ("trainer.total_training_steps",), null_is_unset=True),
    "training.use_kl_loss": Key(bool, True, (f"{ACTOR}.use_kl_loss",)),
    "training.no_think_rl": Key(bool, False, ("agent_proxy.enable_think",), lambda no_think: not no_think),
    "training.state_masking": Key(bool, False, no_effect="always on: only sampled tokens are trained"),
    "training.use_sft": Key(bool, False, no_effect=NEVER_WIRED),
    "training.binary_reward": Key(bool, False, no_effect=NEVER_WIRED),
    "training.mask_state": Key(bool, False, no_effect=NEVER_WIRED),
    "training.length_penalty": Key(bool, False, no_effect=NEVER_WIRED),
    "training.ref_update_steps": Key(int | None, None, no_effect="the reference stays the initial model"),
    "optimization.actor_lr": Key(float, 1e-6, (f"{ACTOR}.optim.lr",)),
    "optimization.critic_lr": Key(float, 1e-5, ("critic.optim.lr",)),
    "optimization.kl_coef": Key(float, 0.001, (f"{ACTOR}.kl_loss_coef",)),
    "optimization.kl_loss_type": Key(str, "low_var_kl", (f"{ACTOR}.kl_loss_type",)),
    "optimization.adv_estimator": Key(str, "grpo", ("algorithm.adv_estimator",)),
    "optimization.gpu_memory_utilization": Key(float, 0.4, (f"{ROLLOUT}.gpu_memory_utilization",)),
    "logging.mode": Key(list[str], ["wandb"], ("trainer.logger",)),
    "logging.log_images": Key(bool, True, no_effect=IN_RUN_DIRECTORY),
    "logging.log_image_dir": Key(str, "log/trajectory", no_effect=IN_RUN_DIRECTORY),
    "logging.log_image_step_size": Key(int, 4, no_effect=IN_RUN_DIRECTORY),
    "logging.log_n_image_per_batch": Key(int, 32, no_effect=IN_RUN_DIRECTORY),
    "trainer.val_before_train": Key(bool, False, ("trainer.val_before_train",)),
    "trainer.val_only": Key(bool, False, ("trainer.val_only",)),
    "trainer.default_hdfs_dir": Key(str | None, None, ("trainer.default_hdfs_dir",)),
    "trainer.nnodes": Key(int, 1, ("trainer.nnodes",)),
    "trainer.save_freq": Key(int, 100, ("trainer.save_freq",)),
    "trainer.test_freq": Key(int, 100, ("trainer.test_freq",)),
    "trainer.project_name": Key(str, "RAGEN", ("trainer.project_name",)),
    "rl_or_sft": Key(str, "rl", ("rl_or_sft",)),
    "env.data_dir": Key(str | None, None, no_effect="levels are generated from their seeds"),
}
_SFT_DEFAULTS = leaves(Sft())
KEYS |= {f"sft.{name}": Key(hint, _SFT_DEFAULTS[name], (f"sft.{name}",)) for name, _, hint in schema_fields(Sft)}

# Defaults of the v1 trainer that its config did not hold.
INHERITED = {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2, "agent_proxy.max_actions_per_turn": 1}

OWN_SECTIONS = ("model", "training", "optimization", "logging", "env")  # sections that the tree does not have
ENV_KWARGS = "env.env_kwargs."


def is_key(key: str) -> bool:
    return key in KEYS or key == "env.name" or key.startswith(ENV_KWARGS)


def defaults(environment: str) -> dict[str, Any]:
    """The tree values that `train.sh ENV` starts from."""
    start = ENVIRONMENTS[environment]
    values: dict[str, Any] = dict(INHERITED)
    for spec in KEYS.values():
        values |= spec.tree_values(spec.default)
    values |= {f"es_manager.{split}.env_configs.tags": [start.tag] for split in ("train", "val")}
    return values | {"es_manager.format_penalty": start.format_penalty, "sft.env_type": environment}


def translate(key: str, value: Any, environment: str | None) -> dict[str, Any]:
    """The tree values that one typed key stands for; empty for a derived key or one without effect."""
    if key == "env.name":
        if value != environment:
            raise refused(key, value, f"name the environment first: train.sh {shown(value)} …", code="environment-name")
        return {}
    if key.startswith(ENV_KWARGS):
        return {_setting_key(key, environment): value}
    return KEYS[key].tree_values(value)


def default_values(key: str, environment: str | None) -> dict[str, Any]:
    """The tree values that `~key` restores: those of the v1 default."""
    if key == "env.name":
        return {}
    if key.startswith(ENV_KWARGS):
        target = _setting_key(key, environment)
        assert environment is not None
        settings = catalogue()[ENVIRONMENTS[environment].tag].env_config or {}
        name = key.removeprefix(ENV_KWARGS)
        if name not in settings:
            message = f"~{key}: {environment} has no default for it; known: {', '.join(settings)}"
            raise ConfigError(message, key=key, code="reset")
        return {target: settings[name]}
    return KEYS[key].tree_values(KEYS[key].default)


def _setting_key(key: str, environment: str | None) -> str:
    if environment is None:
        message = f"{key}: needs an environment, named first: train.sh sokoban …"
        raise ConfigError(message, key=key, code="no-environment")
    return f"custom_envs.{ENVIRONMENTS[environment].tag}.env_config.{key.removeprefix(ENV_KWARGS)}"


# --- values that follow from several keys -------------------------------------------------------------------------


class Derived(NamedTuple):
    """A value that follows from others, why, and the v1 keys it comes from."""

    value: Any
    why: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """What `derived` works on: the v1 keys that were typed, the tree so far, and which of its keys were typed."""

    environment: str | None
    typed: Mapping[str, Any]
    config: Config  # its numbers are within their ranges
    assigned: Collection[str]  # tree keys that were typed

    def wants(self, target: str, *sources: str) -> bool:
        """Whether to derive the target: with an environment name also from v1 defaults, if it was not typed."""
        is_typed = any(source in self.typed for source in sources)
        return is_typed or (self.environment is not None and target not in self.assigned)

    def v1(self, key: str) -> Any:
        return self.typed.get(key, KEYS[key].default)


def derived(known: Known) -> dict[str, Derived]:
    """Tree key -> the value that follows from several keys."""
    return _micro_batch(known) | _lengths(known) | _steps(known) | _kl_in_reward(known) | _sft_validation(known)


def _micro_batch(known: Known) -> dict[str, Derived]:
    source, target = "training.micro_batch_size", "micro_batch_size_per_gpu"
    if not known.wants(target, source):
        return {}
    micro, num_gpus = known.v1(source), known.config.trainer.n_gpus_per_node
    if micro < num_gpus:
        raise refused(source, micro, f"must be at least the number of GPUs, {num_gpus}", code="micro-batch")
    if micro % num_gpus:
        raise refused(source, micro, f"is a total and must divide evenly among {num_gpus} GPUs", code="micro-batch")
    return {target: Derived(micro // num_gpus, f"{source} / {num_gpus} GPUs", (source,))}


def _lengths(known: Known) -> dict[str, Derived]:
    sources, target = ("training.max_start_length", "training.max_obs_length"), f"{ROLLOUT}.max_model_len"
    if not known.wants(target, *sources):
        return {}
    turns, reply = known.config.agent_proxy.max_turn, known.config.actor_rollout_ref.rollout.response_length
    start, observation = map(known.v1, sources)
    prompt = start + reply * (turns - 1) + observation * turns
    return {
        "data.max_prompt_length": Derived(prompt, "start + response x (turns - 1) + obs x turns", sources),
        target: Derived(prompt + reply, "prompt + response", sources),
    }


def _steps(known: Known) -> dict[str, Derived]:
    source, target = "training.total_epochs", "trainer.total_training_steps"
    if target in known.assigned or not known.wants(target, source):
        return {}  # a number of steps that was given stands, also beside a number of epochs
    levels = known.config.data.train_data_num or TRAIN_LEVELS
    groups, epochs = known.config.es_manager.train.env_groups, known.v1(source)
    if levels < groups:
        why = f"is less than the {groups} groups of one step; ask for at least {groups}"
        raise refused("training.train_data_num", levels, why, code="too-few-levels")
    why = f"{levels} levels / {groups} groups x {epochs} epochs"
    return {target: Derived(levels // groups * epochs, why, (source,))}


def _kl_in_reward(known: Known) -> dict[str, Derived]:
    """v1 moves KL from the loss into the reward; a coefficient of 0 still means no KL."""
    source, in_force, v1_coef = "training.use_kl_loss", "algorithm.kl_ctrl.kl_coef", "optimization.kl_coef"
    if known.typed.get(source) is not False:
        return {}
    values = {}
    if in_force in known.assigned and v1_coef not in known.typed:
        coefficient = known.config.algorithm.kl_ctrl.kl_coef
    else:
        coefficient = known.config.actor_rollout_ref.actor.kl_loss_coef
        values[in_force] = Derived(coefficient, v1_coef, (v1_coef,))
    return values | {"algorithm.use_kl_in_reward": Derived(coefficient > 0, f"{source} is false", (source,))}


def _sft_validation(known: Known) -> dict[str, Derived]:
    source, target = "training.n_rollout", "es_manager.val.group_size"
    if known.config.rl_or_sft != "sft" or not known.wants(target, source):
        return {}
    return {target: Derived(known.v1(source), f"{source}, in validation after SFT", (source,))}
