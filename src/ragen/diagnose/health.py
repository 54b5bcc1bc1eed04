"""Is a run healthy? Small checks over the metrics of every step. No torch, no files.

    health = Health()
    for warning in health.add(1, metrics):      # after each step: its new warnings
        print(warning)                          # "rewards alike since step 31: the spread of rewards … fell to 0.9 …"
    health.metrics()                            # {"health/num_warnings": 1.0, "health/rewards_alike": 1.0}

    Health.of(rows).verdict(success_change(rows)).headline      # of a stored run, from its metrics.jsonl

A run without a warning is healthy only if it also learned: the verdict starts with how success changed (`success.py`).
Quantities and limits are in `history.py`, the checks in `checks.py`. Health only warns; `early_stop.py` stops a run.
docs/results.md says how the limits were fitted, and how well they work on other seeds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ragen.diagnose.checks import CHECKS, Check, Finding
from ragen.diagnose.history import History, Limits, MetricsRow, is_training
from ragen.diagnose.success import SuccessChange
from ragen.format import counted

PREFIX = "health/"
# Verdicts that are not the name of a check: whether the run needs attention, and its short title.
WORDS = {
    "healthy": "healthy",
    "no_gain": "no gain",
    "no_success": "no success",
    "success_fell": "success fell",
    "stopped_early": "stopped early",
    "too_early": "too early",
    "unknown": "–",
}
ALARMING = ("no_success", "success_fell", "stopped_early")


@dataclass(frozen=True)
class HealthWarning:
    """A check that holds, or held, from `first_step` to `step`. `finding` is that of its worst step."""

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
    word: str  # a key of WORDS, or the name of the most serious warning that holds
    headline: str
    holding: tuple[HealthWarning, ...]  # the most serious first
    passed: tuple[HealthWarning, ...]  # in step order

    @property
    def title(self) -> str:
        return title_of(self.word)

    @property
    def is_alarming(self) -> bool:
        return self.word in ALARMING or bool(self.holding)


class Health:
    """The checks, step by step."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.history = History(self.limits)
        self.spells: dict[str, list[HealthWarning]] = {name: [] for name in CHECKS}
        self.num_steps = 0
        self.previous_step = self.last_step = -1

    @classmethod
    def of(cls, rows: Iterable[MetricsRow], limits: Limits | None = None) -> "Health":
        """The health of a stored run."""
        health = cls(limits)
        for row in rows:
            health.add(row["step"], row)
        return health

    def add(self, step: int, metrics: MetricsRow) -> list[HealthWarning]:
        """Check a step and return its new warnings. Skips steps without training."""
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
        """All warnings, ordered by first step."""
        return sorted((one for spells in self.spells.values() for one in spells), key=lambda one: one.first_step)

    @property
    def holding(self) -> list[HealthWarning]:
        """Those that hold at the last step, the most serious first."""
        return [spells[-1] for spells in self.spells.values() if spells and spells[-1].step == self.last_step]

    def metrics(self) -> dict[str, float]:
        """Of the last step: the number of warnings that hold, and a 1 for each."""
        holding = self.holding
        flags = {f"{PREFIX}{warning.name}": 1.0 for warning in holding}
        return {f"{PREFIX}num_warnings": float(len(holding))} | flags

    def verdict(self, success: SuccessChange, stopped_by: str = "") -> HealthVerdict:
        """The most serious warning that holds; without one, how success changed."""
        holding = tuple(self.holding)
        passed = tuple(warning for warning in self.warnings if warning not in holding)
        if not self.num_steps:
            return HealthVerdict("unknown", "Health is unknown: no training step recorded", (), ())
        if holding:
            first = str(holding[0])
            return HealthVerdict(holding[0].name, first[0].upper() + first[1:], holding, passed)
        word, sentence = _success_in_words(success)
        if stopped_by:
            word, sentence = "stopped_early", f"Stopped early by the rule {stopped_by}: {success.name} {success.text}"
        return HealthVerdict(word, f"{sentence}; {self._quiet(passed)}", (), passed)

    def _quiet(self, passed: tuple[HealthWarning, ...]) -> str:
        """Nothing warns now; what did before."""
        if not passed:
            return f"none of {len(CHECKS)} checks warned in {counted(self.num_steps, 'step')}"
        times = "a warning" if len(passed) == 1 else f"{len(passed)} warnings"
        return f"no check warns now, {times} before: {', '.join(dict.fromkeys(map(_when, passed)))}"


def title_of(word: str) -> str:
    """The verdict in a word or two, for a list."""
    return CHECKS[word].title if word in CHECKS else WORDS.get(word, word)


def _success_in_words(success: SuccessChange) -> tuple[str, str]:
    """A key of WORDS, and how success changed, as a sentence without its full stop."""
    name, text = success.name, success.text
    played = f"{counted(success.num_steps, 'step')} and {counted(success.num_validations, 'validation')}"
    return {
        "rose": ("healthy", f"Healthy: {name} rose ({text})"),
        "solved": ("healthy", f"Healthy: {name} was high from the start ({text})"),
        "flat": ("no_gain", f"No gain: {name} did not change by more than noise ({text})"),
        "fell": ("success_fell", f"{name[0].upper()}{name[1:]} fell ({text})"),
        "none": ("no_success", f"No success: not one episode succeeded in {played}"),
        "early": ("too_early", f"Too early to say whether it learns ({name} {text})"),
        "unknown": ("unknown", "Success was not measured"),
    }[success.outcome]


def _when(warning: HealthWarning) -> str:
    if warning.first_step == warning.step:
        return f"{warning.title} (step {warning.step})"
    return f"{warning.title} (steps {warning.first_step} to {warning.step})"
