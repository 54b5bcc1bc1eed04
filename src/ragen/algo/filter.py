"""Which groups are worth an update: score each group, keep whole groups, say why. Plain Python, no torch.

    scores_G = [group_score("reward_variance", rewards) for rewards in rewards_G]     # rewards of the group's episodes
    verdicts_G = select(scores_G, rule)
    kept = [group for group, verdict in zip(groups, verdicts_G) if verdict.keep]
    metrics = filter_metrics("reward_variance", rewards_G, scores_G, verdicts_G)

A group whose episodes all earned the same teaches nothing, and one whose rewards differ only by a step penalty is
blown up to full size by the division by its std: such groups are better left out. With `include_zero` false, groups of
score zero are no candidates. A strategy then judges the candidates:

`top_p`, value p. With p >= 1, all candidates. Otherwise they are taken best first (highest score for `largest`, lowest
if not; the earlier group at a tie) until they hold a share p of the mass:
- `linear`: mass = score. Stop when the running sum reaches p * (sum of all) - selection_eps, or before a score <= 0;
  if the sum was not reached, nothing is kept. When p * (sum of all) is no more than selection_eps nothing is
  kept either: an all-zero step is an empty step. Scores below zero lower the sum to reach and are never taken.
- `softmax`: mass = exp(score), exp(-score) for the smallest. Stop when the running sum reaches p * (sum of all); at
  least one group is kept.

Worked, linear with eps 0.01: scores 4, 3, 2, 1 and p = 0.6 have to reach 5.99, and 4 + 3 does: two groups are kept.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

ZERO_SCORE = 1e-10  # a score of this size or less is zero

KEPT = "kept"
ZERO = "zero score"  # no candidate, since include_zero is false
OUTSIDE = "outside top-p mass"  # the better groups hold the mass already
NO_MASS = "too little mass"  # linear: p * (sum of scores) <= selection_eps
NOT_REACHED = "threshold not reached"  # linear: a score <= 0 ended the walk too early
REASONS = (KEPT, ZERO, OUTSIDE, NO_MASS, NOT_REACHED)


@dataclass(frozen=True)
class FilterRule:
    """The settings `rollout_filter_*`."""

    strategy: str  # a key of STRATEGIES
    value: float
    largest: bool  # False: the smallest scores are the best
    include_zero: bool
    prob_mode: str  # top_p only: a key of PROB_MODES
    selection_eps: float  # top_p linear only

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"filter strategy {self.strategy!r} is not available; choose from {', '.join(STRATEGIES)}")
        if self.prob_mode not in PROB_MODES:
            raise ValueError(f"top_p prob mode {self.prob_mode!r} is unknown; choose from {', '.join(PROB_MODES)}")


@dataclass(frozen=True)
class Verdict:
    keep: bool
    reason: str  # one of REASONS

    def __post_init__(self):
        assert self.reason in REASONS and self.keep == (self.reason == KEPT), self


@dataclass(frozen=True)
class GroupMetric:
    """A score of a group: a quantity of each episode, and what is made of the group's values."""

    quantity: str  # also the name in `rollout/in_group_<quantity>_*`
    reduce: Callable[[Sequence[float]], float]


def sample_std(values: Sequence[float]) -> float:
    """With n - 1; 0 for a single value. The arithmetic inside is exact: equal values of any size give exactly 0."""
    return stdev(values) if len(values) > 1 else 0.0


REWARD_STD = GroupMetric("reward", sample_std)
# The documented name says variance; it has always been the standard deviation.
METRICS: dict[str, GroupMetric] = {"reward_variance": REWARD_STD, "reward_std": REWARD_STD}


def group_score(metric: str, values_E: Sequence[float]) -> float:
    """The score of one group from the metric's quantity of each of its episodes."""
    if metric not in METRICS:
        raise ValueError(f"filter metric {metric!r} is not available; choose from {', '.join(METRICS)}")
    assert len(values_E) > 0, "a group without episodes has no score"
    return METRICS[metric].reduce(values_E)


def select(scores_G: Sequence[float], rule: FilterRule) -> list[Verdict]:
    """One verdict per group, in the order of the scores."""
    if not all(math.isfinite(score) for score in scores_G):
        raise ValueError(f"every group score must be a finite number, got {list(scores_G)}")
    reasons = [ZERO] * len(scores_G)
    candidates = [index for index, score in enumerate(scores_G) if rule.include_zero or not _is_zero(score)]
    chosen = STRATEGIES[rule.strategy]([scores_G[index] for index in candidates], rule, len(scores_G))
    for index, reason in zip(candidates, chosen, strict=True):
        reasons[index] = reason
    return [Verdict(reason == KEPT, reason) for reason in reasons]


def top_p(scores: Sequence[float], rule: FilterRule, num_groups: int) -> list[str]:
    """The best groups that together hold a share `value` of the mass."""
    if rule.value >= 1:
        return [KEPT] * len(scores)
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index] if rule.largest else scores[index])
    num_kept, reason = PROB_MODES[rule.prob_mode]([scores[index] for index in best_first], rule)
    reasons = [reason] * len(scores)
    for index in best_first[:num_kept]:
        reasons[index] = KEPT
    return reasons


def _linear(ordered: Sequence[float], rule: FilterRule) -> tuple[int, str]:
    """How many of the scores, best first, are kept, and why the others are not."""
    # All sums run in the same order: the last running sum is the total, so rounding cannot put it out of reach.
    running = list(accumulate(ordered, initial=0.0))
    threshold = rule.value * running[-1] - rule.selection_eps
    if threshold <= 0:
        return 0, NO_MASS
    for num_kept, reached in enumerate(running):
        if reached >= threshold:
            return num_kept, OUTSIDE
        if num_kept < len(ordered) and ordered[num_kept] <= 0:
            break
    return 0, NOT_REACHED


def _softmax(ordered: Sequence[float], rule: FilterRule) -> tuple[int, str]:
    # Masses are left unnormalised: those of equal scores are then exactly 1 and sum without rounding.
    running = list(accumulate(math.exp(-abs(score - ordered[0])) for score in ordered))
    num_kept = next((index + 1 for index, mass in enumerate(running) if mass >= rule.value * running[-1]), 0)
    return num_kept, OUTSIDE


# A strategy sees the candidates' scores, the rule and the number of all groups, and gives a reason for each candidate.
Strategy = Callable[[Sequence[float], FilterRule, int], list[str]]
STRATEGIES: dict[str, Strategy] = {"top_p": top_p}
PROB_MODES: dict[str, Callable[[Sequence[float], FilterRule], tuple[int, str]]] = {
    "linear": _linear,
    "softmax": _softmax,
}


def filter_metrics(
    metric: str, values_G_E: Sequence[Sequence[float]], scores_G: Sequence[float], verdicts_G: Sequence[Verdict]
) -> dict[str, float]:
    """What the filter saw and did: means over groups of each group's std, max, mean and sum, and counts of verdicts.

    The same names appear at every step; means over no group are 0.
    """
    quantity = METRICS[metric].quantity
    chosen_G_E = [values for values, verdict in zip(values_G_E, verdicts_G, strict=True) if verdict.keep]
    metrics = {}
    for prefix, groups in (("rollout/in_group", values_G_E), ("rollout/chosen_in_group", chosen_G_E)):
        for name, reduce in (("std", sample_std), ("max", max), ("mean", fmean), ("sum", math.fsum)):
            value = fmean(reduce(values) for values in groups) if groups else 0.0
            metrics[f"{prefix}_{quantity}_{name}"] = value
            if name != "sum":
                metrics[f"{prefix}_{name}"] = value
    metrics["rollout/filter_kept_count"] = float(len(chosen_G_E))
    metrics["rollout/filter_kept_ratio"] = len(chosen_G_E) / len(verdicts_G) if verdicts_G else 0.0
    metrics["rollout/filter_zero_count"] = float(sum(_is_zero(score) for score in scores_G))
    counts = Counter(verdict.reason for verdict in verdicts_G)
    for reason in REASONS:
        metrics[f"rollout/filter_reason/{reason.replace(' ', '_').replace('-', '_')}"] = float(counts[reason])
    return metrics


def _is_zero(score: float) -> bool:
    return abs(score) <= ZERO_SCORE
