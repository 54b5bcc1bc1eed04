"""How the success of a run changed: where it started, where it ended, and its best.

    change = success_change(rows)               # SuccessChange("rose", "validation success", start, end, best, …)
    change.text                                 # "39.1 % at step 0, 53.3 % at step 100, best 53.9 % at step 75"
    success_change(rows, paired)                # with the change level by level, which sees more than two intervals

Validation counts; without two validations, the mean of the first training steps is compared with that of the last ones.
Plain numbers: no torch, no files.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ragen.diagnose.history import Limits, MetricsRow, finite, series_of
from ragen.format import percent
from ragen.statistics import Difference, Interval

_VALIDATED = re.compile("val-env/([^/]+)/success")
NEAR_OPTIMUM = 0.9  # of what optimal play reaches: little is left to learn


@dataclass(frozen=True)
class Measured:
    """Success at a step, the mean over environments."""

    step: int
    value: float
    interval: Interval | None = None
    optimal: float | None = None

    @property
    def text(self) -> str:
        return f"{percent(self.value)} at step {self.step}"


@dataclass(frozen=True)
class SuccessChange:
    """`outcome`: rose, fell, flat (within noise), solved (from the start), none (never above zero), early, unknown."""

    outcome: str
    name: str = "success"  # validation success or training success
    start: Measured | None = None
    end: Measured | None = None
    best: Measured | None = None
    num_steps: int = 0  # of training
    num_validations: int = 0

    @property
    def text(self) -> str:
        if self.start is None or self.end is None or self.best is None:
            return "not measured"
        ends = [self.start.text] if self.start == self.end else [self.start.text, self.end.text]
        return ", ".join([*ends, *([] if len(ends) == 1 else [f"best {self.best.text}"])])


def success_change(
    rows: Sequence[MetricsRow], paired: Difference | None = None, limits: Limits | None = None
) -> SuccessChange:
    """`paired`: the difference between the last and the first validation on the same levels, where it is known."""
    limits = limits or Limits()
    trained = [(step, value) for step, value in series_of(rows, "success") if 0 <= value <= 1]
    validated = validations_of(rows)
    counts = {"num_steps": len(trained), "num_validations": len(validated)}
    if not trained and not validated:
        return SuccessChange("unknown")
    measured = [*validated, *(Measured(step, value) for step, value in trained)]
    if not any(one.value for one in measured):
        ends = sorted(measured, key=lambda one: one.step)
        return SuccessChange("none", "success", ends[0], ends[-1], ends[0], **counts)
    if len(validated) > 1:
        best = max(validated, key=lambda one: one.value)
        outcome = _of_validations(validated[0], validated[-1], best, paired, limits)
        return SuccessChange(outcome, "validation success", validated[0], validated[-1], best, **counts)
    if len(trained) >= limits.num_start + limits.num_recent:
        means = _running_means(trained, limits.num_recent)
        best = max(means, key=lambda one: one.value)
        outcome = _of_training(means[0], means[-1], best, limits)
        return SuccessChange(outcome, "training success", means[0], means[-1], best, **counts)
    only = validated[-1] if validated else Measured(trained[0][0], fmean(value for _, value in trained))
    name = "validation success" if validated else "training success"
    return SuccessChange("early", name, only, only, only, **counts)


def validations_of(rows: Sequence[MetricsRow]) -> list[Measured]:
    """Every validation, as the mean over its environments; their intervals are independent."""
    return [found for row in rows if (found := _validation(row)) is not None]


def _validation(row: MetricsRow) -> Measured | None:
    tags = [match[1] for key in row if (match := _VALIDATED.fullmatch(key))]

    def read(name: str) -> list[float] | None:
        values = [finite(row, f"val-env/{tag}/{name}") for tag in tags]
        known = [value for value in values if value is not None and 0 <= value <= 1]
        return known if known and len(known) == len(tags) else None

    values, lows, highs, optimal = map(read, ("success", "success_low", "success_high", "optimal"))
    if values is None:
        return None
    mean, interval = fmean(values), None
    if lows is not None and highs is not None:
        below, above = (math.dist(values, ends) / len(values) for ends in (lows, highs))
        interval = Interval(mean - below, mean + above)
    return Measured(row["step"], mean, interval, None if optimal is None else fmean(optimal))


def _of_validations(start: Measured, end: Measured, best: Measured, paired: Difference | None, limits: Limits) -> str:
    has_fallen_since = best.interval is not None and end.interval is not None and best.interval.low > end.interval.high
    if has_fallen_since:
        return "fell"
    certain = _sign(start, end, limits) if paired is None else 0 if paired.is_noise else math.copysign(1, paired.mean)
    if certain:
        return "rose" if certain > 0 else "fell"
    reachable = limits.solved if end.optimal is None else NEAR_OPTIMUM * end.optimal
    return "solved" if end.value >= reachable > 0 else "flat"


def _sign(start: Measured, end: Measured, limits: Limits) -> float:
    """Of a change that is more than noise, otherwise 0. Without intervals a large change has to do."""
    change = end.value - start.value
    if start.interval is None or end.interval is None:
        return math.copysign(1, change) if abs(change) >= limits.learned_gain else 0.0
    # Newcombe's interval of the difference of two rates.
    low = change - math.hypot(end.value - end.interval.low, start.interval.high - start.value)
    high = change + math.hypot(end.interval.high - end.value, start.value - start.interval.low)
    return 1.0 if low > 0 else -1.0 if high < 0 else 0.0


def _of_training(start: Measured, end: Measured, best: Measured, limits: Limits) -> str:
    """Each step plays other levels, so only a large change counts."""
    if end.value < limits.kept_share * best.value and best.value - end.value >= limits.learned_gain:
        return "fell"
    if abs(end.value - start.value) >= limits.learned_gain:
        return "rose" if end.value > start.value else "fell"
    return "solved" if end.value >= limits.solved else "flat"


def _running_means(points: Sequence[tuple[int, float]], num: int) -> list[Measured]:
    windows = (points[first : first + num] for first in range(len(points) - num + 1))
    return [Measured(window[-1][0], fmean(value for _, value in window)) for window in windows]
