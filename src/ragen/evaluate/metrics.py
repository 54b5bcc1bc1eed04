"""Metrics of episodes: success, pass@k, return, turns, tokens and invalid replies, each with a 95 % interval.

    measured = measure(outcomes, asked={123: 16, 124: 16})             # level -> episodes that were asked for
    measured.success, measured.pass_at[16], measured.mean_return       # Estimate(value, low, high)
    difference(outcomes_of_one, outcomes_of_other, asked)              # on the same levels

Samples of one level are not independent: a level is one observation.

An episode that could not be played to its end (the server failed, the budget was spent) has no outcome; it is never
scored as zero. But it is not missing at random: long episodes are lost more often. So where episodes are missing, the
interval of a success rate reaches from its lower end with all of them lost to its upper end with all of them won; means
of other quantities, which have no bounds, get no interval.

Pure Python.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, sqrt
from statistics import fmean
from typing import Any

from ragen.statistics import Difference, Estimate, agresti_min, mean, paired_difference, rate, student_t_975, wilson

SAME = 1e-9  # smaller differences between rates are rounding errors

Wins = Mapping[int, Sequence[bool]]  # level -> whether each of its episodes was won


@dataclass(frozen=True)
class Outcome:
    """One episode that was played to its end."""

    seed: int  # the level
    success: bool
    score: float  # the environment's reward and the format penalties
    num_turns: int
    num_invalid: int  # turns whose reply was malformed, cut off, or named an invalid action or none
    num_tokens: int | None  # sampled; None where a server did not report them


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
        score=float(metadata["total_reward"]) + float(metadata["total_penalty"]),
        num_turns=len(turns),
        num_invalid=sum(turn["is_invalid"] for turn in turns),
        num_tokens=None if None in tokens else sum(tokens),
    )


def measure(outcomes: Sequence[Outcome], asked: Mapping[int, int] | None = None) -> Measured | None:
    """All metrics of one model in one environment; None if nothing was played. Without `asked` nothing is missing."""
    if not outcomes:
        return None
    levels, wins = by_level(outcomes), wins_of(outcomes)
    lost, won = (completed(wins, asked, end) for end in (False, True))

    def between(metric: Callable[[Wins], Estimate]) -> Estimate:
        """The value on the levels that were played, or the nearest value that the missing episodes leave possible."""
        worst, best = metric(lost), metric(won)
        return Estimate(min(max(metric(wins).value, worst.value), best.value), worst.low, best.high)

    def known(found: Estimate) -> Estimate:
        return found if lost == won else Estimate(found.value, None, None)

    def of_levels(name: str, summary: Callable[[Iterable[float]], float] = fmean) -> list[float]:
        return [summary(getattr(outcome, name) for outcome in level) for level in levels.values()]

    has_tokens = all(outcome.num_tokens is not None for outcome in outcomes)
    ks = [k for k in ks_of(won) if any(len(level) >= k for level in wins.values())]
    return Measured(
        num_levels=len(levels),
        num_episodes=len(outcomes),
        success=between(success_rate),
        pass_at={k: between(partial(pass_rate, k=k)) for k in ks},
        mean_return=known(mean(of_levels("score"))),
        turns=known(mean(of_levels("num_turns"), lowest=0.0)),
        tokens=known(mean(of_levels("num_tokens"), lowest=0.0)) if has_tokens else None,
        invalid=known(ratio(of_levels("num_invalid", sum), of_levels("num_turns", sum))),
    )


def by_level(outcomes: Sequence[Outcome]) -> dict[int, list[Outcome]]:
    levels: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        levels.setdefault(outcome.seed, []).append(outcome)
    return levels


def wins_of(outcomes: Sequence[Outcome]) -> Wins:
    return {seed: [outcome.success for outcome in level] for seed, level in by_level(outcomes).items()}


def completed(wins: Wins, asked: Mapping[int, int] | None, end: bool) -> Wins:
    """The same with every missing episode won, or lost."""
    if asked is None:
        return wins
    played = {seed: wins.get(seed, []) for seed in asked}
    return {seed: [*level, *[end] * (asked[seed] - len(level))] for seed, level in played.items()}


def success_rate(wins: Wins) -> Estimate:
    return rate([fmean(level) for level in wins.values()])


def pass_rate(wins: Wins, k: int) -> Estimate:
    """Over the levels that have k samples."""
    return rate([pass_at_k(len(level), sum(level), k) for level in wins.values() if len(level) >= k])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """How likely at least one of k samples succeeds, from n samples of which c did: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. (2021): the share of all choices of k samples that include a success.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} successes among {num_samples} samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def ks_of(wins: Wins) -> list[int]:
    """1, 2, 4, … and the number of samples that most levels have."""
    ((most, _),) = Counter(len(level) for level in wins.values()).most_common(1)
    return sorted({2**power for power in range(most.bit_length())} | {most})


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """A share, such as invalid replies of all replies, summed over levels of different size."""
    num, whole = len(parts), sum(wholes)
    value = sum(parts) / whole
    if num < 2:
        return Estimate(value, None, None)
    residuals = [part - value * size for part, size in zip(parts, wholes, strict=True)]
    spread = num * sum(residual * residual for residual in residuals) / (num - 1) / whole**2
    if spread == 0.0:
        return Estimate(value, *wilson(value * num, num))
    reach = student_t_975(num - 1) * sqrt(spread)
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


def difference(
    before: Sequence[Outcome], after: Sequence[Outcome], asked: Mapping[int, int] | None = None
) -> Difference | None:
    """The change of success on the levels that both have played; None if there are none.

    If some of `asked` are missing, the ends are those with all of them lost by one side and won by the other.
    """
    old, new = wins_of(before), wins_of(after)
    found = paired(old, new)
    worst = paired(completed(old, asked, True), completed(new, asked, False))
    best = paired(completed(old, asked, False), completed(new, asked, True))
    if found is None or worst is None or best is None:
        return None
    return found._replace(mean=min(max(found.mean, worst.mean), best.mean), low=worst.low, high=best.high)


def paired(old: Wins, new: Wins) -> Difference | None:
    """The change on the levels that both have; None if there are none.

    With one sample a level this is `statistics.paired_difference`; with several, Student's interval of the differences
    of the levels' rates. If these are all equal, their spread says nothing: the interval is then Agresti and Min's with
    a level as one observation, and everything possible for a single level.
    """
    shared = sorted(old.keys() & new.keys())
    if not shared:
        return None
    if all(len(old[seed]) == len(new[seed]) == 1 for seed in shared):
        return paired_difference([old[seed][0] for seed in shared], [new[seed][0] for seed in shared])
    changes = [fmean(new[seed]) - fmean(old[seed]) for seed in shared]
    num, (change, low, high) = len(changes), mean(changes)
    if low is None or high is None:
        low, high = -1.0, 1.0
    elif max(changes) - min(changes) < SAME:
        low, high = agresti_min(max(0.0, change) * num, max(0.0, -change) * num, num)
    return Difference(change, max(-1.0, low), min(1.0, high), num_levels=num)
