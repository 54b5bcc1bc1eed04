"""Convert one value to the type it should have, for the config tree and for environment settings.

    convert("no", bool, "training.use_kl_loss")     # False
    convert([6, 6], tuple[int, int], "dim_room")    # (6, 6)
    convert("abc", int, "trainer.test_freq")        # ConfigError: trainer.test_freq=abc: takes a whole number

Numbers are finite and fit into 64 bits, so that what is computed from them cannot overflow.
"""

import types
from typing import Any, Literal, Union, get_args, get_origin

from ragen.errors import LARGEST, ConfigError, refused

WORDS = {"true": True, "yes": True, "y": True, "on": True, "false": False, "no": False, "n": False, "off": False}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def convert(value: Any, hint: Any, key: str) -> Any:
    """The value as the type that the key takes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _as_one_of(value, hint, key)
    if origin is Literal:
        if value in arguments:
            return value
    elif origin in (list, tuple):
        return _as_sequence(value, hint, key)
    elif hint in (bool, int, float, str):
        return _as_scalar(value, hint, key)
    elif hint in (None, type(None)):
        if value is None:
            return None
    elif not isinstance(origin or hint, type) or isinstance(value, origin or hint):
        return value
    raise wrong_type(key, value, hint)


def _as_one_of(value: Any, hint: Any, key: str) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    for arm in get_args(hint):
        try:
            return convert(value, arm, key)
        except ConfigError:
            continue
    raise wrong_type(key, value, hint)


def _as_sequence(value: Any, hint: Any, key: str) -> list | tuple:
    """A list, or a tuple of given length. A single value stands for a list of one: `trainer.logger=console`."""
    kind, arguments = get_origin(hint), get_args(hint)
    is_single = not isinstance(value, (list, tuple))
    items = [value] if is_single else value
    if kind is list or arguments[1:] == (...,):
        arguments = arguments[:1] * len(items)
    if len(items) != len(arguments) or (is_single and kind is tuple):
        raise wrong_type(key, value, hint)
    try:
        return kind(convert(item, argument, key) for item, argument in zip(items, arguments, strict=True))
    except ConfigError:
        raise wrong_type(key, value, hint) from None  # shows the whole, not the item


def _as_scalar(value: Any, hint: type, key: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not abs(value) <= LARGEST:  # also nan
        raise refused(key, value, f"takes {type_name(hint)}, finite and at most {LARGEST}", code="not-finite")
    if hint is bool:
        if isinstance(value, bool) or (number and value in (0, 1)):
            return bool(value)
        if isinstance(value, str) and value.lower() in WORDS:
            return WORDS[value.lower()]
    elif hint is str:
        if number or isinstance(value, str):
            return str(value)
    elif number and (hint is float or value == int(value)):
        return hint(value)
    raise wrong_type(key, value, hint)


def type_name(hint: Any) -> str:
    """A type as a phrase for a message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"a list, each item {type_name(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(map(type_name, arguments))}"
    if origin is dict or hint is dict:
        return "a group of keys"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def wrong_type(key: str, value: Any, hint: Any) -> ConfigError:
    return refused(key, value, f"takes {type_name(hint)}", code="type")
