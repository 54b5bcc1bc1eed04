"""Errors that end a command with a message for the user, and the parts of such messages.

raise ConfigError(f"trainer.logger={shown(name)}: unknown logger{nearest_of(name, KNOWN)}")
raise refused("trainer.test_freq", "often", "takes a whole number", code="type")    # trainer.test_freq=often: takes …
"""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LARGEST = 2**63 - 1  # numbers in a config are finite and fit into 64 bits


class ConfigError(ValueError):
    """A config that cannot work. The message is for the user: it names the key, the value and what would be right.

    For programs and tests, `key` is the key as the user typed it and `code` the kind of problem; where there are
    several, `problems` holds one error each, and the key and code of the first are those of the whole.
    """

    def __init__(
        self, message: str, *, key: str | None = None, code: str | None = None, problems: Sequence["ConfigError"] = ()
    ):
        super().__init__(message)
        self.key, self.code, self._problems = key, code, tuple(problems)

    @property
    def problems(self) -> tuple["ConfigError", ...]:
        return self._problems or (self,)


class RunFailed(RuntimeError):
    """A run that cannot continue, though its config is right. The message says what to do."""

    status = 1  # the exit status of a command that ends with it


def refused(key: str, value: Any, why: str, code: str) -> ConfigError:
    """The error for one value: `key=value: why`."""
    return ConfigError(f"{key}={shown(value)}: {why}", key=key, code=code)


def raise_any(problems: Iterable[ConfigError]) -> None:
    """Raise a single problem as it is, several as one error that lists each message once; nothing if there are none."""
    found = list({str(problem): problem for problem in problems}.values())
    if len(found) > 1:
        message = "\n  - ".join([f"{len(found)} problems", *map(str, found)])
        raise ConfigError(message, key=found[0].key, code=found[0].code, problems=found)
    if found:
        raise found[0]


def shown(value: Any) -> str:
    """A value in a message: on one line, and of limited length."""
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
    """The end of a message about an unknown name: the nearest one, if any, and all known ones."""
    known = list(known)
    return f"{did_you_mean(name, known) or '.'} {what}: {', '.join(known)}"
