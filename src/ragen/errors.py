"""Errors that end a command with a message for the user, and the parts of such messages.

raise ConfigError(f"trainer.logger={shown(name)}: unknown logger{nearest_of(name, KNOWN)}")
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LARGEST = 2**63 - 1  # numbers in a config are finite and fit into 64 bits


class ConfigError(ValueError):
    """A config that cannot work. The message is for the user: it names the key, the value and what would be right."""


class RunFailed(RuntimeError):
    """A run that cannot go on, through no fault of its config. The message says what to do."""


def one_error(problems: list[str]) -> ConfigError:
    """Several problems as one message; a single one stands for itself."""
    return ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems", *problems]))


def shown(value: Any) -> str:
    """A value in a message: on one line, and not endless."""
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {math.floor(math.log10(abs(value))) + 1} digits"
    text = " ".join(str(value).splitlines())
    return text if len(text) <= 120 else f"{text[:100]}…"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean x?` for a misspelt name, or nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def nearest_of(name: str, known: Iterable[str], what: str = "Known") -> str:
    """The end of a message about an unknown name: the nearest one, if any, and all that there are."""
    known = list(known)
    return f"{did_you_mean(name, known) or '.'} {what}: {', '.join(known)}"
