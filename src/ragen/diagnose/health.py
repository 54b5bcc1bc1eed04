"""Is a run healthy? A table of small checks over what every step records anyway. No torch, no files.

    health = Health()
    for warning in health.add(1, metrics):      # after each step: the warnings that begin with it
        print(warning)                          # "rewards alike since step 31: the spread of rewards … fell to 0.9 …"
    health.metrics()                            # {"health/num_warnings": 1.0, "health/rewards_alike": 1.0}

    Health.of(rows).verdict().headline          # the same of a stored run, from the rows of its metrics.jsonl

Most checks compare the mean of the last steps with the mean of the first ones, so that they need no knowledge of the
game or the model. Falling spread, entropy, variety and length are also what success looks like: while training success
has risen (`History.has_learned`), they are no warning. Health only warns; `ragen.train.early_stop` stops.

The limits are those of `Limits`. docs/results.md says how they were fitted, and how well they do on other seeds.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from ragen.diagnose.collapse import FIRST_TURN, THRESHOLDS, TRAJECTORY, RegimeThresholds, regime
from ragen.report.numbers import percent, short

PREFIX = "health/"
Row = Mapping[str, Any]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Limits:
    """When a check warns. A share is of the start, a rise is above the start, all others are absolute."""

    num_start: int = 5  # steps that make the start, for quantities that vary from step to step
    num_recent: int = 5  # steps that make the present, likewise
    num_calm: int = 2  # the same for quantities that hardly vary; their start is the first step, before any update
    easing: float = 0.5  # a warning ends when its quantity has gone back so far from the threshold to the start

    learned_gain: float = 0.1  # training success so far above its start is learning
    solved: float = 0.9  # and so is success of this size
    kept_share: float = 0.7  # of the best success so far, without which there is no learning to speak of

    regimes: RegimeThresholds = THRESHOLDS
    thinking_share: float = 0.5  # of the rate of turns with any thinking

    blown_up: float = 0.2  # of the kept groups, over the last `num_recent` steps
    spread_share: float = 0.45
    success_share: float = 0.5
    entropy_low_share: float = 0.5
    entropy_high_share: float = 2.0
    entropy_rise: float = 0.05  # on top of it, in nats: twice nothing is nothing
    distinct_share: float = 0.6
    least_distinct: float = 0.25  # where replies were alike from the start, that they are says nothing
    repeats_rise: float = 0.15
    format_rise: float = 0.2
    cut_rise: float = 0.15
    length_low_share: float = 0.5
    length_high_share: float = 2.0
    clip_fraction: float = 0.1
    policy_kl: float = 0.1
    sampler_kl: float = 0.005
    spike: float = 15.0  # times the usual gradient norm
    num_usual: int = 20  # steps that make the usual one
    empty_share: float = 0.3  # of the last `num_recent` steps
    quiet_steps: int = 5  # a warning that returns within so many steps has never gone


# --- what is looked at --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A number of a step, or None where it was not measured."""

    label: str
    read: Callable[[Row], float | None]
    is_share: bool = False

    def text(self, value: float) -> str:
        return percent(value) if self.is_share else short(value)


def _finite(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _metric(label: str, key: str, is_share: bool = False) -> Quantity:
    return Quantity(label, lambda row: _finite(row, key), is_share)


_SUCCESS = re.compile("train/[^/]+/success")


def _success(row: Row) -> float | None:
    values = [value for key in row if _SUCCESS.fullmatch(key) and (value := _finite(row, key)) is not None]
    return fmean(values) if values else None


def _tokens_per_turn(row: Row) -> float | None:
    tokens, turns = _finite(row, "train/response_length"), _finite(row, "train/num_turns")
    return None if tokens is None or not turns else tokens / turns


def _format_failures(row: Row) -> float | None:
    valid = _finite(row, "train/format_valid")
    return None if valid is None else 1.0 - valid


def _collapse(label: str, name: str) -> Quantity:
    """Of first turns, or of all turns where only these were measured: as `regime` has it."""

    def read(row: Row) -> float | None:
        values = (_finite(row, f"{sample}/{name}") for sample in (FIRST_TURN, TRAJECTORY))
        return next((value for value in values if value is not None), None)

    return Quantity(label, read)


QUANTITIES: dict[str, Quantity] = {
    "information": _collapse("I(X;Z)", "mi_seq_estimate"),
    "thought entropy": _collapse("H(Z|X) a token", "conditional_entropy_est"),
    "thinking": _metric("the share of turns with any thinking", "collapse/valid_thinking_rate", is_share=True),
    "success": Quantity("training success", _success, is_share=True),
    "spread": _metric("the spread of rewards in a group", "rollout/in_group_reward_std"),
    "blown up": _metric(
        "the share of kept groups that hardly differ in reward", "rollout/chosen_blown_up_ratio", is_share=True
    ),
    "entropy": _metric("the entropy of a token", "actor/entropy"),
    "distinct": _metric("the share of replies unlike any other of the step", "train/reply_distinct", is_share=True),
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


def series_of(rows: Iterable[Row], quantity: str) -> Points:
    """(step, value) wherever a quantity was measured in training."""
    read = QUANTITIES[quantity].read
    return [(row["step"], value) for row in rows if is_training(row) and (value := read(row)) is not None]


def is_training(row: Row) -> bool:
    """The first row of a run is only a validation."""
    return any(key.startswith(("train/", "rollout/")) for key in row)


class History:
    """The quantities of all steps so far."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        self.row: Row = {}  # the last step
        self.measured: list[Row] = []  # the first and the last step with collapse metrics
        self.best_success = 0.0
        self.easing = 0.0  # above 0 while the check that looks has a warning to end

    def add(self, row: Row) -> None:
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
        """(start, present): means of the first and of the last values. None while these overlap."""
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
        return present >= min(start + limits.learned_gain, limits.solved) and present >= (
            limits.kept_share * self.best_success
        )


# --- the checks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a check has against a step."""

    value: float
    threshold: float
    text: str
    excess: float  # how far beyond the threshold; below 0 where a warning is only not over yet


def fell(history: History, name: str, share: float, num_start: int, num: int) -> Finding | None:
    """The present is below a share of the start."""
    pair = history.compared(name, num_start, num)
    return None if pair is None else _moved(history, name, *pair, share * pair[0], "fell to")


def rose(history: History, name: str, share: float, rise: float, num: int) -> Finding | None:
    """The present is above so many times the first step, and so much more."""
    pair = history.compared(name, 1, num)
    return None if pair is None else _moved(history, name, *pair, share * pair[0] + rise, "rose to")


def _moved(history: History, name: str, start: float, value: float, threshold: float, verb: str) -> Finding | None:
    end = threshold + history.easing * (start - threshold)
    beyond = value < end if verb == "fell to" else value > end
    return _found(name, value, threshold, verb, start) if beyond else None


def above(history: History, name: str, limit: float, num: int) -> Finding | None:
    """The present is above a fixed limit."""
    if len(history.values[name]) < num or not history.now(name, num) > limit * (1 - history.easing):
        return None
    return _found(name, history.now(name, num), limit, "is")


def _found(name: str, value: float, threshold: float, verb: str, start: float | None = None) -> Finding:
    quantity = QUANTITIES[name]
    began = "" if start is None else f", start {quantity.text(start)}"
    text = f"{quantity.label} {verb} {quantity.text(value)} (threshold {quantity.text(threshold)}{began})"
    return Finding(value, threshold, text, threshold - value if verb == "fell to" else value - threshold)


def _drifted(history: History, name: str, share: float) -> Finding | None:
    """For quantities that vary from step to step."""
    return fell(history, name, share, history.limits.num_start, history.limits.num_recent)


def _collapsed(history: History, name: str) -> Finding | None:
    """The last measured step shows this regime clearly. What was not there at the first cannot be lost."""
    measured, thresholds = history.measured, history.limits.regimes
    if not measured or regime(measured[0], None, thresholds).name not in ("diverse", "compressed"):
        return None
    found = regime(measured[-1], measured[0], thresholds)
    if found is None or found.name != name or not found.is_clear:
        return None
    start = QUANTITIES["information"].read(measured[0])
    return _found("information", found.information, found.information_threshold, "fell to", start)


def template_collapse(history: History) -> Finding | None:
    """Thoughts are still varied, and no longer about the prompt."""
    return _collapsed(history, "template collapse")


def low_entropy_collapse(history: History) -> Finding | None:
    """One thought for every prompt."""
    return _collapsed(history, "low-entropy collapse")


def thinking_lost(history: History) -> Finding | None:
    return fell(history, "thinking", history.limits.thinking_share, 1, 1)


def not_finite(history: History) -> Finding | None:
    left_out = [key for key in ("actor/nonfinite_samples", "critic/nonfinite_samples") if _finite(history.row, key)]
    if left_out:
        num = sum(_finite(history.row, key) or 0.0 for key in left_out)
        text = f"an update of {num:.0f} samples was left out, since its loss or gradient was not finite"
        return Finding(num, 0.0, text, num)
    bad = [key for key, value in history.row.items() if isinstance(value, float) and not math.isfinite(value)]
    if not bad:
        return None
    num = float(len(bad))
    return Finding(num, 0.0, f"{bad[0]} is {short(history.row[bad[0]])}", num)


def success_falls(history: History) -> Finding | None:
    return _drifted(history, "success", history.limits.success_share)


def rewards_alike(history: History) -> Finding | None:
    return None if history.has_learned() else _drifted(history, "spread", history.limits.spread_share)


def noise_blown_up(history: History) -> Finding | None:
    """Groups that differ by a trifle are divided by their own std, and count like any other."""
    return above(history, "blown up", history.limits.blown_up, history.limits.num_recent)


def empty_filter(history: History) -> Finding | None:
    return above(history, "empty", history.limits.empty_share, history.limits.num_recent)


def entropy_cliff(history: History) -> Finding | None:
    return None if history.has_learned() else _drifted(history, "entropy", history.limits.entropy_low_share)


def entropy_explosion(history: History) -> Finding | None:
    limits = history.limits
    return rose(history, "entropy", limits.entropy_high_share, limits.entropy_rise, limits.num_calm)


def replies_alike(history: History) -> Finding | None:
    limits = history.limits
    pair = history.compared("distinct", limits.num_start, limits.num_recent)
    if pair is None or pair[0] < limits.least_distinct or history.has_learned():
        return None
    return _drifted(history, "distinct", limits.distinct_share)


def replies_repeat_themselves(history: History) -> Finding | None:
    return rose(history, "repeats", 1.0, history.limits.repeats_rise, history.limits.num_calm)


def format_lost(history: History) -> Finding | None:
    return rose(history, "format failures", 1.0, history.limits.format_rise, history.limits.num_calm)


def replies_cut(history: History) -> Finding | None:
    return rose(history, "cut replies", 1.0, history.limits.cut_rise, history.limits.num_calm)


def replies_shorter(history: History) -> Finding | None:
    if history.has_learned():
        return None
    return fell(history, "length", history.limits.length_low_share, 1, history.limits.num_calm)


def replies_longer(history: History) -> Finding | None:
    if history.has_learned():
        return None
    return rose(history, "length", history.limits.length_high_share, 0.0, history.limits.num_calm)


def many_clipped(history: History) -> Finding | None:
    return above(history, "clipped", history.limits.clip_fraction, num=1)


def policy_jumps(history: History) -> Finding | None:
    return above(history, "policy KL", history.limits.policy_kl, num=1)


def sampler_differs(history: History) -> Finding | None:
    return above(history, "sampler KL", history.limits.sampler_kl, num=1)


def gradient_spike(history: History) -> Finding | None:
    limits, norms = history.limits, history.values["gradient"]
    before = norms[:-1][-limits.num_usual :]
    if len(before) < limits.num_start:
        return None
    usual = max(median(before), fmean(norms[: limits.num_start]))
    if not norms[-1] > limits.spike * usual:
        return None
    return _found("gradient", norms[-1], limits.spike * usual, "is")


LOWER_RATE = "a lower actor_rollout_ref.actor.optim.lr"
KEEP_SPREAD = (
    "Updates on groups with a spread only: actor_rollout_ref.rollout.rollout_filter_value=0.9 and "
    "rollout_filter_include_zero=False."
)
LOOK = "Look at the episodes below: what do the replies say?"


@dataclass(frozen=True)
class Check:
    title: str
    look: Callable[[History], Finding | None]
    shown: str  # the quantity of its chart; none where there is nothing to draw
    advice: tuple[str, ...]


# The gravest first: the first that holds is the headline.
CHECKS: dict[str, Check] = {
    "template_collapse": Check(
        "template collapse",
        template_collapse,
        "information",
        (
            "The thoughts still differ, and do not depend on the prompt any more. " + KEEP_SPREAD,
            "A weaker KL or entropy term: where advantages are small, these two decide where the policy goes.",
        ),
    ),
    "low_entropy_collapse": Check(
        "low-entropy collapse",
        low_entropy_collapse,
        "thought entropy",
        (
            "One thought is left for every prompt. Smaller steps: " + LOWER_RATE + ", or larger groups.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01, or a KL term, from an earlier checkpoint on.",
        ),
    ),
    "not_finite": Check(
        "a number is not finite",
        not_finite,
        "",
        (
            "The update is left out and its episodes are stored as nonfinite_*: look at them.",
            f"If it comes back: {LOWER_RATE}, a lower grad_clip, or float32.",
        ),
    ),
    "thinking_lost": Check(
        "no thinking any more",
        thinking_lost,
        "thinking",
        ("Replies come without a thought. " + LOOK, "A format penalty, or a KL term that holds the start."),
    ),
    "format_lost": Check(
        "format is being lost",
        format_lost,
        "format failures",
        (f"Smaller steps ({LOWER_RATE}), a KL term, or a larger format penalty.", LOOK),
    ),
    "entropy_explosion": Check(
        "entropy explodes",
        entropy_explosion,
        "entropy",
        (
            f"The model is coming apart, or is paid for noise: {LOWER_RATE}, a smaller or no entropy_coeff.",
            LOOK,
        ),
    ),
    "entropy_cliff": Check(
        "entropy fell off a cliff",
        entropy_cliff,
        "entropy",
        (
            f"The policy settles before it has learned. Smaller steps: {LOWER_RATE}.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    "success_falls": Check(
        "training success falls",
        success_falls,
        "success",
        (
            f"The updates take away what the model could do: {LOWER_RATE}, or a KL term.",
            KEEP_SPREAD,
        ),
    ),
    "rewards_alike": Check(
        "rewards alike",
        rewards_alike,
        "spread",
        (
            "With less spread in a group, more of the update is noise. " + KEEP_SPREAD,
            "More tries at a level (es_manager.train.group_size), or levels of another difficulty.",
            "More exploration: actor_rollout_ref.rollout.temperature, or an entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    "noise_blown_up": Check(
        "noise is blown up",
        noise_blown_up,
        "blown up",
        (
            "Groups whose rewards differ by a trifle get advantages of full size. " + KEEP_SPREAD,
            "Or advantages that keep the size of the spread: algorithm.norm_adv_by_std_in_grpo=False, or "
            "algorithm.soft_advantage_reweight=True.",
        ),
    ),
    "empty_filter": Check(
        "the filter keeps nothing",
        empty_filter,
        "empty",
        (
            "Steps without an update. A larger es_manager.train.group_size, or levels of another difficulty.",
            "A milder filter: rollout_filter_value nearer to 1.",
        ),
    ),
    "replies_alike": Check(
        "replies alike",
        replies_alike,
        "distinct",
        (
            "The same replies to more and more states. " + KEEP_SPREAD,
            f"More exploration (temperature, entropy_coeff), or {LOWER_RATE}.",
        ),
    ),
    "replies_repeat_themselves": Check(
        "replies repeat themselves",
        replies_repeat_themselves,
        "repeats",
        (f"Loops in the text: {LOWER_RATE}, or a KL term. " + LOOK,),
    ),
    "replies_cut": Check(
        "replies are cut off",
        replies_cut,
        "cut replies",
        ("A larger actor_rollout_ref.rollout.response_length, if the replies are sensible; if not, smaller steps.",),
    ),
    "replies_longer": Check(
        "replies grow",
        replies_longer,
        "length",
        ("Longer replies without more success: look for padding and loops in the episodes below.",),
    ),
    "replies_shorter": Check(
        "replies shrink",
        replies_shorter,
        "length",
        ("Shorter replies without more success: is there still any thinking? A KL term holds the start.",),
    ),
    "policy_jumps": Check(
        "an update goes too far",
        policy_jumps,
        "policy KL",
        (f"Smaller steps: {LOWER_RATE}, fewer mini-batches (a larger ppo_mini_batch_size) or ppo_epochs=1.",),
    ),
    "many_clipped": Check(
        "many tokens are clipped",
        many_clipped,
        "clipped",
        (f"The policy moves too far within a step: {LOWER_RATE}, or fewer mini-batches.",),
    ),
    "sampler_differs": Check(
        "sampler and learner differ",
        sampler_differs,
        "sampler KL",
        ("They should differ by rounding only. Training with top_p below 1 or top_k? Else please report it.",),
    ),
    "gradient_spike": Check(
        "a spike of the gradient",
        gradient_spike,
        "gradient",
        ("One is harmless where grad_clip holds it. If they return: " + LOWER_RATE + ", or larger batches.",),
    ),
}


# --- warnings and verdict -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HealthWarning:
    """A check that holds, or held, from `first_step` to `step`. Value, threshold and text are of its worst step."""

    name: str
    first_step: int
    step: int
    finding: Finding

    @property
    def value(self) -> float:
        return self.finding.value

    @property
    def threshold(self) -> float:
        return self.finding.threshold

    @property
    def text(self) -> str:
        return self.finding.text

    @property
    def title(self) -> str:
        return CHECKS[self.name].title

    @property
    def advice(self) -> tuple[str, ...]:
        return CHECKS[self.name].advice

    def __str__(self) -> str:
        return f"{self.title} since step {self.first_step}: {self.text}"


@dataclass(frozen=True)
class HealthVerdict:
    word: str  # healthy, unknown, or the name of the gravest warning that holds
    headline: str
    holding: tuple[HealthWarning, ...]  # the gravest first
    passed: tuple[HealthWarning, ...]  # in order of steps


class Health:
    """The checks, step by step."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.history = History(self.limits)
        self.spells: dict[str, list[HealthWarning]] = {name: [] for name in CHECKS}
        self.num_steps = 0
        self.previous_step = self.last_step = -1

    @classmethod
    def of(cls, rows: Iterable[Row], limits: Limits | None = None) -> "Health":
        """Of a stored run."""
        health = cls(limits)
        for row in rows:
            health.add(row["step"], row)
        return health

    def add(self, step: int, metrics: Row) -> list[HealthWarning]:
        """Look at a step; the warnings that begin with it. A step without training is passed over."""
        if not is_training(metrics):
            return []
        self.history.add({key: value for key, value in metrics.items() if not key.startswith(PREFIX)})
        self.num_steps += 1
        self.previous_step, self.last_step = self.last_step, step
        found = [(name, self._look(name, check)) for name, check in CHECKS.items()]
        return [new for name, finding in found if finding and (new := self._note(name, finding))]

    def _look(self, name: str, check: Check) -> Finding | None:
        spells = self.spells[name]
        is_on = bool(spells) and spells[-1].step == self.previous_step
        self.history.easing = self.limits.easing if is_on else 0.0
        return check.look(self.history)

    def _note(self, name: str, finding: Finding) -> HealthWarning | None:
        spells, step = self.spells[name], self.last_step
        if spells and step - spells[-1].step <= self.limits.quiet_steps:
            worst = max(spells[-1].finding, finding, key=lambda one: one.excess)
            spells[-1] = replace(spells[-1], step=step, finding=worst)
            return None
        spells.append(HealthWarning(name, step, step, finding))
        return spells[-1]

    @property
    def warnings(self) -> list[HealthWarning]:
        """All that ever were, in order of their first steps."""
        return sorted((one for spells in self.spells.values() for one in spells), key=lambda one: one.first_step)

    @property
    def holding(self) -> list[HealthWarning]:
        """Those that hold at the last step, the gravest first."""
        return [spells[-1] for spells in self.spells.values() if spells and spells[-1].step == self.last_step]

    def metrics(self) -> dict[str, float]:
        """Of the last step: how many warnings hold, and a 1 for each of them."""
        holding = self.holding
        flags = {f"{PREFIX}{warning.name}": 1.0 for warning in holding}
        return {f"{PREFIX}num_warnings": float(len(holding))} | flags

    def verdict(self) -> HealthVerdict:
        holding = tuple(self.holding)
        passed = tuple(warning for warning in self.warnings if warning not in holding)
        if not self.num_steps:
            return HealthVerdict("unknown", "Health is unknown: no training step was recorded", (), ())
        if holding:
            first = str(holding[0])
            return HealthVerdict(holding[0].name, first[0].upper() + first[1:], holding, passed)
        if passed:
            times = "a warning" if len(passed) == 1 else f"{len(passed)} warnings"
            headline = f"Healthy at the end; {times} before: {', '.join(dict.fromkeys(map(_when, passed)))}"
            return HealthVerdict("healthy", headline, (), passed)
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        return HealthVerdict("healthy", f"Healthy: none of {len(CHECKS)} checks has warned in {steps}", (), ())


def _when(warning: HealthWarning) -> str:
    if warning.first_step == warning.step:
        return f"{warning.title} (step {warning.step})"
    return f"{warning.title} (steps {warning.first_step} to {warning.step})"
