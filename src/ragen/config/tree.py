"""Reading and checking trees: dataclasses to dicts and back, with errors that name the key.

config = build(Config, {"trainer": {"test_freq": 5}})      # everything else at its default
leaves(config)["trainer.test_freq"]                        # 5
"""

import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A config that cannot work. The message is for the user: it names the key, the value and what would be right."""


def schema_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every leaf field below a dataclass as (dotted key, field, type)."""
    hints = get_type_hints(cls)
    for spec in fields(cls):
        key = f"{prefix}{spec.name}"
        if is_dataclass(hints[spec.name]):
            yield from schema_fields(hints[spec.name], f"{key}.")
        else:
            yield key, spec, hints[spec.name]


def to_dict(value: Any) -> Any:
    """Dataclasses, lists and dicts as plain containers."""
    if is_dataclass(value):
        return {spec.name: to_dict(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, dict):
        return {name: to_dict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(item) for item in value]
    return value


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree flattened to dotted keys; lists and empty dicts are leaves."""
    flat: dict[str, Any] = {}
    for name, value in to_dict(tree).items():
        if isinstance(value, dict) and value:
            flat.update(leaves(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def build(cls: type, tree: dict[str, Any], prefix: str = "") -> Any:
    """The dataclass that a plain dict describes; types, choices and names are checked."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix.rstrip('.')}={tree!r}: this is a group of keys, not a value")
    hints = get_type_hints(cls)
    specs = {spec.name: spec for spec in fields(cls)}
    for name in tree:
        if name not in specs:
            raise ConfigError(f"unknown key {prefix}{name}{did_you_mean(name, specs, prefix)}")
    values = {}
    for name, spec in specs.items():
        if name in tree:
            values[name] = _convert(tree[name], hints[name], spec, f"{prefix}{name}")
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigError(f"{prefix}{name} is missing")
    return cls(**values)


def did_you_mean(name: str, known: Any, prefix: str = "") -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


# --- one value ----------------------------------------------------------------------------------------------------

_WORDS = {"true": True, "yes": True, "y": True, "on": True, "false": False, "no": False, "n": False, "off": False}


def _convert(value: Any, hint: Any, spec: Field, key: str) -> Any:
    if is_dataclass(hint):
        return build(hint, value, f"{key}.")
    options = spec.metadata.get("choices", ())
    converted = _as_type(value, hint, key)
    for item in converted if isinstance(converted, list) else [converted]:
        if options and item is not None and item not in options:
            raise ConfigError(f"{key}={item}: must be one of {', '.join(map(str, options))}")
    return converted


def _as_type(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        arms = [arm for arm in arguments if arm is not type(None)]
        for arm in arms:
            try:
                return _as_type(value, arm, key)
            except ConfigError:
                continue
        raise _wrong_type(key, value, hint)
    if origin is list:
        # A single value stands for a list of one: `trainer.logger=console`.
        values = value if isinstance(value, (list, tuple)) else [value]
        try:
            return [_as_type(item, arguments[0], key) for item in values]
        except ConfigError:
            raise _wrong_type(key, value, hint) from None
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(key, value, hint)
        item_type = arguments[1]
        return {
            str(name): build(item_type, item, f"{key}.{name}.") if is_dataclass(item_type) else item
            for name, item in value.items()
        }
    return _as_scalar(value, hint, key)


def _as_scalar(value: Any, hint: type, key: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is bool:
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
    elif hint is int:
        if number and float(value).is_integer():
            return int(value)
    elif hint is float:
        if number:
            return float(value)
    elif hint is str and (isinstance(value, str) or number):
        return str(value)
    raise _wrong_type(key, value, hint)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def type_name(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arm is type(None) else type_name(arm) for arm in arguments)
    if origin is list:
        return f"a list, each item {type_name(arguments[0])}"
    if origin is dict:
        return "a group of keys"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _wrong_type(key: str, value: Any, hint: Any) -> ConfigError:
    shown = "null" if value is None else value
    return ConfigError(f"{key}={shown}: takes {type_name(hint)}")
