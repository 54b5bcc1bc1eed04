"""What episodes amount to: success, pass@k, return, turns, tokens and invalid replies, each with a 95 % interval.

    measured = measure(outcomes, asked={123: 16, 124: 16})             # level -> episodes that there should be
    measured.success, measured.pass_at[16], measured.mean_return       # Estimate(value, low, high)
    difference(outcomes_of_one, outcomes_of_other, asked)              # on the same levels

Samples of one level are no independent trials: what counts as one observation is a level.

An episode that could not be played to its end (a server that failed, a budget that was spent) is no outcome, and never
a zero. But it is not missing by chance either: what takes long is often lost. So where episodes are missing, the
interval of a success reaches from the lower end that it has with all of them lost to the upper end with all of them
won, and means of other things, which nothing bounds, have no interval.

Pure Python.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, variance
from typing import Any, NamedTuple

from ragen.statistics import Difference, Interval, Z, mean_interval, paired_difference, student_t_975, wilson

SAME = 1e-9  # shares that differ by less do so by rounding

Wins = Mapping[int, Sequence[bool]]  # level -> whether each of its episodes was won


class Estimate(NamedTuple):
    """A value and its 95 % interval; NaN-free: an interval that nothing is known of has no bounds."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Outcome:
    """One episode that was played to its end."""

    seed: int  # the level
    success: bool
    score: float  # the environment's reward and the format penalties
    num_turns: int
    num_invalid: int  # turns whose reply was malformed, cut off, or named an invalid action or none
    num_tokens: int | None  # sampled; None where a server did not say


@dataclass(frozen=True)
class Measured:
    num_levels: int
    num_episodes: int
    success: Estimate
    pass_at: dict[int, Estimate]
    mean_return: Estimate
    turns: Estimate
    tokens: Estimate | None
    invalid: Estimate


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """From a line of the JSON lines (`output.record_of`)."""
    metadata, turns = record["metadata"], record["turns"]
    tokens = [turn["num_tokens"] for turn in turns]
    return Outcome(
        seed=metadata["seed"],
        success=metadata["success"],
        score=metadata["total_reward"] + metadata["total_penalty"],
        num_turns=len(turns),
        num_invalid=sum(turn["is_invalid"] for turn in turns),
        num_tokens=None if None in tokens else sum(tokens),
    )


def measure(outcomes: Sequence[Outcome], asked: Mapping[int, int] | None = None) -> Measured | None:
    """All numbers of one model in one environment; None where nothing was played. Without `asked` none is missing."""
    if not outcomes:
        return None
    levels, wins = by_level(outcomes), wins_of(outcomes)
    lost, won = (completed(wins, asked, end) for end in (False, True))

    def known(found: Estimate) -> Estimate:
        return found if lost == won else Estimate(found.value, None, None)

    tokens = [outcome.num_tokens for outcome in outcomes]
    return Measured(
        num_levels=len(levels),
        num_episodes=len(outcomes),
        success=_between(success_rate(wins), success_rate(lost), success_rate(won)),
        pass_at={
            k: _between(pass_rate(wins, k), pass_rate(lost, k), pass_rate(won, k))
            for k in ks_of(won)
            if any(len(level) >= k for level in wins.values())
        },
        mean_return=known(mean([fmean(item.score for item in level) for level in levels.values()])),
        turns=known(count([fmean(item.num_turns for item in level) for level in levels.values()])),
        tokens=None
        if None in tokens
        else known(count([fmean(item.num_tokens for item in level) for level in levels.values()])),
        invalid=known(
            ratio(
                [sum(item.num_invalid for item in level) for level in levels.values()],
                [sum(item.num_turns for item in level) for level in levels.values()],
            )
        ),
    )


def by_level(outcomes: Sequence[Outcome]) -> dict[int, list[Outcome]]:
    levels: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        levels.setdefault(outcome.seed, []).append(outcome)
    return levels


# --- what is missing ----------------------------------------------------------------------------------------------


def wins_of(outcomes: Sequence[Outcome]) -> Wins:
    return {seed: [outcome.success for outcome in level] for seed, level in by_level(outcomes).items()}


def completed(wins: Wins, asked: Mapping[int, int] | None, end: bool) -> Wins:
    """The same with every missing episode won, or lost."""
    if asked is None:
        return wins
    played = {seed: wins.get(seed, []) for seed in asked}
    return {seed: [*level, *[end] * (asked[seed] - len(level))] for seed, level in played.items()}


def _between(found: Estimate, lost: Estimate, won: Estimate) -> Estimate:
    """What was found on the levels that can tell, or the nearest value that the others leave possible."""
    return Estimate(min(max(found.value, lost.value), won.value), lost.low, won.high)


# --- pass@k -------------------------------------------------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """How likely at least one of k samples succeeds, from n samples of which c did: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. (2021): the share of all choices of k samples that hold a success.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} successes among {num_samples} samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def ks_of(wins: Wins) -> list[int]:
    """1, 2, 4, … and the number of samples that most levels have."""
    ((most, _),) = Counter(len(level) for level in wins.values()).most_common(1)
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def pass_rate(wins: Wins, k: int) -> Estimate:
    """Over the levels that have k samples."""
    return rate([pass_at_k(len(level), sum(level), k) for level in wins.values() if len(level) >= k])


# --- intervals ----------------------------------------------------------------------------------------------------


def success_rate(wins: Wins) -> Estimate:
    return rate([fmean(level) for level in wins.values()])


def rate(values: Sequence[float]) -> Estimate:
    """The mean of numbers between 0 and 1, one for each level, with Wilson's interval.

    The number of trials is that of independent ones which would spread as the levels do: with one sample a level it
    is the number of levels, with several it is more, but never more than levels that differ allow.
    """
    num, value = len(values), fmean(values)
    spread = variance(values) / num if num > 1 else 0.0
    trials = num if spread == 0.0 else max(num, round(value * (1 - value) / spread))
    return Estimate(value, *wilson(min(max(value, 0.0), 1.0) * trials, trials))


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one number for each level, with Student's interval; no bounds for a single level."""
    return Estimate(fmean(values), *(mean_interval(values) or (None, None)))


def count(values: Sequence[float]) -> Estimate:
    """`mean` of numbers that are never negative."""
    value, low, high = mean(values)
    return Estimate(value, low if low is None else max(0.0, low), high)


def ratio(parts: Sequence[int], wholes: Sequence[int]) -> Estimate:
    """A share, such as invalid replies of all replies, whose parts come in levels of different size."""
    num, whole = len(parts), sum(wholes)
    value = sum(parts) / whole
    if num < 2:
        return Estimate(value, None, None)
    rests = [part - value * size for part, size in zip(parts, wholes, strict=True)]
    spread = num * sum(rest * rest for rest in rests) / (num - 1) / whole**2
    if spread == 0.0:
        return Estimate(value, *wilson(value * num, num))
    reach = student_t_975(num - 1) * sqrt(spread)
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


# --- differences --------------------------------------------------------------------------------------------------


def difference(
    before: Sequence[Outcome], after: Sequence[Outcome], asked: Mapping[int, int] | None = None
) -> Difference | None:
    """How much success differs on the levels that both have played; None where there are none.

    Where some of `asked` is missing, the ends are those with all of it lost by the one and won by the other.
    """
    old, new = wins_of(before), wins_of(after)
    found = paired(old, new)
    worst = paired(completed(old, asked, True), completed(new, asked, False))
    best = paired(completed(old, asked, False), completed(new, asked, True))
    if found is None or worst is None or best is None:
        return None
    return found._replace(mean=min(max(found.mean, worst.mean), best.mean), low=worst.low, high=best.high)


def paired(old: Wins, new: Wins) -> Difference | None:
    """The change on the levels that both have; None where there are none.

    With one sample for each level this is `statistics.paired_difference`; with several, Student's interval of the
    differences of the levels' rates. Where these are all the same, their spread says nothing: the interval is then
    that of `paired_difference` with a level as one observation, and all that is possible for a single level.
    """
    shared = sorted(old.keys() & new.keys())
    if not shared:
        return None
    if all(len(old[seed]) == len(new[seed]) == 1 for seed in shared):
        return paired_difference([old[seed][0] for seed in shared], [new[seed][0] for seed in shared])
    changes = [fmean(new[seed]) - fmean(old[seed]) for seed in shared]
    value, low, high = mean(changes)
    if low is None or high is None:
        low, high = -1.0, 1.0
    elif max(changes) - min(changes) < SAME:
        low, high = _of_equal_changes(value, len(changes))
    return Difference(value, max(-1.0, low), min(1.0, high), num_levels=len(shared))


def _of_equal_changes(change: float, num_levels: int) -> Interval:
    """Agresti and Min's interval where every level has changed by so much: such a share of them is won, or lost."""
    won, lost = (max(0.0, part) * num_levels + 0.5 for part in (change, -change))
    num = num_levels + 2
    reach = Z * sqrt((won + lost) - (won - lost) ** 2 / num) / num
    return Interval((won - lost) / num - reach, (won - lost) / num + reach)
