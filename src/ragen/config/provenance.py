"""A config tree being composed: its values, who set each of them, and what the user calls it.

    tree = TracedTree(compose_recipe("_2_sokoban"), "recipe _2_sokoban")
    tree.set("trainer.test_freq", 5, origin="command line", name="trainer.test_freq")
    tree.build(), tree.origins()

OmegaConf keeps references between keys (`${model_path}`) until the tree is built.
"""

import re
from functools import reduce
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen.config import devices, keys, v1
from ragen.config.schema import Config
from ragen.config.tree import build, leaves, to_dict
from ragen.errors import ConfigError, refused, shown

STATED = ("command line", "variable")  # how the origins of what a user typed begin


class TracedTree:
    """The schema's defaults, a recipe over them, and everything set later."""

    def __init__(self, recipe: DictConfig, origin: str):
        self._default = OmegaConf.create(to_dict(Config()))
        merged = OmegaConf.merge(self._default, recipe)
        assert isinstance(merged, DictConfig)
        self._tree = merged
        self._names: dict[str, str] = {}
        self.recipe = origin
        self._set_by = dict.fromkeys(_values(recipe), origin)
        for key in self._set_by:
            _check_recipe_key(key, origin)
        if devices.KEY in self._set_by:
            self.set(devices.KEY, devices.normal_list(OmegaConf.select(self._tree, devices.KEY)), origin)

    def set(self, key: str, value: Any, origin: str, name: str | None = None) -> None:
        """`name` is what the user calls the key; messages use it."""
        try:
            OmegaConf.update(self._tree, key, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            raise refused(name or key, value, str(error).splitlines()[0], code="type") from error
        self._set_by[key] = origin
        self._names[key] = name or key

    def reset(self, key: str) -> None:
        """`~key` removes what the recipe or the v1 defaults set; an entry that the user may add disappears."""
        if key in keys.FIELDS or key in keys.TREE_GROUPS:
            self.set(key, reduce(dict.__getitem__, key.split("."), to_dict(Config())), "")
            self._set_by = {name: by for name, by in self._set_by.items() if not f"{name}.".startswith(f"{key}.")}
            return
        parent, _, name = key.rpartition(".")
        holder = OmegaConf.select(self._tree, parent)
        if holder is None or name not in holder:
            raise ConfigError(f"~{key}: there is no such entry", key=key, code="reset")
        del holder[name]

    def expect(self, key: str, expected: Any, name: str) -> None:
        """`~key=value` resets a key only if it has this value."""
        current = OmegaConf.select(self._tree, key)
        if current != expected:
            raise ConfigError(f"~{name}={shown(expected)}: its value is {shown(current)}", key=name, code="reset")

    def build(self) -> Config:
        """The tree as a config, references resolved, every value checked."""
        try:
            return build(Config, OmegaConf.to_container(self._tree, resolve=True))
        except OmegaConfBaseException as error:
            name = self._names.get(error.full_key or "", error.full_key)
            where = f"{name}: " if name else ""
            raise ConfigError(f"{where}{str(error).splitlines()[0]}", key=name, code="reference") from error

    def name(self, key: str) -> str:
        """What the user calls a tree key: the key that it follows, as it was typed."""
        value = _values(self._tree).get(key)
        reference = re.fullmatch(r"\$\{([^}:]+)\}", str(value[0] if isinstance(value, list) and value else value))
        return self.name(reference[1]) if reference else self._names.get(key, key)

    def was_set(self, key: str) -> bool:
        return key in self._set_by

    def recipe_keys(self) -> list[str]:
        """The keys whose value is still the recipe's."""
        return [key for key, by in self._set_by.items() if by == self.recipe]

    def origins(self) -> dict[str, str]:
        """Where each value that was stated or is not the default came from; one that follows another key says which."""
        default, raw = _values(self._default, resolve=True), _values(self._tree)
        found = {}
        for key, value in _values(self._tree, resolve=True).items():
            if key not in default or default[key] != value or self._is_stated(key):
                set_with = [name for name in self._set_by if f"{key}.".startswith(f"{name}.")]  # the key or its groups
                references = ", ".join(dict.fromkeys(re.findall(r"\$\{([^}]+)\}", str(raw[key]))))
                found[key] = self._set_by[max(set_with, key=len)] if set_with else f"follows {references}"
        return found

    def _is_stated(self, key: str) -> bool:
        """Whether a recipe, a variable or the command line sets it."""
        return self._set_by.get(key, "").startswith((self.recipe, *STATED))


def _values(tree: DictConfig, resolve: bool = False) -> dict[str, Any]:
    return leaves(OmegaConf.to_container(tree, resolve=resolve))


def _check_recipe_key(key: str, origin: str) -> None:
    if keys.is_tree_key(key):
        return
    problem = f"unknown key {key}{keys.suggest(key, None)}"
    if key in v1.KEYS and v1.KEYS[key].targets:
        problem = f"{key} belongs to the v1 command line; in a recipe it is {', '.join(v1.KEYS[key].targets)}"
    raise ConfigError(f"{origin}: {problem}", key=key, code="unknown-key")
