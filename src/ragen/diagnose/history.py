"""The input of the health checks: quantities of each step, their history, and the limits.

    history = History(Limits())
    history.add(metrics)
    history.now("entropy", 5), history.compared("spread", 5, 5)       # the mean of the last steps; start and present
    series_of(rows, "entropy")                                        # the points of a chart

Plain numbers: no torch, no files.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragen.diagnose.collapse import FIRST_TURN, THRESHOLDS, TRAJECTORY, RegimeThresholds
from ragen.format import percent, short
from ragen.statistics import bounded

MetricsRow = Mapping[str, Any]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Limits:
    """When a check warns. A share is relative to the start, a rise is added to it, all others are absolute."""

    num_start: int = 5  # steps in the start, for quantities that vary between steps
    num_recent: int = 5  # steps in the present, for the same
    num_calm: int = 2  # steps in the present, for quantities that hardly vary; their start is the first step
    easing: float = 0.5  # a warning ends when its quantity is this far back from the threshold to the start

    learned_gain: float = 0.1  # training success this much above its start is learning
    solved: float = 0.9  # so is success of this size
    kept_share: float = 0.7  # of the best success so far that must remain to count as learning

    regimes: RegimeThresholds = THRESHOLDS
    thinking_share: float = 0.5  # of the rate of turns with any thinking

    blown_up: float = 0.2  # of the kept groups, over the last `num_blown_up` steps
    num_blown_up: int = 3
    spread_share: float = 0.45
    success_share: float = 0.5
    entropy_low_share: float = 0.25  # steady runs of a pretrained model lose up to 70 % in a hundred steps
    entropy_high_share: float = 1.5
    entropy_rise: float = 0.05  # added to it, in nats: 1.5 times a tiny entropy is still tiny
    distinct_share: float = 0.6
    least_distinct: float = 0.25  # if replies were alike from the start, no warning
    repeats_rise: float = 0.15
    format_rise: float = 0.2
    cut_rise: float = 0.15
    length_low_share: float = 0.5
    length_high_share: float = 2.0
    clip_fraction: float = 0.1
    policy_kl: float = 0.1
    sampler_kl: float = 0.005
    spike: float = 15.0  # times the usual gradient norm
    num_usual: int = 20  # steps that define the usual norm
    empty_share: float = 0.3  # of the last `num_recent` steps
    quiet_steps: int = 5  # a warning that returns within this many steps continues


@dataclass(frozen=True)
class Quantity:
    """A number of a step, or None if not measured."""

    label: str
    read: Callable[[MetricsRow], float | None]
    is_share: bool = False

    def text(self, value: float) -> str:
        return percent(value) if self.is_share else short(value)


def finite(row: MetricsRow, key: str) -> float | None:
    """A number of a row; None if it has none, or one that is not finite or overflows sums."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(bounded(value)):
        return None
    return float(value)


def _metric(label: str, key: str, is_share: bool = False) -> Quantity:
    return Quantity(label, lambda row: finite(row, key), is_share)


def _over_environments(label: str, name: str) -> Quantity:
    """The mean of `train/<Tag>/<name>` over all tags."""
    pattern = re.compile(f"train/[^/]+/{name}")

    def read(row: MetricsRow) -> float | None:
        values = [value for key in row if pattern.fullmatch(key) and (value := finite(row, key)) is not None]
        return fmean(values) if values else None

    return Quantity(label, read, is_share=True)


def _tokens_per_turn(row: MetricsRow) -> float | None:
    tokens, turns = finite(row, "train/response_length"), finite(row, "train/num_turns")
    return None if tokens is None or not turns else tokens / turns


def _format_failures(row: MetricsRow) -> float | None:
    valid = finite(row, "train/format_valid")
    return None if valid is None else 1.0 - valid


def _collapse(label: str, name: str) -> Quantity:
    """Of first turns, or of all turns if only these were measured, as in `regime`."""

    def read(row: MetricsRow) -> float | None:
        values = (finite(row, f"{sample}/{name}") for sample in (FIRST_TURN, TRAJECTORY))
        return next((value for value in values if value is not None), None)

    return Quantity(label, read)


QUANTITIES: dict[str, Quantity] = {
    "information": _collapse("I(X;Z)", "mi_seq_estimate"),
    "thought entropy": _collapse("H(Z|X) per token", "conditional_entropy_est"),
    "thinking": _metric("the share of turns with any thinking", "collapse/valid_thinking_rate", is_share=True),
    "valid replies": _over_environments("the share of replies with a valid action", "action_is_valid"),
    "success": _over_environments("training success", "success"),
    "spread": _metric("the spread of rewards in a group", "rollout/in_group_reward_std"),
    "blown up": _metric(
        "the share of kept groups that hardly differ in reward", "rollout/chosen_blown_up_ratio", is_share=True
    ),
    "entropy": _metric("the entropy of a token", "actor/entropy"),
    "distinct": _metric("the share of distinct replies in the step", "train/reply_distinct", is_share=True),
    "repeats": _metric("the share of text that a reply repeats", "train/reply_repeats", is_share=True),
    "format failures": Quantity("the share of turns in a wrong format", _format_failures, is_share=True),
    "cut replies": _metric("the share of replies cut off", "train/cut_replies", is_share=True),
    "length": Quantity("tokens in a reply", _tokens_per_turn),
    "clipped": _metric("the share of clipped tokens", "actor/pg_clipfrac", is_share=True),
    "policy KL": _metric("KL from the policy that played", "actor/ppo_kl"),
    "sampler KL": _metric("KL between sampler and learner", "rollout/sampler_learner_kl"),
    "gradient": _metric("the gradient norm", "actor/grad_norm"),
    "empty": _metric("the share of steps without a kept group", "rollout/empty_after_filter", is_share=True),
}


def series_of(rows: Iterable[MetricsRow], quantity: str) -> Points:
    """(step, value) for each training step with this quantity."""
    read = QUANTITIES[quantity].read
    return [(row["step"], value) for row in rows if is_training(row) and (value := read(row)) is not None]


def is_training(row: MetricsRow) -> bool:
    """False for rows with only a validation, like the first one of a run."""
    return any(key.startswith(("train/", "rollout/")) for key in row)


class History:
    """The quantities of all steps so far."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        self.row: MetricsRow = {}  # the last step
        self.measured: list[MetricsRow] = []  # the first and last steps with collapse metrics
        self.best_success = 0.0
        self.easing = 0.0  # above 0 while the current check has an open warning

    def add(self, row: MetricsRow) -> None:
        self.row = row
        if QUANTITIES["information"].read(row) is not None:
            self.measured = [*self.measured[:1], row]
        for name, quantity in QUANTITIES.items():
            value = quantity.read(row)
            if value is not None:
                self.values[name].append(value)
        if len(self.values["success"]) >= self.limits.num_recent:
            self.best_success = max(self.best_success, self.now("success", self.limits.num_recent))

    def now(self, name: str, num: int) -> float:
        return fmean(self.values[name][-num:])

    def compared(self, name: str, num_start: int, num: int) -> tuple[float, float] | None:
        """(start, present): means of the first and last values. None while these overlap."""
        values = self.values[name]
        if len(values) < num_start + num:
            return None
        return fmean(values[:num_start]), self.now(name, num)

    def has_learned(self) -> bool:
        """Training success has risen and stayed, or there is nothing left to learn."""
        limits = self.limits
        if not self.values["success"]:
            return False
        start = fmean(self.values["success"][: limits.num_start])
        present = self.now("success", limits.num_recent)
        has_risen = present >= min(start + limits.learned_gain, limits.solved)
        return has_risen and present >= limits.kept_share * self.best_success
