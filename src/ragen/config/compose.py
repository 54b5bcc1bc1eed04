"""From what a user typed to one resolved, checked config, with the origin of every value.

    resolved = resolve(["sokoban", "training.n_rollout=8"])                     # the older dialect
    resolved = resolve(["trainer.test_freq=5"], config_name="_2_sokoban")       # a recipe
    resolved.config.trainer.test_freq, resolved.origins["trainer.test_freq"]    # 5, "command line"

The layers, each over the one before: schema defaults, recipe, dialect defaults, what the embedded model brings along,
environment variables, command line.
Values that follow from several keys come last, and never against a key that was typed.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ragen.config import default_model, derive, devices, keys, model_notes, pocket_defaults, unused_keys, v1
from ragen.config.overrides import COMMAND_LINE, Typed, read_variables, read_words, split_environment, variable_names
from ragen.config.provenance import Layers
from ragen.config.recipe import compose_recipe
from ragen.config.schema import Config
from ragen.config.tree import leaves, value_at
from ragen.config.validate import check_numbers, validate
from ragen.errors import ConfigError, shown

BASE_MODEL = "sft.training.base_model"
USE_REF = "actor_rollout_ref.actor.use_ref"
USE_KL_LOSS, KL_COEF = "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"


@dataclass
class Resolved:
    """A config ready to run, and where its values came from."""

    config: Config
    start: str  # what it started from, in words
    origins: dict[str, str]  # dotted key -> origin, for every value that is not the default
    no_effect: dict[str, str]  # keys that the user set and that change nothing -> why
    notes: list[str]  # what is allowed and probably not meant

    def no_effect_lines(self) -> list[str]:
        """`no_effect` in words: one line for each reason."""
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
    environment, words = split_environment(list(arguments), config_name)
    variables = read_variables(environ, environment) if environment else []
    typed = read_words(words, environment)

    recipe = "base" if config_name is None else config_name
    tree = Layers(compose_recipe(recipe, config_dir), f"recipe {recipe}")
    if environment:
        _apply_dialect_defaults(tree, environment)
    assigned = {**_apply(tree, variables, environment), **_apply(tree, typed, environment)}
    kind, is_named = tree.build().rl_or_sft, "model_path" in assigned
    if kind == "sft_then_rl":
        _name_one_model(tree, assigned, [*tree.recipe_keys(f"recipe {recipe}")])
    elif kind == "sft" and is_named and BASE_MODEL not in assigned:
        typed_as = tree.name("model_path")
        tree.set(BASE_MODEL, tree.build().model_path, f"derived: {typed_as}", typed_as)
    elif environment and not is_named:
        name, why = default_model.choose(environ)
        tree.set("model_path", name, f"derived: {why}")
    _apply_embedded(tree, assigned)

    config = tree.build()
    check_numbers(config, tree.name)
    _apply_derived(tree, config, environment, {item.key: item for item in [*variables, *typed]}, assigned)
    _follow_env_groups(tree, config, assigned)
    _choose_devices(tree, config, assigned, environ)
    _follow_fine_tuning(tree, config, assigned)

    config = tree.build()
    model = "actor_rollout_ref.model.path" if config.rl_or_sft == "rl" else BASE_MODEL
    values = leaves(config)
    notes = validate(config, tree.name)
    notes += model_notes.notes(tree.name(model), values[model], values, assigned)
    recipe_keys = [*tree.recipe_keys(f"recipe {recipe}")]
    no_effect = _without_effect([*variables, *typed], recipe_keys, assigned, values)
    origins = _marked(tree.origins(), assigned, no_effect, config.rl_or_sft) | _derive_use_ref(tree, config)
    return Resolved(
        config=config,
        start=f"environment {environment} (v1 defaults)" if environment else f"recipe {recipe}",
        origins=origins,
        no_effect=no_effect,
        notes=notes + ([] if environment else _unused_variables(environ)),
    )


# --- layers -------------------------------------------------------------------------------------------------------


def _apply_dialect_defaults(tree: Layers, environment: str) -> None:
    names = {target: key for key, spec in v1.KEYS.items() for target in spec.targets}
    for key, value in v1.defaults(environment).items():
        tree.set(key, value, f"v1 default ({environment})", names.get(key))


def _apply(tree: Layers, layer: Iterable[Typed], environment: str | None) -> dict[str, Typed]:
    """Set what one layer says. Returns tree key -> the word that set it.

    Two different words that set one thing to different values are an error, whatever their order.
    """
    assigned: dict[str, tuple[Any, Typed]] = {}
    for item in layer:
        for key, value in _tree_values(tree, item, environment).items():
            if key in assigned and (assigned[key][0] != value or assigned[key][1].delete != item.delete):
                raise _conflict(key, *assigned[key], value, item)
            assigned[key] = (value, item)
            if item.delete and not _is_dialect(item):
                if item.value is not None:
                    tree.expect(key, item.value, item.key)
                tree.reset(key)
            else:
                note = f": {item.key}={shown(item.value)}" if _is_dialect(item) and not item.delete else ""
                tree.set(key, value, f"v1 default: ~{item.key}" if item.delete else f"{item.origin}{note}", item.name)
    return {key: item for key, (_, item) in assigned.items() if not item.delete}


def _name_one_model(tree: Layers, assigned: Mapping[str, Typed], recipe_keys: Iterable[str]) -> None:
    """With `rl_or_sft=sft_then_rl` one model is fine-tuned, and RL starts from the result: name it under any key."""
    named = [key for key in (BASE_MODEL, *derive.MODELS) if key in assigned]
    named = named or [key for key in (BASE_MODEL, *derive.MODELS) if key in recipe_keys] or [BASE_MODEL]
    config, first = tree.build(), named[0]
    model = value_at(config, first)
    for key in named[1:]:
        if value_at(config, key) != model:
            raise ConfigError(
                f"{tree.name(first)}={shown(model)} and {tree.name(key)}={shown(value_at(config, key))}: with "
                f"rl_or_sft=sft_then_rl there is one model, which is fine-tuned and then trained; name it once, as "
                f"{BASE_MODEL}"
            )
    for key in (BASE_MODEL, *derive.MODELS):  # paths that follow `model_path` come after it
        if value_at(tree.build(), key) != model:
            tree.set(key, model, f"derived: {tree.name(first)}, with rl_or_sft=sft_then_rl")


def _apply_embedded(tree: Layers, assigned: Mapping[str, Typed]) -> None:
    """The embedded model's own settings, where the user has not typed others."""
    config = tree.build()
    if config.model_path not in pocket_defaults.NAMES or config.rl_or_sft == "sft":
        return
    # A board whose settings were typed is the one that is meant.
    chosen = {key.split(".")[1] for key in assigned if key.startswith("custom_envs.")}
    tags = (config.es_manager.train.env_configs.tags, config.es_manager.val.env_configs.tags)
    # Who types a KL coefficient wants KL.
    unwanted = {USE_KL_LOSS} if KL_COEF in assigned else set()
    for key, value in pocket_defaults.settings(*tags, keep=chosen).items():
        if key not in assigned and key not in unwanted:
            tree.set(key, value, f"comes with {config.model_path}")


def _is_dialect(item: Typed) -> bool:
    return v1.is_key(item.key) and item.key not in keys.FIELDS


def _tree_values(tree: Layers, item: Typed, environment: str | None) -> dict[str, Any]:
    if not _is_dialect(item):
        return {item.key: None if item.delete else item.value}
    if not item.delete:
        return v1.translate(item.key, item.value, environment)
    if item.value is not None:
        for key, value in v1.translate(item.key, item.value, environment).items():
            tree.expect(key, value, item.key)
    return v1.default_values(item.key, environment)


def _conflict(key: str, before: Any, first: Typed, value: Any, second: Typed) -> ConfigError:
    for deletion, other in ((first, second), (second, first)):
        if deletion.delete:
            return ConfigError(f"~{deletion.key} takes back {key}, and {other.name} sets it: keep one of them")
    return ConfigError(
        f"{first.name} and {second.name} both set {key}, to {shown(before)} and {shown(value)}: keep one of them"
    )


# --- values that follow from others -------------------------------------------------------------------------------


def _apply_derived(
    tree: Layers, config: Config, environment: str | None, typed: Mapping[str, Typed], assigned: Mapping[str, Typed]
) -> None:
    values = {key: item.value for key, item in typed.items() if key in v1.KEYS and not item.delete}
    # What the embedded model brings along stands above the dialect's defaults, also in what follows from them.
    start = None if config.model_path in pocket_defaults.NAMES else environment
    for key, derived in v1.derived(v1.Known(start, values, config, assigned.keys())).items():
        sources = [typed[source] for source in derived.sources if source in values]
        if key not in assigned or _overrules(sources, assigned[key]):
            tree.set(key, derived.value, f"v1: {derived.why}", sources[0].name if sources else None)
        elif not _overrules([assigned[key]], *sources):
            _refuse_contradiction(key, derived, sources, assigned[key])


def _overrules(upper: Iterable[Typed], *lower: Typed) -> bool:
    """The command line stands above the environment variables."""
    from_command_line = any(item.origin == COMMAND_LINE for item in upper)
    return from_command_line and bool(lower) and all(item.origin != COMMAND_LINE for item in lower)


def _refuse_contradiction(key: str, derived: v1.Derived, sources: list[Typed], typed: Typed) -> None:
    translated = v1.translate(typed.key, typed.value, None)[key] if _is_dialect(typed) else typed.value
    if translated != derived.value:
        names = " and ".join(source.name for source in sources)
        raise ConfigError(
            f"{names} and {typed.name} both set {key}, to {shown(derived.value)} ({derived.why}) and "
            f"{shown(translated)}: keep one of them"
        )


def _follow_env_groups(tree: Layers, config: Config, assigned: Mapping[str, Typed]) -> None:
    """Who changes only the number of groups keeps the shares that the recipe gives to its tags."""
    for split, envs in (("train", config.es_manager.train), ("val", config.es_manager.val)):
        key, sizes = f"es_manager.{split}.env_configs.n_groups", envs.env_configs.n_groups
        typed = any(name in assigned for name in (key, f"es_manager.{split}.env_configs.tags"))
        if len(sizes) > 1 and not typed and min(sizes) > 0 and len(sizes) <= envs.env_groups != sum(sizes):
            divided = derive.in_proportion(envs.env_groups, sizes)
            tree.set(key, divided, f"derived: es_manager.{split}.env_groups, divided as {shown(sizes)}")


def _choose_devices(tree: Layers, config: Config, assigned: Mapping[str, Typed], environ: Mapping[str, str]) -> None:
    if devices.KEY in assigned:
        return
    fine_tuning = config.rl_or_sft == "sft"
    num_gpus = config.sft.training.num_gpus if fine_tuning else config.trainer.n_gpus_per_node
    chosen = devices.choose(config.system.CUDA_VISIBLE_DEVICES, num_gpus, environ)
    if chosen is not None:
        tree.set(devices.KEY, *chosen)


def _follow_fine_tuning(tree: Layers, config: Config, assigned: Mapping[str, Typed]) -> None:
    """Fine-tuning is a run like any other, under the names of `sft.*`; what is validated is the model that was tuned.

    Where RL follows it, these are RL's, and both have the same workers. The boards of the data are those of validation,
    unless others were typed.
    """
    if config.rl_or_sft == "rl":
        return
    training = config.sft.training
    of_data = {"sft.env_type": (derive.sft_env_type(config), "the environment of es_manager.val")}
    with_rl = {"sft.training.num_gpus": (config.trainer.n_gpus_per_node, "trainer.n_gpus_per_node")}
    alone = {
        "model_path": (training.base_model, "sft.training.base_model, with the adapter merged in"),
        "trainer.project_name": (training.project_name, "sft.training.project_name"),
        "trainer.experiment_name": (training.experiment_name, "sft.training.experiment_name"),
        "trainer.logger": (training.logger, "sft.training.logger"),
        "trainer.n_gpus_per_node": (training.num_gpus, "sft.training.num_gpus"),
        "trainer.default_local_dir": (derive.sft_folder(config), "sft.output_dir"),
    }
    for key, (value, why) in (of_data | (alone if config.rl_or_sft == "sft" else with_rl)).items():
        typed = assigned.get(key)
        if typed is not None and typed.value != value:
            raise ConfigError(
                f"{typed.name}={shown(typed.value)}, but with rl_or_sft={config.rl_or_sft} it is {shown(value)}, from "
                f"{why}: leave it out, or change that"
            )
        tree.set(key, value, f"derived: {why}")
    for key, value in derive.sft_board(config).items():
        if key not in assigned:
            tree.set(key, value, "derived: the boards of validation")


def _derive_use_ref(tree: Layers, config: Config) -> dict[str, str]:
    """`use_ref` reports whether the reference model is there; it cannot be asked for, and not be done without."""
    reference = derive.reference_model(config)
    if tree.was_set(USE_REF) and reference.needed and not config.actor_rollout_ref.actor.use_ref:
        raise ConfigError(f"{USE_REF}=False, but there is a {reference.why}: set its coefficient to 0 as well")
    config.actor_rollout_ref.actor.use_ref = reference.needed
    return {USE_REF: f"derived: {reference.why}"}


# --- what changes nothing -----------------------------------------------------------------------------------------


def _without_effect(
    typed: list[Typed], recipe_keys: list[str], assigned: Mapping[str, Typed], values: Mapping[str, Any]
) -> dict[str, str]:
    rl_or_sft = values["rl_or_sft"]
    found = {
        item.name: unused_keys.reason(item.key, rl_or_sft) or unused_keys.without_adapter(item.key, values)
        for item in typed
        if not item.delete
    }
    found |= {key: keys.no_effect(key) for key in recipe_keys}
    steps = assigned.get(unused_keys.BUDGET)
    for item in typed:
        if item.key == "training.total_epochs" and steps is not None and rl_or_sft != "sft":
            found[item.name] = f"{steps.name} is given"
    found |= {item.name: why for key, item in assigned.items() if (why := unused_keys.of_another_game(key, values))}
    return {name: reason for name, reason in found.items() if reason}


def _marked(
    origins: dict[str, str], assigned: Mapping[str, Typed], no_effect: Mapping[str, str], rl_or_sft: str
) -> dict[str, str]:
    """The origins of values, where those that change nothing are said to."""
    idle = [key for key in origins if key in assigned and assigned[key].name in no_effect]
    marked = origins | {key: f"{origins[key]}, without effect" for key in idle}
    if rl_or_sft == "sft":
        marked[unused_keys.BUDGET] = "without effect: the data and sft.training.epochs decide"
    return marked


def _unused_variables(environ: Mapping[str, str]) -> list[str]:
    names = variable_names(environ)
    if not names:
        return []
    return [
        f"{', '.join(names)}: variables are read with an environment name only (train.sh sokoban), not with a recipe"
    ]
