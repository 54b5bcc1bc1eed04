"""How certain a success rate or a mean is: intervals of one, of the difference of two, and by difficulty.

    wilson(169, 512)                          # Interval(low=0.2907…, high=0.3719…)
    rate([0.25, 1.0, 0.5])                    # Estimate: the success rate of several samples of each of three levels
    mean([3.1, 2.8, 4.0])                     # Estimate: with Student's interval
    paired_difference(before, after)          # Difference(mean=0.152, low=0.103, high=0.199, num_levels=512)
    mean_interval([0.1, 0.3, 0.2])            # Interval(low=-0.048…, high=0.448…)
    success_by_length([(3, True), (8, False)])  # {"3-4": Rate(…), "7+": Rate(…)}

All intervals are at 95 %. Pure Python.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import atan2, copysign, cos, inf, pi, sin, sqrt
from statistics import fmean, variance
from typing import NamedTuple

Z = 1.959963984540054  # the normal quantile of 97.5 %

# Optimal lengths that are reported together; the last bin is open.
LENGTH_BINS = ((1, 2), (3, 4), (5, 6), (7, None))
UNSOLVABLE = "none"  # the bin of levels without a certain plan
LARGEST = 1e100  # of numbers whose sums and squares are computed


def bounded(value: float) -> float:
    """A number as a float; one that could make sums and squares overflow is infinite."""
    return float(value) if not abs(value) > LARGEST else copysign(inf, value > 0 or -1)


class Interval(NamedTuple):
    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


class Rate(NamedTuple):
    """Successes of a number of trials."""

    num_successes: int
    num_trials: int

    @property
    def mean(self) -> float:
        return self.num_successes / self.num_trials

    @property
    def interval(self) -> Interval:
        return wilson(self.num_successes, self.num_trials)


class Estimate(NamedTuple):
    """A value and its 95 % interval; the bounds are None where nothing is known about them."""

    value: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """The change of a success rate on the same levels."""

    mean: float
    low: float
    high: float
    num_levels: int

    @property
    def is_noise(self) -> bool:
        """No change at all is among the values that the data allow."""
        return self.low <= 0.0 <= self.high


def wilson(num_successes: float, num_trials: int) -> Interval:
    """Wilson's score interval of a success rate. Without trials nothing is known: 0 to 1."""
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} successes of {num_trials} trials")
    if num_trials == 0:
        return Interval(0.0, 1.0)
    rate = num_successes / num_trials
    shrink = 1.0 / (1.0 + Z * Z / num_trials)
    centre = (rate + Z * Z / (2 * num_trials)) * shrink
    spread = Z * sqrt(rate * (1 - rate) / num_trials + Z * Z / (4 * num_trials**2)) * shrink
    # At the ends the formula gives 0 and 1 only up to rounding.
    low = 0.0 if num_successes == 0 else max(0.0, centre - spread)
    high = 1.0 if num_successes == num_trials else min(1.0, centre + spread)
    return Interval(low, high)


def paired_difference(before: Sequence[bool], after: Sequence[bool]) -> Difference:
    """How much the success on the same levels, in the same order, has changed.

    The interval is that of Agresti and Min (2005): Wald's, after half a level was added to each of the four outcomes.
    Only levels whose outcome changed carry information, which makes it much narrower than two separate intervals.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} levels before and {len(after)} after: a pair needs both")
    if not before:
        raise ValueError("no levels: there is nothing to compare")
    num_won = sum(1 for old, new in zip(before, after, strict=True) if new and not old)
    num_lost = sum(1 for old, new in zip(before, after, strict=True) if old and not new)
    interval = agresti_min(num_won, num_lost, len(before))
    return Difference((num_won - num_lost) / len(before), *interval, num_levels=len(before))


def agresti_min(num_won: float, num_lost: float, num_levels: int) -> Interval:
    """Agresti and Min's interval of the change on a number of levels, of which some are won that were not before, and
    some lost."""
    won, lost, num = num_won + 0.5, num_lost + 0.5, num_levels + 2
    centre = (won - lost) / num
    spread = Z * sqrt((won + lost) - (won - lost) ** 2 / num) / num
    return Interval(max(-1.0, centre - spread), min(1.0, centre + spread))


def rate(values: Sequence[float]) -> Estimate:
    """The mean of numbers between 0 and 1, one for each level, with Wilson's interval.

    The number of trials is the number of independent ones that would spread as the levels do: with one sample a level
    the number of levels, with several samples more, but never more than levels that differ allow.
    """
    num, value = len(values), fmean(values)
    spread = variance(values) / num if num > 1 else 0.0
    trials = num if spread == 0.0 else max(num, round(value * (1 - value) / spread))
    return Estimate(value, *wilson(min(max(value, 0.0), 1.0) * trials, trials))


def mean(values: Sequence[float], lowest: float = -inf) -> Estimate:
    """The mean of one number for each level, none below `lowest`, with Student's interval; no bounds for one level."""
    interval = mean_interval(values)
    return Estimate(fmean(values), *((max(lowest, interval.low), interval.high) if interval else (None, None)))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of a mean; None for a single value, of which no spread is known."""
    if len(values) < 2:
        return None
    centre = fmean(values)
    spread = student_t_975(len(values) - 1) * sqrt(variance(values) / len(values))
    return Interval(centre - spread, centre + spread)


@cache
def student_t_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution: 95 % of it lie between minus and plus this value.

    Up to 100 degrees of freedom by bisection of the exact distribution; above, the Cornish-Fisher expansion differs
    from it by less than 1e-9.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: must be at least 1")
    if degrees > 100:
        terms = (
            Z,
            (Z**3 + Z) / 4,
            (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
            (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
            (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
        )
        return sum(term / degrees**power for power, term in enumerate(terms))
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _student_t_within(limit: float, degrees: int) -> float:
    """The probability of a value between -limit and limit (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = atan2(limit, sqrt(degrees))
    is_odd = degrees % 2
    term = total = cos(angle) if is_odd else 1.0
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cos(angle) ** 2 * (power - 1) / power
        total += term
    if not is_odd:
        return sin(angle) * total
    return 2 / pi * (angle + (sin(angle) * total if degrees > 1 else 0.0))


def length_bin(length: int | None) -> str:
    """The name of the bin of an optimal length, as it stands in metric names: `3-4`, `7+`."""
    if length is None:
        return UNSOLVABLE
    for low, high in LENGTH_BINS:
        if high is None or length <= high:
            return f"{low}+" if high is None else f"{low}-{high}"
    raise AssertionError("the last bin is open")


def success_by_length(pairs: Iterable[tuple[int | None, bool]]) -> dict[str, Rate]:
    """Success for each bin of the optimal length that occurs, short ones first."""
    counts: dict[str, list[int]] = {}
    for length, success in pairs:
        count = counts.setdefault(length_bin(length), [0, 0])
        count[0] += bool(success)
        count[1] += 1
    return {name: Rate(*counts[name]) for name in sorted(counts, key=bin_order)}


def bin_order(name: str) -> tuple[bool, float]:
    """A sort key for bin names; names of another shape come last."""
    digits = name.rstrip("+").partition("-")[0]
    return (False, float(digits)) if digits.isdigit() else (True, 0.0)
