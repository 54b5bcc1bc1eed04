"""Numbers and settings that follow from a config, each defined once: the plan prints what the trainer does.

updates_per_step(config), reference_model(config).needed, rules(config)
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from math import ceil
from pathlib import PurePath
from typing import Any, NamedTuple

from ragen.agent.rules import AgentRules
from ragen.algo.filter import FilterRule
from ragen.config.schema import Config
from ragen.env.base import Tag
from ragen.env.registry import make
from ragen.env.solve import Budget
from ragen.errors import refused


class Need(NamedTuple):
    """Whether a model is needed, and why."""

    needed: bool
    why: str


def reference_model(config: Config) -> Need:
    """The frozen reference exists only for a KL term that counts."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef != 0:
        return Need(True, f"KL loss with coefficient {actor.kl_loss_coef:g}")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0:
        return Need(True, f"KL in the reward with coefficient {algorithm.kl_ctrl.kl_coef:g}")
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        return Need(False, "the KL coefficient is 0")
    return Need(False, "no KL term")


def reference_is_actor(config: Config) -> bool:
    """An actor with an adapter is its own reference, with the adapter off: no second model."""
    return config.actor_rollout_ref.model.lora_rank > 0


def critic_model(config: Config) -> Need:
    estimator = config.algorithm.adv_estimator
    needed = estimator == "gae"
    return Need(needed, f"adv_estimator {estimator} needs {'' if needed else 'no '}values")


def episodes_per_step(config: Config) -> int:
    return config.es_manager.train.env_groups * config.es_manager.train.group_size


def num_further_rounds(config: Config) -> int:
    """How often a step may play further levels, because too few groups vary."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.rollout_filter_resample_rounds * rollout.rollout_filter_resample


def in_proportion(total: int, sizes: Sequence[int]) -> list[int]:
    """A total divided as `sizes` are, by largest remainder, each at least 1 if possible: 5 as [256, 256] is [3, 2]."""
    exact = [Fraction(total * size, sum(sizes)) for size in sizes]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    while 0 in parts and max(parts) > 1:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return parts


def samples_per_step(config: Config) -> int:
    """Most rows of the training batch before the filter: windowed contexts make one for each turn."""
    per_episode = 1 if config.agent_proxy.context_window_mode == "full" else config.agent_proxy.max_turn
    return episodes_per_step(config) * per_episode


def turns_text(config: Config) -> str:
    """The factor by which windowed contexts multiply the samples, for a message."""
    full = config.agent_proxy.context_window_mode == "full"
    return "" if full else f" x up to {config.agent_proxy.max_turn} turns"


def filter_rule(config: Config) -> FilterRule:
    rollout = config.actor_rollout_ref.rollout
    return FilterRule(
        strategy=rollout.rollout_filter_strategy,
        value=rollout.rollout_filter_value,
        largest=rollout.rollout_filter_type == "largest",
        include_zero=rollout.rollout_filter_include_zero,
        prob_mode=rollout.rollout_filter_top_p_prob_mode,
        selection_eps=rollout.rollout_filter_selection_eps,
    )


def analysis_shape(config: Config) -> tuple[int, int]:
    """Groups and group size of a gradient analysis: those of training unless given."""
    trainer, train = config.trainer, config.es_manager.train
    num_groups = trainer.gradient_analysis_env_groups or train.env_groups
    return num_groups, trainer.gradient_analysis_group_size or train.group_size


def has_analysis_batch(config: Config) -> bool:
    """Whether a gradient analysis plays a separate batch, because its shape is not that of training."""
    return analysis_shape(config) != (config.es_manager.train.env_groups, config.es_manager.train.group_size)


def is_analysis_step(config: Config, step: int) -> bool:
    """Step 1, and every `gradient_analysis_every` steps after it."""
    every = config.trainer.gradient_analysis_every
    return config.trainer.gradient_analysis_mode and every > 0 and (step - 1) % every == 0


MERGED = "merged_model"  # below `sft.output_dir`: the fine-tuned model
MODELS = ("model_path", "actor_rollout_ref.model.path", "critic.model.path")  # keys that name a model in RL
BANDITS = ("bandit", "two_armed_bandit")
SFT_ENV_TYPES = {"sokoban": "sokoban", "frozen_lake": "frozenlake"} | {name: name for name in BANDITS}


def sft_env_type(config: Config) -> str:
    """The game of the fine-tuning data: the one in which the result is validated."""
    tags = [tag for tag in config.es_manager.val.env_configs.tags if tag in config.custom_envs]
    types = sorted({config.custom_envs[tag].env_type for tag in tags})
    if len(types) > 1 or not set(types) <= set(SFT_ENV_TYPES):
        why = f"there is no fine-tuning data for {', '.join(types)}; validate in one of {', '.join(SFT_ENV_TYPES)}"
        raise refused("rl_or_sft", config.rl_or_sft, why, code="no-demonstrations")
    return SFT_ENV_TYPES[types[0]] if types else config.sft.env_type


def sft_tag(config: Config) -> tuple[str, Tag]:
    """The tag whose levels are demonstrated: the first validated one, with the boards that `sft.*` describes."""
    name = config.es_manager.val.env_configs.tags[0]
    tag, board = config.custom_envs[name], getattr(config.sft, sft_env_type(config), None)
    settings = {} if board is None else {spec.name: getattr(board, spec.name) for spec in fields(board)}
    return name, replace(tag, env_config=(tag.env_config or {}) | settings)


def sft_folder(config: Config) -> str:
    """Where fine-tuning writes its run: checkpoints, metrics and report."""
    return str(PurePath(config.sft.output_dir, "lora_weights"))


def sft_board(config: Config) -> dict[str, Any]:
    """The boards of validation as `sft.*` keys; empty if the game has none or the tag cannot be made."""
    game, name = sft_env_type(config), config.es_manager.val.env_configs.tags[0]
    board = getattr(config.sft, game, None)
    if board is None or name not in config.custom_envs:
        return {}
    try:
        settings = make(config.custom_envs[name]).config
    except ValueError:
        return {}
    values = {spec.name: getattr(settings, spec.name) for spec in fields(board)}
    if game == "sokoban":
        values["dim_x"], values["dim_y"] = settings.size
    return {f"sft.{game}.{name}": value for name, value in values.items()}


def updates_per_step(config: Config) -> int:
    """Optimizer steps per training step when the filter keeps everything."""
    actor = config.actor_rollout_ref.actor
    return ceil(samples_per_step(config) / actor.ppo_mini_batch_size) * actor.ppo_epochs


def budget(config: Config, tag: str) -> Budget:
    """What the agent may do in one episode."""
    return Budget(
        turns=config.agent_proxy.max_turn,
        actions_per_turn=config.agent_proxy.max_actions_per_turn,
        actions=config.custom_envs[tag].max_actions_per_traj,
    )


def rules(config: Config) -> AgentRules:
    """The rules of the run for its agents."""
    proxy = config.agent_proxy
    return AgentRules(
        max_turn=proxy.max_turn,
        max_actions_per_turn=proxy.max_actions_per_turn,
        action_sep=proxy.action_sep,
        think=proxy.enable_think,
        format_penalty=config.es_manager.format_penalty,
        context_window_mode=proxy.context_window_mode,
        max_context_window=proxy.max_context_window,
        prompt_style=proxy.prompt_style,
    )
