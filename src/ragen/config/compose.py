"""From what a user typed to one resolved, checked config, with the origin of every value.

    resolved = resolve(["sokoban", "training.n_rollout=8"])                     # the older dialect
    resolved = resolve(["trainer.test_freq=5"], config_name="_2_sokoban")       # a recipe
    resolved.config.trainer.test_freq, resolved.origins["trainer.test_freq"]    # 5, "command line"

The layers, each over the one before: schema defaults, recipe, dialect defaults, environment variables, values derived
from these, command line. Hydra composes the recipes and reads the override grammar; OmegaConf resolves references
between keys.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen.config import derive, v1
from ragen.config.schema import Config
from ragen.config.tree import ConfigError, build, did_you_mean, leaves, schema_fields, to_dict
from ragen.config.validate import validate
from ragen.env.base import Tag

RECIPES = Path(__file__).parent / "recipes"
DEVICES = "system.CUDA_VISIBLE_DEVICES"
USE_REF = "actor_rollout_ref.actor.use_ref"
COMMAND_LINE = "command line"


@dataclass
class Resolved:
    """A config ready to run, and where its values came from."""

    config: Config
    start: str  # what it started from, in words
    origins: dict[str, str]  # dotted key -> origin, for every value that is not the default
    no_effect: dict[str, str]  # keys that the user set and that change nothing -> why
    notes: list[str]  # what is allowed and probably not meant


@dataclass(frozen=True)
class Typed:
    """One override as the user typed it."""

    key: str
    value: Any
    delete: bool = False
    origin: str = COMMAND_LINE


def resolve(
    arguments: Iterable[str],
    config_name: str | None = None,
    config_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a command. Raises `ConfigError` for anything that cannot work, before any heavy import."""
    environ = os.environ if environ is None else environ
    environment, words = _split_environment(list(arguments), config_name)
    typed = [_parse_override(word) for word in words]
    if environment:
        typed = _environment_variables(environ) + typed
    for item in typed:
        _check_key(item.key, environment)

    recipe = compose_recipe(config_name or "base", config_dir)
    composition = _Composition(recipe, config_name or "base")
    if environment:
        for key, value in v1.defaults(environment).items():
            composition.set(key, value, f"v1 default ({environment})")
    assignments = _assignments(typed, environment)
    composition.apply(assignments)
    last_typed = {item.key: item.value for item in typed if not item.delete}
    for key, (value, why) in v1.derived(environment, last_typed, composition.read).items():
        if key not in assignments:
            composition.set(key, value, f"v1: {why}")
    _choose_devices(composition, assignments, environ)

    config = composition.build()
    notes = validate(config)
    origins = composition.origins()
    origins |= _derive_use_ref(config, assignments)
    return Resolved(
        config=config,
        start=f"environment {environment} (v1 defaults)" if environment else f"recipe {config_name or 'base'}",
        origins=origins,
        no_effect=_without_effect(typed),
        notes=notes,
    )


# --- recipes ------------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def compose_recipe(name: str, config_dir: str | None = None) -> DictConfig:
    """A recipe over the schema's defaults, references unresolved. `config_dir` holds recipes of one's own."""
    folders = [RECIPES]
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such folder")
        folders.insert(0, Path(config_dir))
    name = name.removesuffix(".yaml")
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if name not in known:
        raise ConfigError(f"--config-name {name}: no such recipe{did_you_mean(name, known)} Known: {', '.join(known)}")
    ConfigStore.instance().store(name="schema", node=to_dict(Config()))
    GlobalHydra.instance().clear()
    search = [] if config_dir is None else [f"hydra.searchpath=[file://{RECIPES}]"]
    try:
        with initialize_config_dir(str(folders[0].resolve()), version_base="1.3"):
            return compose(name, overrides=search)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {name}: {error}") from error


# --- what was typed -----------------------------------------------------------------------------------------------


def _split_environment(arguments: list[str], config_name: str | None) -> tuple[str | None, list[str]]:
    """The environment's name, if one was given, and the overrides."""
    names = [word for word in arguments if "=" not in word and not word.startswith("~")]
    words = [word for word in arguments if word not in names]
    if not names:
        return None, words
    for name in names:
        if name not in v1.ENVIRONMENTS:
            raise ConfigError(
                f"{name!r} is neither an environment nor key=value{did_you_mean(name, v1.ENVIRONMENTS)} "
                f"Environments: {', '.join(v1.ENVIRONMENTS)}; a recipe is chosen with --config-name"
            )
    if len(set(names)) > 1:
        raise ConfigError(f"more than one environment: {', '.join(names)}")
    if config_name is not None:
        raise ConfigError(f"environment {names[0]!r} and --config-name {config_name} are two starting points: name one")
    return names[0], words


def _parse_override(word: str) -> Typed:
    """One word of the command line, read with Hydra's grammar. An empty value means null."""
    name = word.partition("=")[0].strip()
    if word.endswith("=") and not word.startswith("~"):
        return Typed(name.lstrip("+"), None)
    if name.lstrip("+") in (DEVICES, "system.cuda_visible_devices"):
        return Typed(name.lstrip("+"), _device_list(word.partition("=")[2]))
    try:
        override: Override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"cannot read {word!r}; put quotes around special characters: {name}=\"'…'\"") from error
    if override.is_sweep_override():
        raise ConfigError(f"{word!r} holds several values: a list is written {name}=[…], text {name}=\"'…'\"")
    return Typed(override.key_or_group, override.value(), delete=override.is_delete())


def _device_list(text: str) -> str:
    """`0,1` in any of its spellings: bare, quoted, or as a list."""
    return ",".join(part.strip() for part in text.strip("'\"[] ").split(",") if part.strip())


def _environment_variables(environ: Mapping[str, str]) -> list[Typed]:
    """`CONFIG_TRAINING__N_ROLLOUT=8` sets `training.n_rollout`."""
    typed = []
    for name, text in sorted(environ.items()):
        if name.startswith("CONFIG_") and "__" in name:
            key = name.removeprefix("CONFIG_").lower().replace("__", ".")
            if v1.is_key(key):
                typed.append(Typed(key, _parse_override(f"{key}={text}").value, origin=f"variable {name}"))
    return typed


# --- which keys there are -----------------------------------------------------------------------------------------

_FIELDS = {key: spec for key, spec, _ in schema_fields(Config)}
_TAG_FIELDS = {key for key, _, _ in schema_fields(Tag)}
_GROUPS = {key.rsplit(".", depth)[0] for key in _FIELDS for depth in range(1, key.count(".") + 1)}


def _is_tree_key(key: str) -> bool:
    if key in _FIELDS or key in _GROUPS:
        return True
    if key.startswith("ray_kwargs.ray_init."):
        return True
    section, _, rest = key.partition(".")
    if section != "custom_envs" or not rest:
        return False
    tag_field = rest.partition(".")[2]
    return not tag_field or tag_field in _TAG_FIELDS or tag_field.startswith("env_config.")


def _check_key(key: str, environment: str | None) -> None:
    if _is_tree_key(key) or v1.is_key(key):
        return
    raise ConfigError(f"unknown key {key}{_suggest(key, environment)}")


def _suggest(key: str, environment: str | None) -> str:
    """The nearest right key, looked for first in the dialect that the user typed."""
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    tree_sections = {name.partition(".")[0] for name in _FIELDS}
    if section == "custom_envs":
        typed_dialect = [".".join([*key.split(".")[:2], name]) for name in _TAG_FIELDS]
    elif section in v1.OWN_SECTIONS or (environment and section not in tree_sections):
        typed_dialect = list(v1.KEYS)
    else:
        typed_dialect = list(_FIELDS)
    parent = key.rpartition(".")[0]
    for known in (typed_dialect, [*_FIELDS, *v1.KEYS]):
        siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
        # Cut short or spelt wrongly, at the end; spelt wrongly elsewhere; with a level left out.
        near = (
            [name for sibling, name in siblings.items() if sibling.startswith(leaf)]
            or [siblings[sibling] for sibling in get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
            or get_close_matches(key, known, n=1, cutoff=0.85)
            or sorted((name for name in known if name.rpartition(".")[2] == leaf), key=lambda name: section not in name)
            or get_close_matches(key, known, n=1, cutoff=0.5)
        )
        if near:
            return f"; did you mean {near[0]}?"
    return f". Sections: {', '.join(sorted({*tree_sections, *v1.OWN_SECTIONS}))}"


# --- from typed keys to tree keys ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Assignment:
    value: Any
    typed: str
    origin: str
    delete: bool = False


def _assignments(typed: list[Typed], environment: str | None) -> dict[str, _Assignment]:
    """Tree key -> value. The same key twice: the last wins. Two keys that set one thing differently: an error."""
    last = {item.key: item for item in typed}
    assignments: dict[str, _Assignment] = {}
    for item in last.values():
        is_dialect = v1.is_key(item.key) and item.key not in _FIELDS
        values = v1.translate(item.key, item.value, environment) if is_dialect else _spread(item.key, item.value)
        note = "" if not is_dialect else f": {item.key}={_shown(item.value)}"
        for key, value in values.items():
            before = assignments.get(key)
            if before is not None and before.value != value:
                raise ConfigError(
                    f"{before.typed} and {item.key} both set {key}, to {_shown(before.value)} and {_shown(value)}: "
                    f"keep one of them"
                )
            assignments[key] = _Assignment(value, item.key, f"{item.origin}{note}", item.delete)
    return assignments


def _spread(key: str, value: Any) -> dict[str, Any]:
    """`lora={rank: 8}` sets `lora.rank`: a group of keys is merged, not replaced."""
    if isinstance(value, dict) and value:
        return {name: item for part, inner in value.items() for name, item in _spread(f"{key}.{part}", inner).items()}
    return {key: value}


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _without_effect(typed: list[Typed]) -> dict[str, str]:
    found = {}
    for item in typed:
        if item.key in v1.KEYS and v1.KEYS[item.key].no_effect:
            found[item.key] = v1.KEYS[item.key].no_effect
        targets = v1.KEYS[item.key].targets if item.key in v1.KEYS else (item.key,)
        for target in targets:
            reason = _FIELDS[target].metadata.get("no_effect") if target in _FIELDS else None
            if reason:
                found[item.key] = reason
    return found


# --- applying -----------------------------------------------------------------------------------------------------


class _Composition:
    """A tree in the making, and who set what."""

    def __init__(self, recipe: DictConfig, name: str):
        self._tree = OmegaConf.create(to_dict(Config()))
        self._default = self._tree.copy()
        default = leaves(OmegaConf.to_container(self._default))
        self._tree = recipe
        OmegaConf.set_struct(self._tree, False)
        self._set_by = {
            key: f"recipe {name}"
            for key, value in leaves(OmegaConf.to_container(recipe)).items()
            if default.get(key, default) != value
        }

    def set(self, key: str, value: Any, origin: str) -> None:
        OmegaConf.update(self._tree, key, value, merge=False, force_add=True)
        self._set_by[key] = origin

    def apply(self, assignments: Mapping[str, _Assignment]) -> None:
        for key, item in assignments.items():
            if item.delete:
                self._reset(key, item.value)
            else:
                self.set(key, item.value, item.origin)

    def _reset(self, key: str, expected: Any) -> None:
        """`~key` takes back what recipe or dialect set; a free entry disappears."""
        current = OmegaConf.select(self._tree, key)
        if expected is not None and current != expected:
            raise ConfigError(f"~{key}={_shown(expected)}: its value is {_shown(current)}")
        if key in _FIELDS or key in _GROUPS:
            original = self._default
            for part in key.split("."):
                original = original._get_node(part)
            self.set(key, OmegaConf.to_container(original) if OmegaConf.is_config(original) else original._value(), "")
            self._set_by = {
                name: by for name, by in self._set_by.items() if name != key and not name.startswith(f"{key}.")
            }
            return
        parent, _, name = key.rpartition(".")
        holder = OmegaConf.select(self._tree, parent)
        if holder is None or name not in holder:
            raise ConfigError(f"~{key}: there is no such entry")
        del holder[name]

    def read(self, key: str) -> Any:
        """A resolved value, checked like the rest of the tree."""
        config = self.build()
        for part in key.split("."):
            config = getattr(config, part)
        return config

    def build(self) -> Config:
        try:
            return build(Config, OmegaConf.to_container(self._tree, resolve=True))
        except OmegaConfBaseException as error:
            raise ConfigError(str(error).splitlines()[0]) from error

    def origins(self) -> dict[str, str]:
        """Where each value that differs from the default came from; a value that follows another key says which."""
        default = leaves(OmegaConf.to_container(self._default, resolve=True))
        raw = leaves(OmegaConf.to_container(self._tree))
        found = {}
        for key, value in leaves(OmegaConf.to_container(self._tree, resolve=True)).items():
            if key in default and default[key] == value:
                continue
            origin = next((self._set_by[name] for name in _key_and_groups(key) if name in self._set_by), None)
            found[key] = origin or f"follows {_reference(raw[key])}"
        return found


def _key_and_groups(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _reference(raw: Any) -> str:
    text = raw[0] if isinstance(raw, list) else str(raw)
    return text.replace("${", "").replace("}", "")


def _choose_devices(
    composition: _Composition, assignments: Mapping[str, _Assignment], environ: Mapping[str, str]
) -> None:
    """A typed device list stands; else the process's own `CUDA_VISIBLE_DEVICES`; else the first `n_gpus_per_node`."""
    num_gpus = composition.read("trainer.n_gpus_per_node")
    if DEVICES in assignments:
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = visible.split(",") if visible.strip() else []
        if 0 < len(listed) < num_gpus:
            raise ConfigError(
                f"trainer.n_gpus_per_node={num_gpus}, but CUDA_VISIBLE_DEVICES={visible} in the environment lists "
                f"{len(listed)}: ask for {len(listed)}, or unset the variable"
            )
        composition.set(DEVICES, ",".join(listed[:num_gpus]), "environment CUDA_VISIBLE_DEVICES")
    elif num_gpus > 1 and composition.read(DEVICES).count(",") + 1 != num_gpus:
        composition.set(DEVICES, ",".join(map(str, range(num_gpus))), "derived from trainer.n_gpus_per_node")


def _derive_use_ref(config: Config, assignments: Mapping[str, _Assignment]) -> dict[str, str]:
    """`use_ref` reports whether the reference model is there; it cannot be asked for, and not be done without."""
    reference = derive.reference_model(config)
    typed = assignments.get(USE_REF)
    if typed is not None and reference.needed and not config.actor_rollout_ref.actor.use_ref:
        raise ConfigError(f"{USE_REF}=False, but there is a {reference.why}: set its coefficient to 0 as well")
    config.actor_rollout_ref.actor.use_ref = reference.needed
    return {USE_REF: f"derived: {reference.why}"}
