"""The config of a run as it is on disk, checked against the schema as far as it goes.

    read_config(Path("checkpoints/ragen/test/config.yaml"))      # {} where there is none; raises Unreadable

A run of another version may have other keys, and a file that was cut off lacks some: both can be read. But a key that
is there has the type that the schema gives it, so that no reader has to ask.
"""

from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ragen.coerce import convert
from ragen.config.schema import Config
from ragen.config.tree import GROUP
from ragen.errors import ConfigError, refused
from ragen.store.reading import Unreadable, read_yaml

FIX = "restore it from a copy, or train again in another directory (trainer.default_local_dir=DIR)"


def read_config(path: Path) -> dict[str, Any]:
    tree = read_yaml(path, FIX)
    if tree is None:
        return {}
    try:
        _check_group(Config, tree, "")
    except ConfigError as error:
        raise Unreadable(path, str(error), FIX) from None
    return tree


def _check_group(cls: type, tree: Any, prefix: str) -> None:
    if not isinstance(tree, dict):
        raise refused(prefix.rstrip("."), tree, GROUP, code="group")
    hints = _hints(cls)
    for spec in fields(cls):
        if spec.name not in tree:
            continue
        value, hint, key = tree[spec.name], hints[spec.name], f"{prefix}{spec.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            _check_group(hint, value, f"{key}.")
        elif get_origin(hint) is dict:
            if not isinstance(value, dict):
                raise refused(key, value, GROUP, code="group")
            kind = get_args(hint)[1]
            for name, item in value.items() if is_dataclass(kind) else ():
                _check_group(kind, item, f"{key}.{name}.")
        elif value != _default(spec):  # which may be the name of another key
            convert(value, hint, key)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _default(spec: Field) -> Any:
    return spec.default if spec.default_factory is MISSING else spec.default_factory()
