"""The plan that `--dry-run` prints: what follows from the resolved tree, the tree as YAML, where its values came from.

    print(explain(resolve(["sokoban"])))

The whole text is YAML; all but the tree is comments. Derived numbers come first, then the tree, with its longest
sections at the end. Where fine-tuning writes depends on the runs on disk, so the caller passes it in (`Tuning`).
"""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from ragen.config import derive
from ragen.config.compose import Resolved
from ragen.config.schema import Config
from ragen.config.tree import to_dict
from ragen.env.baseline_budget import MAX_LEVELS, baselines_within_budget
from ragen.env.registry import make
from ragen.env.solve import overlap

MAX_TRAIN_LEVELS = 10_000  # generated to count validation levels among them
LAST_SECTIONS = ("custom_envs", "sft")
COMMENT_WIDTH = 100


class Tuning(NamedTuple):
    """Where fine-tuning writes or has written, and whether it has finished there."""

    output: Path
    is_finished: bool = False


def explain(
    resolved: Resolved, stage: str | None = None, tuning: Tuning | None = None, memory: Sequence[str] = ()
) -> str:
    """The plan of a run; of one half of `rl_or_sft=sft_then_rl` if a stage, `sft` or `rl`, is named.

    `memory` are lines on the GPU's, where one is known.
    """
    lines = [f"# start: {_one_line(resolved.start)}"]
    for title, section in (
        ("derived", [*derived_lines(resolved.config, stage, tuning), *memory]),
        ("notes", resolved.notes),
        ("keys without effect", resolved.no_effect_lines()),
    ):
        lines += ["", f"# {title}:", *(row for line in section or ["none"] for row in _comment(line))]
    lines += ["", "# Values that were stated, or differ from the default, say where they came from.", ""]
    lines += _tree_lines(_reading_order(resolved.config), resolved.origins)
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        _one_line(text),
        COMMENT_WIDTH,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _reading_order(config: Config) -> dict[str, Any]:
    """The whole tree, tags in use first, long sections last."""
    tree = to_dict(config)
    used = {*config.es_manager.train.env_configs.tags, *config.es_manager.val.env_configs.tags}
    tree["custom_envs"] = dict(sorted(tree["custom_envs"].items(), key=lambda entry: entry[0] not in used))
    return dict(sorted(tree.items(), key=lambda entry: entry[0] in LAST_SECTIONS))


def derived_lines(config: Config, stage: str | None = None, tuning: Tuning | None = None) -> Iterator[str]:
    """What the numbers of the tree add up to."""
    tuning = tuning or Tuning(Path(config.sft.output_dir))
    if config.rl_or_sft == "sft":
        yield from fine_tuning_lines(config, tuning.output)
    elif config.rl_or_sft == "sft_then_rl":
        yield from stage_lines(config, stage, tuning)
    else:
        yield from training_lines(config)
    yield from success_lines(config, has_training="sft" not in (config.rl_or_sft, stage))


def training_lines(config: Config) -> Iterator[str]:
    """What reinforcement learning does."""
    reference, critic = derive.reference_model(config), derive.critic_model(config)
    windowed, train = derive.turns_text(config), config.es_manager.train
    yield f"episodes per step: {_episodes(train)}"
    if num_rounds := derive.num_further_rounds(config):
        most = num_rounds * derive.episodes_per_step(config)
        until = f"{num_rounds} rounds, until {train.env_groups} groups vary"
        yield f"further episodes per step: at most {most} ({until})"
    if windowed:
        yield f"samples per step: at most {derive.samples_per_step(config)} ({_shape(train)}{windowed})"
    at_most = "at most " if windowed else ""
    yield f"updates per step: {at_most}{derive.updates_per_step(config)} (when the filter keeps every group)"
    yield f"training steps: {config.trainer.total_training_steps}"
    yield f"episodes per validation: {_episodes(config.es_manager.val)}"
    own = "the actor without its adapter" if derive.reference_is_actor(config) else "yes"
    yield f"reference model: {own if reference.needed else 'no'}, {reference.why}"
    yield f"critic: {'yes' if critic.needed else 'no'}, {critic.why}"
    yield from adapter_lines(config)


def stage_lines(config: Config, stage: str | None, tuning: Tuning) -> Iterator[str]:
    """Fine-tuning, its result, and reinforcement learning, in that order; or one of them."""
    if stage != "rl" and tuning.is_finished:
        yield f"sft: already finished with these settings, in {tuning.output}"
    elif stage != "rl":
        yield from (f"sft: {line}" for line in fine_tuning_lines(config, tuning.output))
    if stage != "sft":
        is_missing = stage == "rl" and not tuning.is_finished
        model = tuning.output / derive.MERGED
        yield f"rl: starts from {model}" + (", which does not exist yet: run --stage sft first" * is_missing)
        yield from (f"rl: {line}" for line in training_lines(config))


def adapter_lines(config: Config) -> Iterator[str]:
    """Which models train only an adapter."""
    has_critic = derive.critic_model(config).needed
    for who, model in (("actor", config.actor_rollout_ref.model), ("critic", config.critic.model)):
        if model.lora_rank > 0 and (who == "actor" or has_critic):
            targets = model.target_modules if isinstance(model.target_modules, str) else ", ".join(model.target_modules)
            yield f"{who}: only an adapter is trained, rank {model.lora_rank}, alpha {model.lora_alpha}, on {targets}"


def fine_tuning_lines(config: Config, output: Path) -> Iterator[str]:
    """The steps of supervised fine-tuning."""
    data, training = config.sft.data_generation, config.sft.training
    rank, tag = training.lora_rank, config.es_manager.val.env_configs.tags[0]
    yield (
        f"data: {data.train_size} solved levels of {tag}, and {data.test_size} more to test on, in "
        f"{output / data.data_dir / config.sft.env_type}"
    )
    yield (
        f"training: {training.epochs} epochs in batches of {training.train_batch_size} answers, "
        + (f"adapters of rank {rank} on {training.base_model}" if rank else f"all weights of {training.base_model}")
        + f", in {output / PurePath(derive.sft_folder(config)).name}"
    )
    yield f"result: the epoch with the lowest loss on the test levels, merged, in {output / derive.MERGED}"
    yield f"validation of the result by rollouts: {_episodes(config.es_manager.val)}"


def success_lines(config: Config, has_training: bool) -> Iterator[str]:
    """The success of random and of perfect play, between which results lie, and how many levels are also trained."""
    first, played = config.seed.val, config.es_manager.val.env_configs
    for tag, size in zip(played.tags, played.n_groups, strict=True):
        env, seeds = make(config.custom_envs[tag]), range(first, first + size)
        first += size
        limit = derive.budget(config, tag)
        baselines = baselines_within_budget(env, seeds, "val", limit)
        players = {"random": baselines.random, "optimal": baselines.optimal}
        known = {player: success for player, success in players.items() if not isinstance(success, str)}
        if known:
            rates = ", ".join(f"{player} play in {success:.1%}" for player, success in known.items())
            measured = f"the first {baselines.num_levels} of {size}" if baselines.num_levels != size else size
            yield (
                f"{tag}: {rates.replace(' in ', ' succeeds in ', 1)} of {measured} validation levels "
                f"({limit.turns} turns of up to {limit.actions_per_turn}, at most {limit.total} actions)"
            )
        for player, reason in players.items():
            if isinstance(reason, str):
                yield f"{tag}: {player} play: unknown, because {reason}"
        if has_training and tag in config.es_manager.train.env_configs.tags:
            yield f"{tag}: {_overlap(config, env, seeds[:MAX_LEVELS])}"


def _overlap(config: Config, env: Any, seeds: range) -> str:
    num_levels = config.trainer.total_training_steps * config.es_manager.train.env_groups
    num_levels = min(num_levels, config.data.train_data_num or num_levels, MAX_TRAIN_LEVELS)
    shared = overlap(env, range(config.seed.train, config.seed.train + num_levels), "train", seeds, "val")
    return f"{shared:.1%} of the validation levels also occur in the first {num_levels} training levels"


def _episodes(envs: Any) -> str:
    return f"{envs.env_groups * envs.group_size} ({_shape(envs)})"


def _shape(envs: Any) -> str:
    return f"{envs.env_groups} groups x {envs.group_size}"


# --- the tree as YAML -----------------------------------------------------------------------------------------------


def _tree_lines(tree: dict[str, Any], origins: dict[str, str], prefix: str = "", depth: int = 0) -> Iterator[str]:
    for name, value in tree.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(name)}:"
            yield from _tree_lines(value, origins, f"{key}.", depth + 1)
            continue
        origin = f"  # {_one_line(origins[key])}" if key in origins else ""
        yield f"{indent}{_scalar(name)}: {_scalar(value)}{origin}"


def _one_line(text: str) -> str:
    """Text for a comment: no line breaks, nothing that YAML cannot read."""
    return "".join(character if character.isprintable() else " " for character in text)


class _OneLineDumper(yaml.SafeDumper):
    """Writes text that YAML would spread over lines in double quotes, with escapes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_OneLineDumper.add_representer(str, _represent_text)


def _scalar(value: Any) -> str:
    """A value on one line, so that its origin can stand beside it."""
    text = yaml.dump(value, Dumper=_OneLineDumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
