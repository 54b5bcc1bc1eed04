"""What makes two runs the same: which keys change what a run computes. The schema says so, key by key.

    different_keys(config, stored)                          # [] if `stored` is the same run: it can be resumed
    different_keys(config, stored, kind="sft")              # the same question for fine-tuning
    identity_values(config, ignore=WHERE)                   # the values that tell runs apart, names and devices aside
    changes_only("trainer.logger")                          # "logging"; empty for a key that changes the run

A tree is a `Config`, a stored tree, or a flat one with dotted keys.
"""

from collections.abc import Collection
from functools import cache
from typing import Any

from ragen.config import keys, schema, unused_keys
from ragen.config.tree import leaves

NOTHING, UNUSED = "nothing", "unused"  # a key without effect; a key that this kind of run does not read
WHERE = (schema.NAMES, schema.LOCATION, schema.DEVICES, schema.LOGGING)  # what a run is called and where it happens
HOW = (NOTHING, UNUSED, schema.MEMORY, schema.SPEED, schema.FILES, schema.RESUMING, schema.FAILURES)
ALL = (*WHERE, *HOW, schema.BUDGET)  # whether a longer budget resumes is decided elsewhere


@cache
def changes_only(key: str, kind: str = "rl") -> str:
    """What a key, of the tree or v1, changes apart from the result of a run; empty where it changes the result.

    `kind` is `rl`, or `sft` for fine-tuning, which does not read most keys of RL.
    """
    targets = unused_keys.FOLLOWERS.get(key) or keys.targets(key) or (key,)
    reasons = [_reason(target, kind) for target in targets]
    return reasons[0] if all(reasons) else ""


def _reason(key: str, kind: str) -> str:
    if kind == "sft" and key.startswith(unused_keys.NOT_IN_SFT):
        return UNUSED
    spec = keys.spec_of("ray_kwargs.ray_init" if key.startswith("ray_kwargs.ray_init.") else key)
    marked = spec[0].metadata.get("changes_only", "") if spec else ""
    return marked or (NOTHING if keys.no_effect(key) else "")


def identity_values(tree: Any, kind: str = "rl", ignore: Collection[str] = ALL) -> dict[str, Any]:
    """The flat tree without the keys that change only what `ignore` names."""
    return {key: value for key, value in leaves(tree).items() if changes_only(key, kind) not in ignore}


def different_keys(here: Any, stored: Any, kind: str = "rl", ignore: Collection[str] = ALL) -> list[str]:
    """The keys in which two runs differ, except those that change only what `ignore` names.

    A key that one tree does not have is different: it comes from another version.
    """
    mine, theirs = (identity_values(tree, kind, ignore) for tree in (here, stored))
    shared = mine.keys() & theirs.keys()
    return [key for key in {**mine, **theirs} if key not in shared or mine[key] != theirs[key]]
