"""What is played: from the options of a command line to resolved configs, one for each limit of turns.

    for setting in settings(Wanted(models=[local_model("pocket")], max_turns=(5, 25)), words=["seed.val=7"]):
        setting.max_turn, setting.config, setting.notes

Where nothing else is said, the setting is that of the first model: a checkpoint is evaluated in the game and with the
rules of its training run, the embedded model in those that it knows, every other one with recipe `eval`. To name what
the run plays, by its tag or its game, changes nothing of that; another environment brings rules of its own. All models
of a call get the same setting, or they could not be compared. Where the first one is what a run began from, the run's
checkpoint decides.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen.config import derive, pocket_defaults, v1
from ragen.config.compose import Resolved, resolve
from ragen.config.recipe import compose_recipe
from ragen.config.schema import Config
from ragen.config.tag_defaults import recipe_of
from ragen.config.tree import to_dict
from ragen.env.base import SPLITS
from ragen.env.registry import SHORT_NAMES as ENVIRONMENTS
from ragen.env.registry import catalogue
from ragen.errors import ConfigError, nearest_of
from ragen.evaluate.models import Model
from ragen.store.run_folder import RunFolder

RECIPE = "eval"
GROUPS, SAMPLES = "es_manager.val.env_groups", "es_manager.val.group_size"
TAGS, SHARES = "es_manager.val.env_configs.tags", "es_manager.val.env_configs.n_groups"
MAX_TURN, LENGTH = "agent_proxy.max_turn", "actor_rollout_ref.rollout.max_model_len"
TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
BATCH_SIZES = ("data.val_batch_size", "training.val_batch_size")
DO_SAMPLE = "actor_rollout_ref.rollout.val_kwargs.do_sample"
TRAINED = "es_manager.train.env_configs.tags"
RULES = (
    *(f"agent_proxy.{name}" for name in ("prompt_style", "enable_think", "max_turn", "max_actions_per_turn")),
    *(f"agent_proxy.{name}" for name in ("action_sep", "context_window_mode", "max_context_window")),
    "es_manager.format_penalty",
    "actor_rollout_ref.rollout.response_length",
    LENGTH,
)
MODE, TUNED = "rl_or_sft", "sft.training.base_model"


@dataclass(frozen=True)
class Wanted:
    """What the options of a command say; None where nothing was said."""

    models: Sequence[Model]
    environments: Sequence[str] = ()
    config_name: str | None = None
    config_dir: str | None = None
    episodes: int | None = None  # levels
    samples: int | None = None  # episodes of each level
    max_turns: Sequence[int] = ()
    temperature: float | None = None
    split: str = "val"


@dataclass(frozen=True)
class Setting:
    config: Config
    start: str
    notes: list[str] = field(default_factory=list)

    @property
    def max_turn(self) -> int:
        return self.config.agent_proxy.max_turn


def settings(wanted: Wanted, words: Sequence[str] = ()) -> list[Setting]:
    """One setting for each limit of turns, in the order given."""
    _check(wanted)
    first = resolve_setting(wanted, words)
    unlike = _unlike_the_run(wanted, first.config)
    if not wanted.max_turns:
        return [_setting(first, unlike)]
    if MAX_TURN in _typed(words):
        raise ConfigError(f"--max-turns and {MAX_TURN} say the same thing: keep one of them")
    found = []
    for max_turn in wanted.max_turns:
        lifted, notes = _lift(first.config, max_turn, _typed(words))
        found.append(_setting(resolve_setting(wanted, [*lifted, *words]), [*([] if found else unlike), *notes]))
    return found


def resolve_setting(wanted: Wanted, words: Sequence[str]) -> Resolved:
    """The config before any limit of turns is lifted."""
    model, typed = deciding(wanted), _typed(words)
    path = "model_path=" + quoted(model.name)
    given = {GROUPS: wanted.episodes, SAMPLES: wanted.samples, TEMPERATURE: wanted.temperature}
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key in typed:
            raise ConfigError(f"{OPTIONS[key]} and {key} say the same thing: keep one of them")
    if wanted.temperature and DO_SAMPLE not in typed:
        given[DO_SAMPLE] = True  # a setting may be greedy
    for key in ("model_path", "model.base_model", TUNED):
        if key in typed:
            raise ConfigError(f"{key}: a model is named without a key, such as `ragen eval {model.name}`")
    of_run = _tags_of_run(wanted)
    if of_run:
        return _of_run(model, of_run, given, words)
    if wanted.environments:
        return _of_environments(wanted, given, [path, *words])
    name = RECIPE if wanted.config_name is None else wanted.config_name
    if name == RECIPE:
        # Written as words: the embedded model brings numbers of its own for validation during training.
        given = _eval_sizes(typed) | given
    return resolve([path, *(f"{key}={value}" for key, value in given.items()), *words], name, wanted.config_dir)


def deciding(wanted: Wanted) -> Model:
    """The first model, or the one that began from it."""
    first = wanted.models[0]
    return next((model for model in wanted.models if model.compared_with == first.name), first)


OPTIONS = {GROUPS: "--episodes", SAMPLES: "--samples", TEMPERATURE: "--temperature"}


def _check(wanted: Wanted) -> None:
    if wanted.environments and wanted.config_name is not None:
        raise ConfigError(f"--env and --config-name {wanted.config_name} are two starting points: name one")
    if wanted.split not in SPLITS:
        raise ConfigError(f"--split {wanted.split}: must be one of {', '.join(SPLITS)}")
    for option, value in (("--episodes", wanted.episodes), ("--samples", wanted.samples)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    if any(turns < 1 for turns in wanted.max_turns) or len(set(wanted.max_turns)) < len(wanted.max_turns):
        listed = ",".join(map(str, wanted.max_turns))
        raise ConfigError(f"--max-turns {listed}: give different numbers of at least 1, such as 5,25")


def _setting(resolved: Resolved, notes: Sequence[str] = ()) -> Setting:
    return Setting(resolved.config, resolved.start, list(notes))


def _typed(words: Sequence[str]) -> set[str]:
    return {word.lstrip("+~").partition("=")[0].strip() for word in words}


def quoted(text: str) -> str:
    """A value that Hydra's grammar takes as it is."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _eval_sizes(typed: set[str]) -> dict[str, int]:
    """How many levels and samples the recipe `eval` has, where the user has not said so."""
    val = compose_recipe(RECIPE).es_manager.val
    return {key: value for key, value in ((GROUPS, val.env_groups), (SAMPLES, val.group_size)) if key not in typed}


def _tags_of_run(wanted: Wanted) -> dict[str, int]:
    """Tag -> levels, where the first model's training run decides: it was not said otherwise, or what it plays was
    named, by tag or by game."""
    folder = deciding(wanted).run_folder
    if folder is None or wanted.config_name is not None:
        return {}
    tree = RunFolder(folder).read_config()
    sizes = dict(zip(value_of(tree, TAGS, []), value_of(tree, SHARES, []), strict=False))
    if not wanted.environments:
        return sizes
    sizes = {tag: sum(sizes.values()) for tag in value_of(tree, TRAINED, [])} | sizes
    named = [_tag_of_run(name, sizes, tree) for name in wanted.environments]
    found = [tag for tag in named if tag is not None]
    _check_once(found)
    return {tag: sizes[tag] for tag in found} if found == named else {}


def _tag_of_run(name: str, tags: Iterable[str], tree: Any) -> str | None:
    """Which of a run's tags a name means: the very one, or the first of that game."""
    if name in tags:
        return name
    game = catalogue()[ENVIRONMENTS[name]].env_type if name in ENVIRONMENTS else None
    played = [tag for tag in tags if value_of(tree, f"custom_envs.{tag}.env_type", "") == game]
    return played[0] if played else None


def _check_once(tags: Sequence[str]) -> None:
    if len(set(tags)) < len(tags):
        raise ConfigError(f"--env: an environment is named twice: {', '.join(tags)}")


def _unlike_the_run(wanted: Wanted, config: Config) -> list[str]:
    """A note, where the named environments are none of the run's: its rules are then not in force."""
    folder = deciding(wanted).run_folder
    if folder is None or not wanted.environments or _tags_of_run(wanted):
        return []
    tree = RunFolder(folder).read_config()
    values = {key: (value_of(to_dict(config), key, None), value_of(tree, key, None)) for key in RULES}
    changed = [f"{key}={here} (there {there})" for key, (here, there) in values.items() if here != there]
    tags = ", ".join(value_of(tree, TAGS, []))
    return [
        f"--env {','.join(wanted.environments)}: the run {folder} plays {tags}. The rules are those with which the "
        f"named environment is trained, and not those of the run: {', '.join(changed) or 'they are the same'}"
    ]


def _of_run(model: Model, tags: Mapping[str, int], given: dict, words: Sequence[str]) -> Resolved:
    """The setting of a training run: its stored config is a recipe like others.

    That of fine-tuning stays one: as a run of RL it might not hold. What it validates is called by another key there.
    """
    folder = model.run_folder
    is_tuned = value_of(RunFolder(folder).read_config(), MODE, "rl") == "sft" and f"{MODE}=rl" not in words
    words = [f"{TUNED if is_tuned else 'model_path'}={quoted(model.name)}", *words]
    given = given if GROUPS in given or GROUPS in _typed(words) else given | {GROUPS: sum(tags.values())}
    options = [f"{key}={value}" for key, value in given.items()]
    if TAGS not in _typed(words):
        options += [f"{TAGS}=[{','.join(map(quoted, tags))}]", *_shares(given, words, list(tags.values()))]
    resolved = resolve([*options, *words], "config", str(folder))
    resolved.start = f"the training run {folder}"
    return resolved


def value_of(tree: Any, key: str, default: Any) -> Any:
    """A value of a stored tree, which may come from another version."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return default if tree is None else tree


# --- environments -------------------------------------------------------------------------------------------------


def _of_environments(wanted: Wanted, given: dict, words: Sequence[str]) -> Resolved:
    """The setting in which the named environments are trained, with the sizes of recipe `eval`."""
    tags = [tag_of(name, deciding(wanted)) for name in wanted.environments]
    _check_once(tags)
    given = _eval_sizes(_typed(words)) | given
    options = [f"{key}={value}" for key, value in given.items()]
    options += [f"{TAGS}=[{','.join(map(quoted, tags))}]", *_shares(given, words, [1] * len(tags))]
    if not _typed(words) & set(BATCH_SIZES):
        options.append(f"{BATCH_SIZES[0]}=null")  # those of training are small
    found = [_from_start(tag, [f"es_manager.train.env_configs.tags=[{quoted(tag)}]", *options, *words]) for tag in tags]
    rules = [derive.rules(resolved.config) for resolved in found]
    for tag, other in zip(tags[1:], rules[1:], strict=True):
        if other != rules[0]:
            different = [name for name in vars(other) if getattr(other, name) != getattr(rules[0], name)]
            listed = ", ".join(
                f"{name} is {getattr(rules[0], name)} for {tags[0]} and {getattr(other, name)} for {tag}"
                for name in different
            )
            raise ConfigError(f"--env: agents play these under different rules: {listed}. Evaluate them one by one")
    config = found[0].config
    for tag, resolved in zip(tags[1:], found[1:], strict=True):
        config.custom_envs[tag] = resolved.config.custom_envs[tag]
    found[0].start = f"environment {', '.join(tags)}"
    return found[0]


def _shares(given: dict, words: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """The levels of each tag, where their total was given and nothing else."""
    if SHARES in _typed(words):
        return []
    typed = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUPS]
    total = int(typed[-1]) if typed and typed[-1].isdigit() else given.get(GROUPS)
    if total is None:
        return []
    if total < len(sizes):
        raise ConfigError(f"--episodes {total}: {len(sizes)} environments need at least one level each")
    return [f"{SHARES}=[{','.join(map(str, derive.in_proportion(total, sizes)))}]"]


def _from_start(tag: str, words: Sequence[str]) -> Resolved:
    for environment, start in v1.ENVIRONMENTS.items():
        if start.tag == tag:
            return resolve([environment, *words], environ={})
    return resolve(list(words), recipe_of(tag))


def tag_of(name: str, model: Model) -> str:
    """The tag that `--env` means. A game's short name is the board that the model knows."""
    tags = catalogue()
    if name in ENVIRONMENTS:
        tag = ENVIRONMENTS[name]
        return pocket_defaults.TAGS.get(tag, tag) if model.is_embedded else tag
    if name not in tags:
        raise ConfigError(f"--env {name!r}: no such environment{nearest_of(name, [*ENVIRONMENTS, *tags])}")
    return name


# --- turns --------------------------------------------------------------------------------------------------------


def _lift(config: Config, max_turn: int, typed: set[str]) -> tuple[list[str], list[str]]:
    """The words for so many turns, and what else they change: actions and context grow with the turns."""
    proxy, before = config.agent_proxy, config.agent_proxy.max_turn
    words, notes = [f"{MAX_TURN}={max_turn}"], []
    needed = max_turn * proxy.max_actions_per_turn
    for tag in config.es_manager.val.env_configs.tags:
        key, limit = f"custom_envs.{tag}.max_actions_per_traj", config.custom_envs[tag].max_actions_per_traj
        if limit < needed and max_turn > before and key not in typed:
            words.append(f"{key}={needed}")
            notes.append(f"--max-turns {max_turn}: {key} is {needed} in place of {limit}")
    length = config.actor_rollout_ref.rollout.max_model_len
    grown = math.ceil(length * max_turn / before)
    sees_all = proxy.context_window_mode == "full" or derive.rules(config).num_turns_in_view == before
    if grown > length and sees_all and LENGTH not in typed:
        words.append(f"{LENGTH}={grown}")
        notes.append(f"--max-turns {max_turn}: {LENGTH} is {grown} in place of {length}")
    return words, notes
