"""Convert config trees: dataclasses to dicts and back, with errors that name the key.

config = build(Config, {"trainer": {"test_freq": 5}})      # everything else at its default
leaves(config)["trainer.test_freq"]                        # 5
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from ragen.coerce import convert, wrong_type
from ragen.errors import ConfigError, did_you_mean, refused

GROUP = "this is a group of keys, not a value"


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
        key = f"{prefix}{name}"
        flat |= leaves(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def value_at(config: Any, key: str) -> Any:
    """`value_at(config, "trainer.test_freq")` is `config.trainer.test_freq`."""
    return attrgetter(key)(config)


def build(cls: type, tree: Any, prefix: str = "") -> Any:
    """The dataclass that a plain dict describes; types, choices and names are checked."""
    if not isinstance(tree, dict):
        raise refused(prefix.rstrip("."), tree, GROUP, code="group")
    hints = get_type_hints(cls)
    specs = {spec.name: spec for spec in fields(cls)}
    for name in tree:
        if name not in specs:
            near = did_you_mean(str(name), specs, prefix) or f"; there are {', '.join(specs)}"
            raise ConfigError(f"unknown key {prefix}{name}{near}", key=f"{prefix}{name}", code="unknown-key")
    values = {}
    for name, spec in specs.items():
        if name in tree:
            values[name] = _field_value(tree[name], hints[name], spec, f"{prefix}{name}")
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigError(f"{prefix}{name} is missing", key=f"{prefix}{name}", code="missing")
    return cls(**values)


def _field_value(value: Any, hint: Any, spec: Field, key: str) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, f"{key}.")
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise wrong_type(key, value, hint)
        kind = get_args(hint)[1]
        is_tree = is_dataclass(kind)
        return {str(name): build(kind, item, f"{key}.{name}.") if is_tree else item for name, item in value.items()}
    converted = convert(value, hint, key)
    check_choice(converted, spec.metadata.get("choices", ()), key)
    return converted


def check_choice(value: Any, options: Sequence[Any], key: str) -> None:
    """Refuse a value, or an item of a list, that is not among the key's choices."""
    for item in value if isinstance(value, list) else [value]:
        if options and item is not None and item not in options:
            raise refused(key, item, f"must be one of {', '.join(map(str, options))}", code="choice")
