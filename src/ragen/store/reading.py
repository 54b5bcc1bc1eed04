"""Files of a run folder that may be damaged: their content, or one error that names the file and what to do.

    read_bytes(path)          # None if there is none
    read_json(path)           # an object; raises Unreadable
    read_yaml(path)
    problem_in(record, {"seed": int, "turns": [{"reward": NUMBER}]}, needed=("seed",))     # "" or what is wrong

A run folder may have been copied by half, edited by hand, or made by somebody else. Reading gives what a file holds or
raises `Unreadable`, never an error of the parser, and never waits for a pipe that pretends to be a file.
"""

import json
import math
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ragen.errors import ConfigError, shown
from ragen.statistics import LARGEST

RESTORE = "restore it from a copy, or remove it"
NOT_FINITE = ("nan", "inf", "-inf")  # as JSON lines hold them
NUMBER = "number"  # a kind for `problem_in`
LARGEST_YAML = 4 << 20  # bytes; a config has some ten thousand
DEEPEST_YAML = 60  # levels; a config has six

_NAMES = {str: "text", int: "a whole number", bool: "true or false"}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where it exists


class Unreadable(ConfigError):
    """A file that does not hold what it should."""

    def __init__(self, path: Path, why: str, fix: str = RESTORE):
        super().__init__(f"{path} cannot be read: {why}. Fix: {fix}")
        self.path, self.why = path, why


def read_bytes(path: Path) -> bytes | None:
    """The content of a file; None where there is none."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise Unreadable(
                path, "it is a directory, not a file" if stat.S_ISDIR(mode) else "it is not a regular file"
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from None


def read_json(path: Path, fix: str = RESTORE) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    content = read_bytes(path)
    if content is None:
        return None
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, _one_line(error), fix) from None
    if not isinstance(tree, dict):
        raise Unreadable(path, "it does not hold a JSON object", fix)
    return tree


def read_yaml(path: Path, fix: str = RESTORE) -> dict[str, Any] | None:
    """The tree in a file; None where there is none."""
    content = read_bytes(path)
    if content is None:
        return None
    if len(content) > LARGEST_YAML:
        raise Unreadable(path, f"it has {len(content):,} bytes", fix)
    try:
        text = content.decode()
        _check_depth(text)
        tree = yaml.load(text, _Loader)
    except (ValueError, TypeError, yaml.YAMLError, RecursionError) as error:  # TypeError: a list as a key
        raise Unreadable(path, _one_line(error), fix) from None
    if not isinstance(tree, dict):
        raise Unreadable(path, "it does not hold a tree of keys", fix)
    return tree


def _check_depth(text: str) -> None:
    """The C parser of YAML has no limit: it would overflow the stack. Aliases can make a small file a huge tree."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it uses aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_YAML:
            raise ValueError(f"it has more than {DEEPEST_YAML} levels")


def problem_in(value: Any, kind: Any, needed: Collection[str] | None = None) -> str:
    """What of a value is not as described: a type, {key: kind} for an object, [kind] for a list of them.

    An object must have the `needed` keys (default all); what else it has is not looked at.
    """
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return "not an object"
        found = {key: problem_in(value[key], inner, needed) for key, inner in kind.items() if key in value}
        found |= {key: "missing" for key in kind if key not in value and (needed is None or key in needed)}
        return next((f"{key}: {problem}" for key, problem in found.items() if problem), "")
    if isinstance(kind, list):
        if not isinstance(value, list):
            return "not a list"
        return next((problem for item in value if (problem := problem_in(item, kind[0], needed))), "")
    if kind is NUMBER:
        is_number = isinstance(value, (int, float)) and not LARGEST < abs(value) < math.inf
        return "" if is_number or value in NOT_FINITE else f"{shown(value)} is not a number"
    is_right = kind is Any or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
    return "" if is_right else f"{shown(value)} is not {_NAMES.get(kind, 'of the right type')}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
