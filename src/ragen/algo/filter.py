"""Which groups are worth an update: score each group, keep whole groups, give a reason. Plain Python, no torch.

    scores_G = [group_score("reward_variance", rewards) for rewards in rewards_G]     # rewards of the group's episodes
    verdicts_G = select(scores_G, rule)
    kept = [group for group, verdict in zip(groups, verdicts_G) if verdict.keep]
    metrics = filter_metrics("reward_variance", rewards_G, scores_G, verdicts_G)

A group whose episodes all got the same reward teaches nothing, and if rewards differ only by a step penalty, dividing
by the std inflates that noise to full size: it is better to drop such groups.

A metric reduces a quantity of the group's episodes to one score. An episode counts once in every context window: its
length is the number of tokens sampled in all its turns, its entropy the mean over all its sampled tokens.

| metric                            | score of a group                                  |
|-----------------------------------|---------------------------------------------------|
| `reward_variance`, `reward_std`   | sample std of the rewards; 0 in a group of one    |
| `reward`                          | their mean                                        |
| `reward_sum`                      | their sum                                         |
| `entropy`                         | mean of the episodes' mean token entropies        |
| `entropy_variance`, `entropy_std` | sample std of these; 0 in a group of one          |
| `length`                          | mean number of sampled tokens                     |

With `include_zero` false, groups whose score is 0 (1e-10 or less, in size) are not candidates; without candidates none
is kept. A strategy then ranks the candidates, best first: the highest score if `largest`, else the lowest; at a tie the
earlier group.

`top_p`, value p. With p >= 1, all candidates. Otherwise take them until they hold a share p of the mass:
- `linear`: mass = score. Stop when the running sum reaches p * (sum of all) - selection_eps, or before a score <= 0;
  if the sum was not reached, nothing is kept. If p * (sum of all) is at most selection_eps, nothing is kept either: an
  all-zero step is an empty step. Scores below zero lower the sum to reach and are never taken.
  For the smallest, a zero comes first and stops the search: nothing is kept.
- `softmax`: mass = exp(score), exp(-score) for the smallest. Stop when the running sum reaches p * (sum of all); at
  least one group is kept, and of equal scores as many as fill the share.

`top_k`, value p: the best floor(p * number of all groups), at least one. All groups count, also those that are not
candidates: p = 0.5 of 8 groups is 4, or 3 if only 3 are candidates. `top_f` is an older name for it.
`top_k_abs`, value k: the best k, or all if there are fewer.
For both, zeros are ordinary scores: an all-zero step keeps its first groups.

`min_p`, value p: all scores near the best: at least p * best for `largest`, at most best / p for the smallest (p = 0:
any). A share of a negative score is meaningless: if the best is below 0, only scores equal to it are kept. So the best
is always kept. An all-zero step is kept whole; for the smallest, a zero keeps only zeros, unless p is 0.

Worked, linear with eps 0.01: scores 4, 3, 2, 1 and p = 0.6 must reach 5.99, and 4 + 3 does: two groups are kept. The
same two are kept by `top_k` with 0.5 or 0.74, by `top_k_abs` with 2, and by `min_p` with 0.75: at least 3.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

ZERO_SCORE = 1e-10  # a score of at most this size is zero, and scores this close are equal for min_p
FAINT = 0.1  # a spread below this share of the step's largest says little about which episode was better
ROUNDING = 1e-9  # 0.29 of 100 groups are 29, though 0.29 * 100 is a little less in floats

KEPT = "kept"
ZERO = "zero score"  # not a candidate, since include_zero is false
OUTSIDE = "outside top-p mass"  # better groups already hold the top-p share
BEYOND_K = "outside top-k"  # there are k better groups
FAR = "too far from the best"  # min_p
NO_MASS = "too little mass"  # linear: p * (sum of scores) <= selection_eps
NOT_REACHED = "threshold not reached"  # linear: a score <= 0 stopped the search too early
REASONS = (KEPT, ZERO, OUTSIDE, BEYOND_K, FAR, NO_MASS, NOT_REACHED)


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
        assert self.strategy in STRATEGIES and self.prob_mode in PROB_MODES, self
        assert VALUES[self.strategy][0](self.value), self


@dataclass(frozen=True)
class GroupVerdict:
    keep: bool
    reason: str  # one of REASONS

    def __post_init__(self):
        assert self.reason in REASONS and self.keep == (self.reason == KEPT), self


@dataclass(frozen=True)
class GroupMetric:
    """A score of a group: a quantity of each episode, and how the group's values are reduced."""

    quantity: str  # also the name in `rollout/in_group_<quantity>_*`
    reduce: Callable[[Sequence[float]], float]


def sample_std(values: Sequence[float]) -> float:
    """With n - 1; 0 for a single value. The arithmetic is exact: equal values of any size give exactly 0."""
    return stdev(values) if len(values) > 1 else 0.0


REWARD_STD, ENTROPY_STD = GroupMetric("reward", sample_std), GroupMetric("entropy", sample_std)
# The documented names say variance; it has always been the standard deviation.
METRICS: dict[str, GroupMetric] = {
    "reward_variance": REWARD_STD,
    "reward_std": REWARD_STD,
    "reward": GroupMetric("reward", fmean),
    "reward_sum": GroupMetric("reward", math.fsum),
    "entropy": GroupMetric("entropy", fmean),
    "entropy_variance": ENTROPY_STD,
    "entropy_std": ENTROPY_STD,
    "length": GroupMetric("length", fmean),
}


def group_score(metric: str, values_E: Sequence[float]) -> float:
    """The score of one group from the metric's quantity of each of its episodes."""
    assert metric in METRICS, metric
    assert len(values_E) > 0, "a group without episodes has no score"
    return METRICS[metric].reduce(values_E)


def select(scores_G: Sequence[float], rule: FilterRule) -> list[GroupVerdict]:
    """One verdict per group, in the same order."""
    if not all(math.isfinite(score) for score in scores_G):
        raise ValueError(f"every group score must be a finite number, got {list(scores_G)}")
    reasons = [ZERO] * len(scores_G)
    candidates = [index for index, score in enumerate(scores_G) if rule.include_zero or not _is_zero(score)]
    chosen = STRATEGIES[rule.strategy]([scores_G[index] for index in candidates], rule, len(scores_G))
    for index, reason in zip(candidates, chosen, strict=True):
        reasons[index] = reason
    return [GroupVerdict(reason == KEPT, reason) for reason in reasons]


def top_p(scores: Sequence[float], rule: FilterRule, num_groups: int) -> list[str]:
    """The best groups that together hold a share `value` of the mass."""
    if rule.value >= 1:
        return [KEPT] * len(scores)
    ranked = _best_first(scores, rule)
    num_kept, reason = PROB_MODES[rule.prob_mode]([scores[index] for index in ranked], rule)
    return _first_kept(ranked, num_kept, reason)


def top_k(scores: Sequence[float], rule: FilterRule, num_groups: int) -> list[str]:
    """The best groups: a share `value` of all groups."""
    return _first_kept(_best_first(scores, rule), max(1, math.floor(rule.value * num_groups + ROUNDING)), BEYOND_K)


def top_k_abs(scores: Sequence[float], rule: FilterRule, num_groups: int) -> list[str]:
    """The best `value` groups."""
    return _first_kept(_best_first(scores, rule), int(rule.value), BEYOND_K)


def min_p(scores: Sequence[float], rule: FilterRule, num_groups: int) -> list[str]:
    """The groups within a share `value` of the best."""
    if not scores:
        return []
    best = max(scores) if rule.largest else min(scores)

    def near(score: float) -> bool:
        if abs(score - best) <= ZERO_SCORE:
            return True
        if rule.largest:
            return score >= rule.value * best - ZERO_SCORE
        return (score - ZERO_SCORE) * rule.value <= best

    return [KEPT if near(score) else FAR for score in scores]


def _best_first(scores: Sequence[float], rule: FilterRule) -> list[int]:
    """Indices; the sort is stable, so equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index] if rule.largest else scores[index])


def _first_kept(ranked: Sequence[int], num_kept: int, reason: str) -> list[str]:
    """`KEPT` for the first ranked indices and `reason` for the others, in index order."""
    reasons = [reason] * len(ranked)
    for index in ranked[:num_kept]:
        reasons[index] = KEPT
    return reasons


def _linear(ordered: Sequence[float], rule: FilterRule) -> tuple[int, str]:
    """How many of the scores, best first, to keep, and why the others are dropped."""
    # The total is the last running sum: with another order of additions, rounding could put it out of reach.
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
    # Masses stay unnormalised: those of equal scores are exactly 1 and sum without rounding.
    running = list(accumulate(math.exp(-abs(score - ordered[0])) for score in ordered))
    num_kept = next((index + 1 for index, mass in enumerate(running) if mass >= rule.value * running[-1]), 0)
    return num_kept, OUTSIDE


# (scores of the candidates, rule, number of all groups) -> a reason for each candidate
Strategy = Callable[[Sequence[float], FilterRule, int], list[str]]
STRATEGIES: dict[str, Strategy] = {
    "top_p": top_p,
    "top_k": top_k,
    "top_k_abs": top_k_abs,
    "min_p": min_p,
    "top_f": top_k,
}
_FRACTION = (lambda value: 0 < value <= 1, "keeps a fraction of the groups, at most 1; for a count use top_k_abs")
# The valid values of each strategy, as a test and as text.
VALUES: dict[str, tuple[Callable[[float], bool], str]] = {
    "top_p": (lambda value: value > 0, "takes a share above 0; 1 keeps every candidate"),
    "top_k": _FRACTION,
    "top_k_abs": (
        lambda value: value >= 1 and float(value).is_integer(),
        "keeps a whole number of groups, at least 1; for a fraction use top_k",
    ),
    "min_p": (lambda value: 0 <= value <= 1, "takes a share of the best score, between 0 and 1"),
    "top_f": _FRACTION,
}
PROB_MODES: dict[str, Callable[[Sequence[float], FilterRule], tuple[int, str]]] = {
    "linear": _linear,
    "softmax": _softmax,
}


def filter_metrics(
    metric: str, values_G_E: Sequence[Sequence[float]], scores_G: Sequence[float], verdicts_G: Sequence[GroupVerdict]
) -> dict[str, float]:
    """Metrics of the filter: means over groups of each group's std, max, mean and sum, and counts of verdicts.

    `values_G_E` holds the metric's quantity of each episode. Every step has the same names; means over no group are 0.
    """
    quantity = METRICS[metric].quantity
    metrics = in_group_metrics(quantity, values_G_E, verdicts_G)
    for prefix in ("in_group", "chosen_in_group"):
        for name in ("std", "max", "mean"):
            metrics[f"rollout/{prefix}_{name}"] = metrics[f"rollout/{prefix}_{quantity}_{name}"]
    num_kept = sum(verdict.keep for verdict in verdicts_G)
    metrics["rollout/filter_kept_count"] = float(num_kept)
    metrics["rollout/filter_kept_ratio"] = num_kept / len(verdicts_G) if verdicts_G else 0.0
    metrics["rollout/filter_zero_count"] = float(sum(_is_zero(score) for score in scores_G))
    counts = Counter(verdict.reason for verdict in verdicts_G)
    for reason in REASONS:
        metrics[f"rollout/filter_reason/{reason.replace(' ', '_').replace('-', '_')}"] = float(counts[reason])
    return metrics


def in_group_metrics(
    quantity: str, values_G_E: Sequence[Sequence[float]], verdicts_G: Sequence[GroupVerdict]
) -> dict[str, float]:
    """`rollout/in_group_<quantity>_…` over all groups, `rollout/chosen_in_group_<quantity>_…` over those kept."""
    chosen_G_E = [values for values, verdict in zip(values_G_E, verdicts_G, strict=True) if verdict.keep]
    return {
        f"rollout/{prefix}_{quantity}_{name}": fmean(reduce(values) for values in groups) if groups else 0.0
        for prefix, groups in (("in_group", values_G_E), ("chosen_in_group", chosen_G_E))
        for name, reduce in (("std", sample_std), ("max", max), ("mean", fmean), ("sum", math.fsum))
    }


def faint_share(stds_G: Sequence[float], verdicts_G: Sequence[GroupVerdict]) -> float:
    """The share of kept groups with a reward std above 0 but below a tenth of the largest; 0 without kept groups.

    Divided by its std, such a group counts as much as one in which some episodes won and some lost.
    """
    kept = [std for std, verdict in zip(stds_G, verdicts_G, strict=True) if verdict.keep]
    faint = [std for std in kept if not _is_zero(std) and not is_spread(std, max(stds_G))]
    return len(faint) / len(kept) if kept else 0.0


def is_spread(std: float, largest: float) -> bool:
    """Whether the std of a group's rewards says which episode was better: above 0, and not faint beside the largest."""
    return not _is_zero(std) and std >= FAINT * largest


def _is_zero(score: float) -> bool:
    return abs(score) <= ZERO_SCORE
