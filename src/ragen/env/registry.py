"""Which environments exist. Adding one is a line in `ENVIRONMENTS`; its tags come along with the class.

env = make(catalogue()["CoordSokoban"])
"""

import dataclasses
import difflib
import importlib
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from ragen.env.base import Environment, Tag

ENVIRONMENTS = {
    "bandit": "ragen.env.bandit:Bandit",
    "two_armed_bandit": "ragen.env.bandit:TwoArmedBandit",
    "sokoban": "ragen.env.sokoban:Sokoban",
    "frozen_lake": "ragen.env.frozen_lake:FrozenLake",
}


def environment_class(env_type: str) -> type[Environment]:
    """The class behind a registry name or a `package.module:Class` path."""
    module_name, _, class_name = ENVIRONMENTS.get(env_type, env_type).partition(":")
    if not class_name:
        raise ValueError(
            f"unknown environment {env_type!r}{nearest(env_type, ENVIRONMENTS)}. "
            f"Known: {', '.join(ENVIRONMENTS)}; your own is written package.module:Class"
        )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment {env_type!r} cannot be imported: {error}") from error


def catalogue() -> dict[str, Tag]:
    """All built-in tags, as fresh copies that a config may change."""
    return {
        name: dataclasses.replace(tag, env_config=dict(tag.env_config or {}))
        for env_type in ENVIRONMENTS
        for name, tag in environment_class(env_type).TAGS.items()
    }


def make(tag: Tag) -> Environment:
    """The environment of a tag. Settings that its `Config` does not have, or of another type, are refused."""
    cls = environment_class(tag.env_type)
    hints = get_type_hints(cls.Config)
    settings = {}
    for name, value in (tag.env_config or {}).items():
        if name not in hints:
            raise ValueError(
                f"env_config.{name}: {tag.env_type} has no such setting{nearest(name, hints)}. "
                f"Known: {', '.join(hints)}"
            )
        value = tuple(value) if isinstance(value, list) else value
        if not _fits(value, hints[name]):
            kind = getattr(hints[name], "__name__", str(hints[name]))
            raise ValueError(f"env_config.{name}={value!r}: {tag.env_type} takes {kind} here")
        settings[name] = value
    return cls(cls.Config(**settings))


def nearest(name: str, known: Any) -> str:
    """`; did you mean 'x'?` for a misspelt name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, arm) for arm in get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
