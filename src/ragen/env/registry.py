"""The list of environments. To add one, add a line to `ENVIRONMENTS`; its class brings its tags.

env = make(catalogue()["CoordSokoban"])
"""

import dataclasses
import importlib
import inspect
from typing import get_type_hints

from ragen.coerce import convert
from ragen.env.base import Environment, Tag
from ragen.env.failure import EnvironmentFailed, call
from ragen.errors import nearest_of

ENVIRONMENTS = {
    "bandit": "ragen.env.bandit:Bandit",
    "two_armed_bandit": "ragen.env.bandit:TwoArmedBandit",
    "sokoban": "ragen.env.sokoban:Sokoban",
    "frozen_lake": "ragen.env.frozen_lake:FrozenLake",
}

# Short names of tags in `play` and `eval`: the boards that the recipes train on. In a training run the same names
# select the defaults of the v1 command line (`config.v1.ENVIRONMENTS`), which has other boards.
SHORT_NAMES = {
    "sokoban": "CoordSokoban",
    "frozenlake": "CoordFrozenLake",
    "frozen_lake": "CoordFrozenLake",
    "bandit": "Bandit",
    "two_armed_bandit": "TwoArmedBandit",
}


_NOT_FOUND = (ImportError, AttributeError, SyntaxError)


def environment_class(env_type: str) -> type[Environment]:
    """The class behind a registry name or a `package.module:Class` path."""
    module_name, _, class_name = ENVIRONMENTS.get(env_type, env_type).partition(":")
    if not class_name:
        raise ValueError(
            f"unknown environment {env_type!r}{nearest_of(env_type, ENVIRONMENTS)}; "
            f"write your own as package.module:Class"
        )
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise ValueError(f"environment {env_type!r}: write your own as package.module:Class")
    try:
        cls = call(lambda: getattr(importlib.import_module(module_name), class_name), env_type, passes=_NOT_FOUND)
    except (*_NOT_FOUND, EnvironmentFailed) as error:
        raise ValueError(f"environment {env_type!r}: import failed: {error}") from error
    _check_class(cls, env_type)
    return cls


def _check_class(cls: object, env_type: str) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ValueError(f"environment {env_type!r} is not a subclass of ragen.env.base.Environment")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ValueError(f"environment {env_type!r} is incomplete: it does not define {missing}")
    if not dataclasses.is_dataclass(getattr(cls, "Config", None)):
        raise ValueError(f"environment {env_type!r} does not define Config, a frozen dataclass with its settings")


def catalogue() -> dict[str, Tag]:
    """All built-in tags, as copies that a config may change."""
    return {name: tag for env_type in ENVIRONMENTS for name, tag in tags_of(env_type).items()}


def tags_of(env_type: str) -> dict[str, Tag]:
    """The tags of an environment, with `env_type` as the caller wrote it."""
    return {
        name: dataclasses.replace(tag, env_type=env_type, env_config=dict(tag.env_config or {}))
        for name, tag in environment_class(env_type).TAGS.items()
    }


def make(tag: Tag) -> Environment:
    """The environment of a tag. Raises on settings that its `Config` does not have, or of the wrong type."""
    cls = environment_class(tag.env_type)
    hints = get_type_hints(cls.Config)
    settings = {}
    for name, value in (tag.env_config or {}).items():
        if name not in hints:
            raise ValueError(f"env_config.{name}: {tag.env_type} has no such setting{nearest_of(name, hints)}")
        settings[name] = convert(value, hints[name], f"env_config.{name}")
    return call(lambda: cls(cls.Config(**settings)), tag.env_type, passes=(ValueError,))
