"""The documented experiments, and the memory and time that each needs, estimated from the shape of its model.

    config = config_of(EXPERIMENTS[0], POCKET)
    memory(POCKET, config)                       # {"weights": …, "master weights": …, "Adam": …, "work": …}
    seconds_per_step(POCKET, config, num_cores=2)

For a GPU `run.memory_plan` knows more. On a CPU a parameter takes 4 bytes as weight (float32, no separate master), 8 in
Adam and 4 as gradient. A critic needs the same again, a reference model only its weights. The larger of two comes on
top: the sampler's cache, or the gradients and activations of a micro-batch. Episodes are assumed to have the maximum
length.
"""

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ragen.run.memory_plan import LARGE, longest_sequence, models_of, num_conversations
from ragen.run.model_shape import POCKET, QWEN_05B, QWEN_3B, QWEN_3B_BASE, QWEN_7B, QWEN_15B, SMOLLM2, ModelShape

if TYPE_CHECKING:
    from ragen.config.schema import Config

SIZE = 4  # bytes of a number
LOGITS = 4 * (1 << 24) * 4  # a chunk of logits in float32, and what its gradient takes
TYPICAL = 0.35  # of the maximum length of an episode, for the time of a step
CORE_FLOPS = 30e9  # per second, float32: measured with the embedded model


class Experiment(NamedTuple):
    """A documented command: its environment or recipe, and its overrides except the model."""

    title: str
    model: ModelShape
    overrides: tuple[str, ...]
    recipe: str | None = None


GAMES = "all three games"
V1 = (
    "training.micro_batch_size=4", "training.train_batch_size=4", "training.ppo_batch_size=32",
    "training.max_turns=5", "training.n_rollout=8", "optimization.kl_coef=0.001", "optimization.adv_estimator=brpo",
)  # fmt: skip
V2 = (
    "algorithm.adv_estimator=gae", "ppo_mini_batch_size=32", "micro_batch_size_per_gpu=4", "trainer.save_freq=-1",
)  # fmt: skip
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")
SFT = ("sokoban", "rl_or_sft=sft", "sft.training.micro_batch_size=4", "training.n_rollout=1")
EXPERIMENTS = (
    Experiment(GAMES, POCKET, ("sokoban",)),
    Experiment(GAMES, SMOLLM2, ("sokoban", *V1)),
    Experiment(GAMES, QWEN_05B, ("sokoban", *V1)),
    Experiment("sokoban", QWEN_15B, ("sokoban", *V1)),
    Experiment(GAMES, QWEN_3B, ("sokoban", *V1)),
    Experiment("sokoban, 2 GPUs", QWEN_7B, ("sokoban", "system.n_gpus=2", *V1)),
    Experiment("SFT baselines", QWEN_05B, SFT),
    Experiment("SFT baselines", QWEN_3B, SFT),
    Experiment("hyperparameter search", QWEN_3B, ("two_armed_bandit", *V1)),
    Experiment("top-p and KL sweeps", QWEN_3B_BASE, (*V2, *KL), "_2_sokoban"),
    Experiment("entropy sweep", QWEN_3B_BASE, V2, "_2_sokoban"),
    Experiment("KL/entropy smoke grid", QWEN_3B, (*V2, *KL), "_2_sokoban"),
    Experiment("gradient analysis", QWEN_3B_BASE, (*V2, "trainer.gradient_analysis_mode=True"), "_2_sokoban"),
)
SUBSTITUTES = (QWEN_15B, QWEN_05B, SMOLLM2, POCKET)  # large ones first


def config_of(experiment: Experiment, model: ModelShape) -> "Config":
    """The resolved config of the command with this model. Only the embedded model changes other settings."""
    return _resolved(experiment.overrides, experiment.recipe, model.name if model is POCKET else QWEN_3B.name)


@cache
def _resolved(overrides: tuple[str, ...], recipe: str | None, model: str) -> "Config":
    from ragen.config.compose import resolve

    key = "sft.training.base_model" if "rl_or_sft=sft" in overrides else "model_path" if recipe else "model.base_model"
    return resolve([*overrides, f"{key}={model}"], recipe, environ={}).config


def memory(model: ModelShape, config: "Config") -> dict[str, int]:
    """Bytes that a run needs on a CPU, by purpose. `work` is not held all the time."""
    models = models_of(model, config)
    trained = [one.num_trained for one in models]
    return {
        "weights": len(models) * model.num_parameters * SIZE,
        "master weights": 4 * sum(one.num_trained for one in models if one.rank),
        "Adam": 8 * sum(trained),
        "work": max(max(trained) * SIZE + activations(model, config), kv_cache(model, config)),
    }


def kv_cache(model: ModelShape, config: "Config") -> int:
    """Bytes for the keys and values of the conversations that are sampled at once."""
    return num_conversations(config) * longest_sequence(config) * model.num_layers * 2 * model.kv_size * SIZE


def activations(model: ModelShape, config: "Config") -> int:
    """Bytes for a micro-batch of the longest sequences: the inputs of all layers, and the inside of one layer."""
    if config.rl_or_sft == "sft":
        num_tokens = config.sft.training.micro_batch_size * config.sft.training.max_length
        recomputed = config.sft.training.enable_gradient_checkpointing
    else:
        num_tokens = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu * longest_sequence(config)
        recomputed = config.actor_rollout_ref.model.enable_gradient_checkpointing
    inside = 4 * model.hidden + 2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate
    kept = model.hidden if recomputed and model.num_parameters > LARGE else inside
    return num_tokens * SIZE * (model.num_layers * kept + inside) + LOGITS


def seconds_per_step(model: ModelShape, config: "Config", num_cores: float) -> float:
    """Roughly, on a CPU: per token one pass to sample and three to learn, with two operations per parameter each."""
    if config.rl_or_sft == "sft":
        num_tokens = config.sft.training.train_batch_size * config.sft.training.max_length
    else:
        num_tokens = config.es_manager.train.env_groups * config.es_manager.train.group_size * longest_sequence(config)
    return 8 * model.num_parameters * num_tokens * TYPICAL / (num_cores * CORE_FLOPS)
