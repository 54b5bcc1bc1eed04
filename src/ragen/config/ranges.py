"""Which values a key of the schema takes, where its type alone does not say so.

env_groups: int = key(8, at_least=1)                     # in the schema
within(at_least=1).holds(0), within(at_least=1).text     # False, "must be at least 1"

`validate.check_ranges` tests every key. Rules over several keys are in `validate`.
"""

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """A test of a value that is not null, and the rule for a message."""

    holds: Callable[[Any], bool]
    text: str


RELATIONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}


def within(at_least: float | None = None, above: float | None = None, at_most: float | None = None) -> Range | None:
    """Numbers within bounds; None without bounds."""
    limits = dict(zip(RELATIONS, (at_least, above, at_most), strict=True))
    bounds = {relation: limit for relation, limit in limits.items() if limit is not None}
    if not bounds:
        return None
    text = " and ".join(f"{relation} {limit}" for relation, limit in bounds.items())
    return Range(lambda value: all(RELATIONS[name](value, limit) for name, limit in bounds.items()), f"must be {text}")


NOT_EMPTY = Range(lambda value: value.strip() != "", "must not be empty")
SOME_TAG = Range(lambda tags: len(tags) > 0, "must name at least one tag")
TWO_DECAYS = Range(
    lambda values: len(values) == 2 and all(0 <= beta < 1 for beta in values), "takes two numbers, at least 0, below 1"
)
COUNT_OR_ALL = Range(
    lambda value: value == "all" if isinstance(value, str) else value >= 1, "takes a whole number of at least 1, or all"
)
REPLY_LENGTHS = Range(
    lambda text: re.fullmatch(r"((lognormal:)?[1-9]\d{0,8})?", text) is not None,
    "takes a number of tokens, or lognormal:MEAN for ragged lengths; empty: replies end as they are sampled",
)
HOLDS_MODEL = Range(
    lambda contents: "model" in contents, "must contain model; to save nothing at all, set trainer.save_freq=-1"
)
CHECKPOINT_PATH = Range(
    lambda path: not path or re.search(r"(^|/)global_step_\d+/*$", path) is not None,
    "must name a directory global_step_<N>",
)

# Published choices that this system does not offer.
NATIVE = Range(lambda name: name == "native", "this version has the native engine only; use native")
NO_ADJUSTING = Range(
    lambda mode: mode == "none",
    "duplicating or dropping random episodes distorts group statistics, and batch sizes need not divide; use none",
)
CHAT_MESSAGES = Range(
    lambda prefix: prefix == "message", "rows are chat messages, which the model's chat template formats; use message"
)
