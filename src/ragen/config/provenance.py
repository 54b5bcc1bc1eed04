"""A tree in the making: layers of values, who set each of them, and what the user calls it.

    tree = Layers(compose_recipe("_2_sokoban"), "recipe _2_sokoban")
    tree.set("trainer.test_freq", 5, origin="command line", name="trainer.test_freq")
    tree.build(), tree.origins()

OmegaConf keeps the references between keys (`${model_path}`) until the tree is built.
"""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen.config import devices, keys, v1
from ragen.config.schema import Config
from ragen.config.tree import build, leaves, to_dict
from ragen.errors import ConfigError, shown


class Layers:
    """The schema's defaults, a recipe over them, and whatever is set later."""

    def __init__(self, recipe: DictConfig, origin: str):
        self._default = OmegaConf.create(to_dict(Config()))
        self._tree = OmegaConf.merge(self._default, recipe)
        self._names: dict[str, str] = {}
        self._set_by = dict.fromkeys(self._raw(recipe), origin)
        for key in self._set_by:
            _check_recipe_key(key, origin)
        if devices.KEY in self._set_by:
            self.set(devices.KEY, devices.normal_list(OmegaConf.select(self._tree, devices.KEY)), origin)

    @staticmethod
    def _raw(tree: DictConfig, resolve: bool = False) -> dict[str, Any]:
        return leaves(OmegaConf.to_container(tree, resolve=resolve))

    def set(self, key: str, value: Any, origin: str, name: str | None = None) -> None:
        try:
            OmegaConf.update(self._tree, key, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{name or key}={shown(value)}: {str(error).splitlines()[0]}") from error
        self._set_by[key] = origin
        self.call(key, name or key)

    def call(self, key: str, name: str) -> None:
        """What the user knows a tree key by; messages use it."""
        self._names[key] = name

    def reset(self, key: str) -> None:
        """`~key` takes back what recipe or dialect set; a free entry disappears."""
        if key in keys.FIELDS or key in keys.TREE_GROUPS:
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

    def expect(self, key: str, expected: Any, name: str) -> None:
        """`~key=value` takes a value back only if it is this one."""
        current = OmegaConf.select(self._tree, key)
        if current != expected:
            raise ConfigError(f"~{name}={shown(expected)}: its value is {shown(current)}")

    def build(self) -> Config:
        """The tree as a config, references resolved, every value checked."""
        try:
            return build(Config, OmegaConf.to_container(self._tree, resolve=True))
        except OmegaConfBaseException as error:
            where = f"{self._names.get(error.full_key, error.full_key)}: " if error.full_key else ""
            raise ConfigError(f"{where}{str(error).splitlines()[0]}") from error

    def name(self, key: str) -> str:
        """What the user knows a tree key by: the key whose value it follows, in the dialect that it was typed in."""
        node = OmegaConf.select(self._tree, key.rpartition(".")[0]) if "." in key else self._tree
        raw = node._get_node(key.rpartition(".")[2]) if OmegaConf.is_dict(node) else None
        value = OmegaConf.to_container(raw) if OmegaConf.is_config(raw) else raw._value() if raw is not None else None
        reference = re.fullmatch(r"\$\{([^}:]+)\}", str(value[0] if isinstance(value, list) and value else value))
        return self.name(reference[1]) if reference else self._names.get(key, key)

    def was_set(self, key: str) -> bool:
        return key in self._set_by

    def recipe_keys(self, origin: str) -> Iterator[str]:
        """The keys whose value is still the recipe's."""
        return (key for key, by in self._set_by.items() if by == origin)

    def origins(self) -> dict[str, str]:
        """Where each value that differs from the default came from; a value that follows another key says which."""
        default, raw = self._raw(self._default, resolve=True), self._raw(self._tree)
        found = {}
        for key, value in self._raw(self._tree, resolve=True).items():
            if _differs(default, key, value):
                origin = next((self._set_by[name] for name in _key_and_groups(key) if name in self._set_by), None)
                found[key] = origin or f"follows {_references(raw[key])}"
        return found


def _differs(default: dict[str, Any], key: str, value: Any) -> bool:
    return key not in default or default[key] != value


def _check_recipe_key(key: str, origin: str) -> None:
    if keys.is_tree_key(key):
        return
    targets = v1.KEYS[key].targets if key in v1.KEYS else ()
    if targets:
        raise ConfigError(f"{origin}: {key} belongs to the older dialect; a recipe says {', '.join(targets)}")
    raise ConfigError(f"{origin}: unknown key {key}{keys.suggest(key, None)}")


def _key_and_groups(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _references(raw: Any) -> str:
    """The keys that a value is made of."""
    return ", ".join(dict.fromkeys(re.findall(r"\$\{([^}]+)\}", str(raw))))
