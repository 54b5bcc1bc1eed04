"""From what a user typed to one resolved, checked config, with the origin of every value.

    resolved = resolve(["sokoban", "training.n_rollout=8"])                     # the v1 command line
    resolved = resolve(["trainer.test_freq=5"], config_name="_2_sokoban")       # a recipe
    resolved.config.trainer.test_freq, resolved.origins["trainer.test_freq"]    # 5, "command line"
    training_config("FrozenLakeV1").agent_proxy.max_actions_per_turn            # 1: `train.sh frozenlake`

Each of these overrides the one before: schema defaults, v1 defaults, settings that come with `pocket`
(`pocket_defaults`), recipe, environment variables, command line. Values that follow from several keys come last, and
never replace a typed key. `run.prepare` does the same and also looks at the runs on disk that a model comes from.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragen.config import derive, devices, keys, model_name, pocket_defaults, unused_keys, v1
from ragen.config.overrides import (
    COMMAND_LINE,
    Typed,
    read_overrides,
    read_variables,
    split_environment,
    variable_names,
)
from ragen.config.provenance import TracedTree
from ragen.config.recipe import compose_recipe, is_packaged, recipe_of
from ragen.config.schema import Config
from ragen.config.tree import leaves, value_at
from ragen.config.validate import check_ranges, validate
from ragen.errors import ConfigError, refused, shown

BASE_MODEL = "sft.training.base_model"
ACTOR = "actor_rollout_ref.actor"
USE_REF = f"{ACTOR}.use_ref"


@dataclass
class Resolved:
    """A config ready to run, and where its values came from."""

    config: Config
    start: str  # the environment or recipe it started from
    origins: dict[str, str]  # dotted key -> origin, for every value that is not the default
    no_effect: dict[str, str]  # keys that the user set and that change nothing -> why
    notes: list[str]  # what is allowed and probably not intended
    typed: Collection[str] = ()  # tree keys that the user set
    models: Mapping[str, str] = field(default_factory=dict)  # tree keys that name a model -> what the user calls them

    def no_effect_lines(self) -> list[str]:
        """One line for each reason, with its keys."""
        names: dict[str, list[str]] = {}
        for name, why in self.no_effect.items():
            names.setdefault(why, []).append(name)
        return [f"{', '.join(found)}: {why}" for why, found in names.items()]


def resolve(
    arguments: Iterable[str],
    config_name: str | None = None,
    config_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a command. Raises `ConfigError` for anything that cannot work, before any heavy import."""
    environ = os.environ if environ is None else environ
    environment, overrides = split_environment(list(arguments), config_name)
    variables = read_variables(environ, environment) if environment else []
    typed = read_overrides(overrides, environment)

    recipe = "base" if config_name is None else config_name
    tree = TracedTree(compose_recipe(recipe, config_dir), f"recipe {recipe}")
    if environment:
        _apply_v1_defaults(tree, environment)
    assigned = {**_apply(tree, variables, environment), **_apply(tree, typed, environment)}
    kind, is_named = tree.build().rl_or_sft, "model_path" in assigned
    if kind == "sft_then_rl":
        _name_one_model(tree, assigned)
    elif kind == "sft" and is_named and BASE_MODEL not in assigned:
        typed_as = tree.name("model_path")
        tree.set(BASE_MODEL, tree.build().model_path, f"derived: {typed_as}", typed_as)
    elif not is_named and (environment or config_name is None):
        default = model_name.QWEN if environment else tree.build().model_path
        name, why = model_name.choose(environ, default)
        tree.set("model_path", name, f"derived: {why}")
    pocket_notes = _apply_pocket_defaults(tree, assigned, is_packaged(recipe, config_dir))

    config = tree.build()
    check_ranges(config, tree.name)
    _apply_derived(tree, config, environment, {item.key: item for item in [*variables, *typed]}, assigned)
    _divide_groups(tree, config, assigned)
    num_gpus = config.sft.training.num_gpus if kind == "sft" else config.trainer.n_gpus_per_node
    listed = config.system.CUDA_VISIBLE_DEVICES
    if devices.KEY not in assigned and (chosen := devices.choose(listed, num_gpus, environ)):
        tree.set(devices.KEY, *chosen)
    _apply_fine_tuning(tree, config, assigned)

    config = tree.build()
    notes = validate(config, tree.name)
    no_effect = _without_effect([*variables, *typed], tree.recipe_keys(), assigned, leaves(config))
    origins = _marked(tree.origins(), assigned, no_effect, kind) | _derive_use_ref(tree, config)
    return Resolved(
        config=config,
        start=f"environment {environment} (v1 defaults)" if environment else f"recipe {recipe}",
        origins=origins,
        no_effect=no_effect,
        notes=[*pocket_notes, *notes] + ([] if environment else _unused_variables(environ)),
        typed=assigned.keys(),
        models={key: tree.name(key) for key in (derive.MODELS if kind == "rl" else (BASE_MODEL,))},
    )


def training_config(tag: str) -> Config:
    """The config that a tag is trained with: its v1 environment, the recipe that names it, or the tree's defaults."""
    for environment, start in v1.ENVIRONMENTS.items():
        if start.tag == tag:
            # With its model named: `pocket` would choose another board.
            return resolve([environment, f"model.base_model={model_name.QWEN}"], environ={}).config
    return resolve([], config_name=recipe_of(tag) or "base", environ={}).config


# --- defaults and overrides ---------------------------------------------------------------------------------------


def _apply_v1_defaults(tree: TracedTree, environment: str) -> None:
    names = {target: key for key, spec in v1.KEYS.items() for target in spec.targets}
    for key, value in v1.defaults(environment).items():
        tree.set(key, value, f"v1 default ({environment})", names.get(key))


def _apply(tree: TracedTree, items: Iterable[Typed], environment: str | None) -> dict[str, Typed]:
    """Set what was typed; return tree key -> the item that set it. Two items must not disagree, in any order."""
    assigned: dict[str, tuple[Any, Typed]] = {}
    for item in items:
        is_v1 = keys.is_v1_only(item.key)
        for key, value in _tree_values(tree, item, environment).items():
            if key in assigned and (assigned[key][0] != value or assigned[key][1].delete != item.delete):
                raise _conflict(key, *assigned[key], value, item)
            assigned[key] = (value, item)
            if item.delete and not is_v1:
                if item.value is not None:
                    tree.expect(key, item.value, item.key)
                tree.reset(key)
            else:
                note = f": {item.key}={shown(item.value)}" if is_v1 and not item.delete else ""
                tree.set(key, value, f"v1 default: ~{item.key}" if item.delete else f"{item.origin}{note}", item.name)
    return {key: item for key, (_, item) in assigned.items() if not item.delete}


def _tree_values(tree: TracedTree, item: Typed, environment: str | None) -> dict[str, Any]:
    if not keys.is_v1_only(item.key):
        return {item.key: None if item.delete else item.value}
    if not item.delete:
        return v1.translate(item.key, item.value, environment)
    if item.value is not None:
        for key, value in v1.translate(item.key, item.value, environment).items():
            tree.expect(key, value, item.key)
    return v1.default_values(item.key, environment)


def _conflict(key: str, before: Any, first: Typed, value: Any, second: Typed) -> ConfigError:
    message = f"{first.name} and {second.name} both set {key}, to {shown(before)} and {shown(value)}"
    for deletion, other in ((first, second), (second, first)):
        if deletion.delete:
            message = f"~{deletion.key} resets {key}, and {other.name} sets it"
    return ConfigError(f"{message}: keep one of them", key=second.name, code="conflict")


def _name_one_model(tree: TracedTree, assigned: Mapping[str, Typed]) -> None:
    """With `rl_or_sft=sft_then_rl` one model is fine-tuned, and RL starts from the result: any key may name it."""
    kind, models, recipe_keys = "with rl_or_sft=sft_then_rl", (BASE_MODEL, *derive.MODELS), tree.recipe_keys()
    named = [key for key in models if key in assigned] or [key for key in models if key in recipe_keys] or [BASE_MODEL]
    config, first = tree.build(), tree.name(named[0])
    model = value_at(config, named[0])
    for key in named[1:]:
        if value_at(config, key) != model:
            why = f"{first} is {shown(model)}; {kind} one model is fine-tuned and then trained: name it once"
            raise refused(tree.name(key), value_at(config, key), f"{why}, as {BASE_MODEL}", code="two-models")
    for key in models:  # `model_path` comes before the paths that follow it
        if value_at(tree.build(), key) != model:
            tree.set(key, model, f"derived: {first}, {kind}")


def _apply_pocket_defaults(tree: TracedTree, assigned: Mapping[str, Typed], packaged: bool) -> list[str]:
    """The settings that come with the embedded model, where nothing else was stated; returns notes."""
    config = tree.build()
    if config.model_path not in pocket_defaults.NAMES or config.rl_or_sft == "sft":
        return []
    model, of_recipe = config.model_path, set(tree.recipe_keys())
    stated = {*assigned, *of_recipe}
    own = {*assigned} if packaged else stated
    boards = {key.split(".")[1] for key in own if key.startswith("custom_envs.")}
    tags = {key: value_at(config, key) for key in (pocket_defaults.TRAIN_TAGS, pocket_defaults.VAL_TAGS)}
    notes = []
    train_tags, val_tags = tags.values()
    group_size = config.es_manager.train.group_size if "es_manager.train.group_size" in stated else None
    for key, value in pocket_defaults.settings(train_tags, val_tags, boards, group_size).items():
        is_board = key in tags and key not in own
        other = pocket_defaults.GIVES_WAY_TO.get(key)
        if (key in stated and not is_board) or (other in stated and value_at(config, str(other))):
            continue
        if key in of_recipe and value != tags[key]:
            why = f"instead of [{', '.join(tags[key])}] of {tree.recipe}: {model} knows bare grids only"
            notes.append(f"{key}={shown(value)}, {why}")
            tree.set(key, value, f"comes with {model}, {why}")
        elif key not in of_recipe:
            tree.set(key, value, f"comes with {model}")
    config = tree.build()
    batch = derive.samples_per_step(config)
    if pocket_defaults.MINI_BATCH not in stated and 0 < batch < config.ppo_mini_batch_size:
        tree.set(pocket_defaults.MINI_BATCH, batch, f"comes with {model}, at most the samples of a step")
    played = [tag for key in tags for tag in value_at(config, key)]
    return [*notes, *pocket_defaults.notes(model, played)]


# --- values that follow from others -------------------------------------------------------------------------------


def _apply_derived(
    tree: TracedTree, config: Config, environment: str | None, typed: Mapping[str, Typed], assigned: Mapping[str, Typed]
) -> None:
    values = {key: item.value for key, item in typed.items() if key in v1.KEYS and not item.delete}
    # Settings that come with the embedded model override the v1 defaults, and what follows from these.
    start = None if config.model_path in pocket_defaults.NAMES else environment
    for key, derived in v1.derived(v1.Known(start, values, config, assigned.keys())).items():
        sources = [typed[source] for source in derived.sources if source in values]
        if key not in assigned or _overrules(sources, assigned[key]):
            tree.set(key, derived.value, f"v1: {derived.why}", sources[0].name if sources else None)
        elif not _overrules([assigned[key]], *sources):
            _check_agreement(key, derived, sources, assigned[key])


def _overrules(upper: Iterable[Typed], *lower: Typed) -> bool:
    """The command line overrides environment variables."""
    from_command_line = any(item.origin == COMMAND_LINE for item in upper)
    return from_command_line and bool(lower) and all(item.origin != COMMAND_LINE for item in lower)


def _check_agreement(key: str, derived: v1.Derived, sources: list[Typed], typed: Typed) -> None:
    value = v1.translate(typed.key, typed.value, None)[key] if keys.is_v1_only(typed.key) else typed.value
    if value != derived.value:
        names = " and ".join(item.name for item in [*sources, typed])
        message = f"{names} both set {key}, to {shown(derived.value)} ({derived.why}) and {shown(value)}"
        raise ConfigError(f"{message}: keep one of them", key=typed.name, code="conflict")


def _divide_groups(tree: TracedTree, config: Config, assigned: Mapping[str, Typed]) -> None:
    """With only the number of groups changed, tags keep the shares that the recipe gives them."""
    for split, envs in (("train", config.es_manager.train), ("val", config.es_manager.val)):
        key, sizes = f"es_manager.{split}.env_configs.n_groups", envs.env_configs.n_groups
        typed = any(name in assigned for name in (key, f"es_manager.{split}.env_configs.tags"))
        if len(sizes) > 1 and not typed and min(sizes) > 0 and len(sizes) <= envs.env_groups != sum(sizes):
            divided = derive.in_proportion(envs.env_groups, sizes)
            tree.set(key, divided, f"derived: es_manager.{split}.env_groups, divided as {shown(sizes)}")


def _apply_fine_tuning(tree: TracedTree, config: Config, assigned: Mapping[str, Typed]) -> None:
    """Fine-tuning takes names, model and devices from `sft.*`, before RL those of RL; its boards from validation."""
    if config.rl_or_sft == "rl":
        return
    training = config.sft.training
    of_data = {"sft.env_type": (derive.sft_env_type(config), "the environment of es_manager.val")}
    with_rl = {"sft.training.num_gpus": (config.trainer.n_gpus_per_node, "trainer.n_gpus_per_node")}
    alone = {
        "model_path": (training.base_model, f"{BASE_MODEL}, with the adapter merged in"),
        "trainer.project_name": (training.project_name, "sft.training.project_name"),
        "trainer.experiment_name": (training.experiment_name, "sft.training.experiment_name"),
        "trainer.logger": (training.logger, "sft.training.logger"),
        "trainer.n_gpus_per_node": (training.num_gpus, "sft.training.num_gpus"),
        "trainer.default_local_dir": (derive.sft_folder(config), "sft.output_dir"),
    }
    for key, (value, why) in (of_data | (alone if config.rl_or_sft == "sft" else with_rl)).items():
        typed = assigned.get(key)
        if typed is not None and typed.value != value:
            problem = f"with rl_or_sft={config.rl_or_sft} it is {shown(value)}, from {why}"
            raise refused(typed.name, typed.value, f"{problem}: leave it out, or change that", code="fine-tuning")
        tree.set(key, value, f"derived: {why}")
    for key, value in derive.sft_board(config).items():
        if key not in assigned:
            tree.set(key, value, "derived: the boards of validation")


def _derive_use_ref(tree: TracedTree, config: Config) -> dict[str, str]:
    """`use_ref` says whether there is a reference model; setting it neither adds nor removes one."""
    reference = derive.reference_model(config)
    if tree.was_set(USE_REF) and reference.needed and not config.actor_rollout_ref.actor.use_ref:
        why = f"there is a {reference.why}: set its coefficient to 0 as well"
        raise refused(USE_REF, False, why, code="reference-model")
    config.actor_rollout_ref.actor.use_ref = reference.needed
    return {USE_REF: f"derived: {reference.why}"}


# --- what changes nothing -----------------------------------------------------------------------------------------


def _without_effect(
    typed: list[Typed], recipe_keys: list[str], assigned: Mapping[str, Typed], values: Mapping[str, Any]
) -> dict[str, str]:
    rl_or_sft, steps = values["rl_or_sft"], assigned.get(unused_keys.BUDGET)
    found = {
        item.name: unused_keys.reason(item.key, rl_or_sft) or unused_keys.without_adapter(item.key, values)
        for item in typed
        if not item.delete
    }
    found |= {key: keys.no_effect(key) for key in recipe_keys}
    if steps is not None and rl_or_sft != "sft":
        found |= {item.name: f"{steps.name} is given" for item in typed if item.key == "training.total_epochs"}
    found |= {item.name: why for key, item in assigned.items() if (why := unused_keys.of_another_game(key, values))}
    return {name: reason for name, reason in found.items() if reason}


def _marked(
    origins: dict[str, str], assigned: Mapping[str, Typed], no_effect: Mapping[str, str], rl_or_sft: str
) -> dict[str, str]:
    """The origins of values, with a mark on those without effect."""
    idle = [key for key in origins if key in assigned and assigned[key].name in no_effect]
    budget = {unused_keys.BUDGET: "without effect: the data and sft.training.epochs decide"}
    return origins | {key: f"{origins[key]}, without effect" for key in idle} | (budget if rl_or_sft == "sft" else {})


def _unused_variables(environ: Mapping[str, str]) -> list[str]:
    names = ", ".join(variable_names(environ))
    return [f"{names}: variables are read only with an environment name (train.sh sokoban)"] if names else []
