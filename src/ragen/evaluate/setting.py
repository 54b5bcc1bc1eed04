"""What is played: from the options of a command line to resolved configs, one for each limit of turns.

    for setting in settings(Wanted(models=[local_model("pocket")], max_turns=(5, 25)), ["seed.val=7"]):
        setting.max_turn, setting.config, setting.notes

By default the first model decides: a checkpoint is evaluated in the game and with the rules of its training run, the
embedded model in those it knows, every other model with recipe `eval`. Naming an environment that the run plays, by its
tag or its game, changes none of that; any other environment brings its own rules. All models of a call get the same
setting, so that they can be compared. If the first model is what a run began from, the run's checkpoint decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen.command_hint import hint
from ragen.config import derive, pocket_defaults, v1
from ragen.config.compose import Resolved
from ragen.config.quoting import quoted
from ragen.config.recipe import compose_recipe, recipe_of
from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.env.base import SPLITS
from ragen.env.registry import SHORT_NAMES as ENVIRONMENTS
from ragen.env.registry import catalogue
from ragen.errors import ConfigError, nearest_of
from ragen.evaluate.models import Model
from ragen.run.prepare import prepare
from ragen.store.run_folder import RunFolder

RECIPE = "eval"
GROUPS, SAMPLES = "es_manager.val.env_groups", "es_manager.val.group_size"
TAGS, SHARES = "es_manager.val.env_configs.tags", "es_manager.val.env_configs.n_groups"
TRAINED_TAGS = "es_manager.train.env_configs.tags"
MAX_TURN, LENGTH = "agent_proxy.max_turn", "actor_rollout_ref.rollout.max_model_len"
TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
DO_SAMPLE = "actor_rollout_ref.rollout.val_kwargs.do_sample"
BATCH_SIZES = ("data.val_batch_size", "training.val_batch_size")
OPTIONS = {GROUPS: "--episodes", SAMPLES: "--samples", TEMPERATURE: "--temperature", MAX_TURN: "--max-turns"}
MODE, TUNED = "rl_or_sft", "sft.training.base_model"
RULES = (
    *(f"agent_proxy.{name}" for name in ("prompt_style", "enable_think", "max_turn", "max_actions_per_turn")),
    *(f"agent_proxy.{name}" for name in ("action_sep", "context_window_mode", "max_context_window")),
    "es_manager.format_penalty",
    "actor_rollout_ref.rollout.response_length",
    LENGTH,
)


@dataclass(frozen=True)
class Wanted:
    """The options of a command; None where an option was not given."""

    models: Sequence[Model]
    environments: Sequence[str] = ()
    config_name: str | None = None
    config_dir: str | None = None
    episodes: int | None = None  # levels
    samples: int | None = None  # episodes of each level
    max_turns: Sequence[int] = ()
    temperature: float | None = None
    split: str = "val"

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the options set, and their values."""
        values = {GROUPS: self.episodes, SAMPLES: self.samples, TEMPERATURE: self.temperature}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def deciding_model(self) -> Model:
        """The first model, or the one that began from it."""
        first = self.models[0]
        return next((model for model in self.models if model.compared_with == first.name), first)

    @property
    def run_config(self) -> dict[str, Any]:
        """The stored config of the deciding model's run, by dotted key; empty if it comes from no run."""
        folder = self.deciding_model.run_folder
        return {} if folder is None else leaves(RunFolder(folder).read_config())


@dataclass(frozen=True)
class Setting:
    config: Config
    start: str
    notes: list[str] = field(default_factory=list)

    @property
    def max_turn(self) -> int:
        return self.config.agent_proxy.max_turn


def settings(wanted: Wanted, overrides: Sequence[str] = ()) -> list[Setting]:
    """One setting for each limit of turns, in the order given."""
    typed = _keys(overrides)
    _check(wanted, typed)
    first = _resolve(wanted, overrides)
    notes = _note_other_rules(wanted, first.config)
    if not wanted.max_turns:
        return [Setting(first.config, first.start, notes)]
    found: list[Setting] = []
    for max_turn in wanted.max_turns:
        lifted, lifted_notes = _lift(first.config, max_turn, typed)
        resolved = _resolve(wanted, [*lifted, *overrides])
        found.append(Setting(resolved.config, resolved.start, lifted_notes if found else notes + lifted_notes))
    return found


def _check(wanted: Wanted, typed: set[str]) -> None:
    if wanted.environments and wanted.config_name is not None:
        raise ConfigError(f"--env and --config-name {wanted.config_name} are two starting points: name one")
    if wanted.split not in SPLITS:
        raise ConfigError(f"--split {wanted.split}: must be one of {', '.join(SPLITS)}")
    for key in (GROUPS, SAMPLES):
        if wanted.options.get(key, 1) < 1:
            raise ConfigError(f"{OPTIONS[key]} {wanted.options[key]}: must be at least 1")
    if any(turns < 1 for turns in wanted.max_turns) or len(set(wanted.max_turns)) < len(wanted.max_turns):
        listed = ",".join(map(str, wanted.max_turns))
        raise ConfigError(f"--max-turns {listed}: give different numbers of at least 1, such as 5,25")
    for key in [*wanted.options, *([MAX_TURN] if wanted.max_turns else [])]:
        if key in typed:
            raise ConfigError(f"{OPTIONS[key]} and {key} set the same value: keep one of them")
    for key in ("model_path", "model.base_model", TUNED):
        if key in typed:
            raise ConfigError(f"{key}: name a model without a key, such as `{hint('eval', wanted.models[0].name)}`")


def _resolve(wanted: Wanted, overrides: Sequence[str]) -> Resolved:
    """The config of a run, of environments, or of a recipe, with the options of the command."""
    typed = _keys(overrides)
    options = wanted.options
    if wanted.temperature and DO_SAMPLE not in typed:
        options[DO_SAMPLE] = True  # a setting may be greedy
    run_tags = _tags_of_run(wanted)
    if run_tags:
        return _resolve_run(wanted, run_tags, options, overrides)
    overrides = [f"model_path={quoted(wanted.deciding_model.name)}", *overrides]
    recipe = RECIPE if wanted.config_name is None else wanted.config_name
    if wanted.environments or recipe == RECIPE:
        # Set explicitly: the embedded model has its own numbers, for validation during training.
        val = compose_recipe(RECIPE).es_manager.val
        sizes = {GROUPS: val.env_groups, SAMPLES: val.group_size}
        options = {key: value for key, value in sizes.items() if key not in typed} | options
    if wanted.environments:
        return _resolve_environments(wanted, options, overrides)
    return prepare([*_assigned(options), *overrides], recipe, wanted.config_dir)


def _keys(overrides: Sequence[str]) -> set[str]:
    return {override.lstrip("+~").partition("=")[0].strip() for override in overrides}


def _assigned(options: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in options.items()]


def _tags_and_shares(sizes: Mapping[str, int], options: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The tags, and the levels of each in proportion to `sizes` if only their total was given."""
    tags = [f"{TAGS}=[{','.join(map(quoted, sizes))}]"]
    typed = [value for key, _, value in (override.partition("=") for override in overrides) if key == GROUPS]
    total = int(typed[-1]) if typed and typed[-1].isdigit() else options.get(GROUPS)
    if SHARES in _keys(overrides) or total is None:
        return tags
    if total < len(sizes):
        raise ConfigError(f"--episodes {total}: {len(sizes)} environments need at least one level each")
    return [*tags, f"{SHARES}=[{','.join(map(str, derive.in_proportion(total, list(sizes.values()))))}]"]


def _tags_of_run(wanted: Wanted) -> dict[str, int]:
    """Tag -> levels, if the training run decides: nothing else was named, or only what it plays, by tag or game."""
    if wanted.config_name is not None:
        return {}
    stored = wanted.run_config
    sizes = dict(zip(stored.get(TAGS) or [], stored.get(SHARES) or [], strict=False))
    if not wanted.environments:
        return sizes
    sizes = {tag: sum(sizes.values()) for tag in stored.get(TRAINED_TAGS) or []} | sizes
    games = {name: catalogue()[tag].env_type for name, tag in ENVIRONMENTS.items()}
    first_of_game = {stored.get(f"custom_envs.{tag}.env_type"): tag for tag in reversed(sizes)}
    named = [name if name in sizes else first_of_game.get(games.get(name, "")) for name in wanted.environments]
    found = [tag for tag in named if tag is not None]
    _check_distinct(found)
    return {tag: sizes[tag] for tag in found} if found == named else {}


def _resolve_run(
    wanted: Wanted, tags: Mapping[str, int], options: dict[str, Any], overrides: Sequence[str]
) -> Resolved:
    """The setting of a training run: its stored config is a recipe like any other."""
    model = wanted.deciding_model
    # A config of fine-tuning stays one: as a config of RL it may not be valid. It names its model by another key.
    is_tuning = wanted.run_config.get(MODE) == "sft" and f"{MODE}=rl" not in overrides
    overrides = [f"{TUNED if is_tuning else 'model_path'}={quoted(model.name)}", *overrides]
    if GROUPS not in _keys(overrides):
        options = {GROUPS: sum(tags.values())} | options
    chosen = [] if TAGS in _keys(overrides) else _tags_and_shares(tags, options, overrides)
    resolved = prepare([*_assigned(options), *chosen, *overrides], "config", str(model.run_folder))
    resolved.start = f"the training run {model.run_folder}"
    return resolved


def _note_other_rules(wanted: Wanted, config: Config) -> list[str]:
    """A note if the run does not play the named environments: its rules do not apply then."""
    folder = wanted.deciding_model.run_folder
    if folder is None or not wanted.environments or _tags_of_run(wanted):
        return []
    here, there = leaves(config), wanted.run_config
    changed = [f"{key}={here[key]} (there {there.get(key)})" for key in RULES if here[key] != there.get(key)]
    return [
        f"--env {','.join(wanted.environments)}: the run {folder} plays {', '.join(there.get(TAGS) or [])}. The rules "
        "are those with which the named environment is trained, not those of the run: "
        f"{', '.join(changed) or 'they are the same'}"
    ]


def _resolve_environments(wanted: Wanted, options: Mapping[str, Any], overrides: Sequence[str]) -> Resolved:
    """The setting in which the named environments are trained, with the sizes of recipe `eval`."""
    tags = [tag_of(name, wanted.deciding_model) for name in wanted.environments]
    _check_distinct(tags)
    chosen = [*_assigned(options), *_tags_and_shares(dict.fromkeys(tags, 1), options, overrides)]
    if not _keys(overrides) & set(BATCH_SIZES):
        chosen.append(f"{BATCH_SIZES[0]}=null")  # training has small ones
    found = {tag: _resolve_tag(tag, [f"{TRAINED_TAGS}=[{quoted(tag)}]", *chosen, *overrides]) for tag in tags}
    first, rules = found[tags[0]], vars(derive.rules(found[tags[0]].config))
    for tag in tags[1:]:
        other = vars(derive.rules(found[tag].config)).items()
        different = [
            f"{name} is {rules[name]} for {tags[0]} and {value} for {tag}"
            for name, value in other
            if value != rules[name]
        ]
        if different:
            raise ConfigError(
                f"--env: agents play these under different rules: {', '.join(different)}. Evaluate them one by one"
            )
        first.config.custom_envs[tag] = found[tag].config.custom_envs[tag]
    first.start = f"environment {', '.join(tags)}"
    return first


def _resolve_tag(tag: str, overrides: Sequence[str]) -> Resolved:
    environment = next((name for name, start in v1.ENVIRONMENTS.items() if start.tag == tag), None)
    return prepare([environment, *overrides], environ={}) if environment else prepare(overrides, recipe_of(tag))


def tag_of(name: str, model: Model) -> str:
    """The tag that `--env` means. A game's short name is the board that the model knows."""
    tags = catalogue()
    if name in ENVIRONMENTS:
        tag = ENVIRONMENTS[name]
        return pocket_defaults.TAGS.get(tag, tag) if model.name in pocket_defaults.NAMES else tag
    if name not in tags:
        raise ConfigError(f"--env {name!r}: no such environment{nearest_of(name, [*ENVIRONMENTS, *tags])}")
    return name


def _check_distinct(tags: Sequence[str]) -> None:
    if len(set(tags)) < len(tags):
        raise ConfigError(f"--env: an environment is named twice: {', '.join(tags)}")


def _lift(config: Config, max_turn: int, typed: set[str]) -> tuple[list[str], list[str]]:
    """Overrides for a limit of turns, and notes on what else they change: actions and context grow with the turns."""
    proxy, length = config.agent_proxy, config.actor_rollout_ref.rollout.max_model_len
    before = proxy.max_turn
    limits = {tag: config.custom_envs[tag].max_actions_per_traj for tag in config.es_manager.val.env_configs.tags}
    needed = max_turn * proxy.max_actions_per_turn if max_turn > before else 0
    values = {f"custom_envs.{tag}.max_actions_per_traj": (needed, limit) for tag, limit in limits.items()}
    if proxy.context_window_mode == "full" or derive.rules(config).num_turns_in_view == before:
        values[LENGTH] = (math.ceil(length * max_turn / before), length)
    lifted = {key: (new, old) for key, (new, old) in values.items() if new > old and key not in typed}
    notes = [f"--max-turns {max_turn}: {key} is {new} instead of {old}" for key, (new, old) in lifted.items()]
    return [f"{MAX_TURN}={max_turn}", *(f"{key}={new}" for key, (new, _) in lifted.items())], notes
