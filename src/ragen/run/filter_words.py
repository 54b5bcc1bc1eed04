"""What the filter kept and dropped in a step, in words, from the step's metrics.

filter_words(metrics, "reward_variance")
# "kept 14 of 16 groups; 2 dropped: all their episodes had the same reward"
"""

from collections.abc import Mapping
from typing import Any

from ragen.algo.filter import BEYOND_K, FAR, METRICS, NO_MASS, NOT_REACHED, OUTSIDE, ZERO
from ragen.diagnose.history import finite

PREFIX = "rollout/filter_reason/"

SAME_REWARD, SAME_ENTROPY = (f"all their episodes had the same {name}" for name in ("reward", "entropy"))
# The filter's metric -> a low score, a high score, and the score 0 in words.
SCORES = {
    "reward_variance": ("low reward variance", "high reward variance", SAME_REWARD),
    "reward_std": ("low reward variance", "high reward variance", SAME_REWARD),
    "reward": ("low mean reward", "high mean reward", "their mean reward was 0"),
    "reward_sum": ("low sum of rewards", "high sum of rewards", "their rewards added up to 0"),
    "entropy": ("low entropy", "high entropy", "their entropy was 0"),
    "entropy_variance": ("low entropy variance", "high entropy variance", SAME_ENTROPY),
    "entropy_std": ("low entropy variance", "high entropy variance", SAME_ENTROPY),
    "length": ("short replies", "long replies", "their replies were empty"),
}
assert SCORES.keys() == METRICS.keys()
WORDS = {  # {score}: of the groups that the rule does not want
    OUTSIDE: "{score} (outside the top-p share)",
    BEYOND_K: "{score} (outside the top k)",
    FAR: "{score} (too far from the best)",
    NO_MASS: "all scores of the step are near 0",
    NOT_REACHED: "the scores of the step do not reach the top-p share",
}


def filter_words(metrics: Mapping[str, Any], metric: str = "reward_variance", largest: bool = True) -> str:
    counts = {name: num for name, num in _counts(metrics).items() if num}
    kept = finite(metrics, "rollout/filter_kept_count")
    if kept is None:
        return "no training step yet"
    num_kept, num_groups = round(kept), sum(counts.values())
    dropped = sorted(((num, name) for name, num in counts.items() if name != "kept"), key=lambda one: -one[0])
    if not dropped:
        return f"kept all {num_kept} groups" if num_kept else "kept no group"
    groups = f"{num_kept or 'none'} of {num_groups} groups"
    empty = finite(metrics, "rollout/consecutive_empty_after_filter_steps") or 0
    since = f", for {empty:.0f} steps" if empty > 1 else ""
    reasons = [f"{num}: {_reason(name, num, metric, largest)}" for num, name in dropped]
    reasons[0] = reasons[0].replace(":", " dropped:", 1)
    return "; ".join([f"kept {groups}{since}", *reasons])


def _counts(metrics: Mapping[str, Any]) -> dict[str, int]:
    values = {key.removeprefix(PREFIX): finite(metrics, key) for key in metrics if key.startswith(PREFIX)}
    return {name: round(value) for name, value in values.items() if value is not None}


def _reason(name: str, num: int, metric: str, largest: bool) -> str:
    """The words for a part of a metric's name; a reason that is not known here is shown as it is called."""
    low, high, zero = SCORES[metric]
    words = WORDS | {ZERO: zero if num > 1 else zero.replace("their", "its")}
    by_name = {reason.replace(" ", "_").replace("-", "_"): text for reason, text in words.items()}
    return by_name.get(name, name.replace("_", " ")).format(score=low if largest else high)
