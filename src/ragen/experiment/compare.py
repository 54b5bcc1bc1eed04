"""What an experiment has found: each setting's success, and its difference from the reference, with intervals.

    study = read_study(Path("logs/kl_sweep_Qwen2.5-3B.json"))
    for standing in standings(study, "CoordSokoban"):
        standing.success, standing.change             # Value(…), Change(pooled=Difference(…), …)
    findings(standings(study, "CoordSokoban"))        # in plain sentences

A setting is a cell, or all repetitions of one. Validation plays the same levels in all of them, so two settings are
compared level by level, and with several seeds by seed and level. Such an interval is about the runs that were trained:
with one seed another seed might give another result. With several, the differences of the seeds have an interval of
their own (Student's t), and a difference counts as real only if neither holds zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from ragen.experiment.cell import Cell
from ragen.experiment.results import MISSING, Record, SummaryLog, latest_lines, read_record, run_folder, status_of
from ragen.format import percent
from ragen.report.runs import ListedRun, Value, paired_outcomes, read_run, value_text, values_of
from ragen.report.verdict import PREFIX, early_stop, validation_tags
from ragen.statistics import Difference, Interval, Rate, paired_difference
from ragen.store.run_folder import RunFolder

ENDED = ("success", "early_stopped")  # statuses of runs that can be compared
# The 97.5 % quantile of Student's t for 1, 2, … degrees of freedom.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Trial:
    """One run of a setting."""

    cell: Cell
    run: ListedRun
    status: str

    @property
    def is_comparable(self) -> bool:
        return self.status.partition(":")[0] in ENDED

    def last(self, tag: str) -> Value | None:
        values = values_of(self.run.metrics, f"{PREFIX}{tag}/success")
        return values[-1] if values else None


@dataclass(frozen=True)
class Setting:
    """A cell, or all its repetitions."""

    label: str
    title: str  # the swept value
    group: str
    trials: tuple[Trial, ...]

    @property
    def status(self) -> str:
        """`success`; with several runs that differ, how many of each."""
        statuses = [trial.status for trial in self.trials]
        counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
        if len(counts) == 1:
            return statuses[0]
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    @property
    def stops(self) -> str:
        """What ended its runs early, in words; empty if nothing did."""
        found = []
        for trial in self.trials:
            if trial.status.startswith("early_stopped"):
                stop = early_stop(trial.run.metrics, trial.run.folder.read_finished())
                at = f" at step {stop.step}" if stop and stop.step is not None else ""
                found.append(f"{trial.status.partition(':')[2]}{at}")
        how_many = f"{len(found)} of {len(self.trials)} runs: " if found and len(self.trials) > 1 else ""
        return how_many + ", ".join(dict.fromkeys(found))

    def is_comparable(self) -> bool:
        return all(trial.is_comparable for trial in self.trials)


@dataclass(frozen=True)
class Study:
    """An experiment, read back."""

    record: Record
    settings: tuple[Setting, ...]
    axis: str  # the field that its cells differ in

    @property
    def tags(self) -> list[str]:
        """The environments that were validated."""
        trials = [trial for setting in self.settings for trial in setting.trials]
        return list(dict.fromkeys(tag for trial in trials for tag in validation_tags(trial.run.metrics)))

    @property
    def num_seeds(self) -> int:
        return max(len(setting.trials) for setting in self.settings)


@dataclass(frozen=True)
class Change:
    """How a setting differs from the reference."""

    pooled: Difference  # over levels, or over seeds and levels
    by_seed: tuple[float, ...]

    @property
    def over_seeds(self) -> Interval | None:
        """Of the seeds' differences; None with one seed."""
        return seed_interval(self.by_seed)

    @property
    def verdict(self) -> str:
        """`more`, `less`, `noise`, or `unsure`: more than noise on these levels, but not over these seeds."""
        if self.pooled.is_noise:
            return "noise"
        if self.over_seeds is not None and 0.0 in self.over_seeds:
            return "unsure"
        return "more" if self.pooled.mean > 0 else "less"


@dataclass(frozen=True)
class Standing:
    """A setting in one environment."""

    setting: Setting
    success: Value | None
    by_seed: tuple[float, ...]
    change: Change | None = None
    is_reference: bool = False
    problem: str = ""  # why there is no change to tell


# --- reading ------------------------------------------------------------------------------------------------------


def read_study(path: Path) -> Study:
    """An experiment from its record, as far as it has come."""
    record = read_record(path)
    cells = list(record.cells.values())
    latest = latest_lines(cells, record.fields, SummaryLog(record.root / record.summary).text())
    axis, titles = _titles(cells)
    grouped: dict[str, list[Trial]] = {}
    for cell in cells:
        grouped.setdefault(_label(cell), []).append(_trial(record, cell, status_of(latest.get(cell.name, ""))))
    settings = tuple(
        Setting(label, titles[trials[0].cell.name], trials[0].cell.group, tuple(trials))
        for label, trials in grouped.items()
    )
    return Study(record, settings, axis)


def _trial(record: Record, cell: Cell, status: str) -> Trial:
    folder = record.root / (run_folder(record.root / cell.log_path) or cell.checkpoint_dir)
    run = read_run(cell.name, RunFolder(folder))
    return Trial(cell, run, run.status if status == MISSING and run.status.startswith("running") else status)


def _label(cell: Cell) -> str:
    return cell.label if cell.seed is None else cell.label.removesuffix(f"-s{cell.seed}")


def _titles(cells: Sequence[Cell]) -> tuple[str, dict[str, str]]:
    """The field that cells differ in, and by name what to call each: as few fields as tell them apart."""
    known = {cell.name: [pair for pair in cell.fields if pair[0] not in ("name", "seed")] for cell in cells}
    common = set.intersection(*(set(pairs) for pairs in known.values())) if cells else set()
    differing = {name: [pair for pair in pairs if pair not in common] for name, pairs in known.items()}
    labels = {cell.name: _label(cell) for cell in cells}
    for num in range(1, max((len(pairs) for pairs in differing.values()), default=0) + 1):
        chosen = {name: tuple(pairs[:num]) for name, pairs in differing.items()}
        if len(set(chosen.values())) == len(set(labels.values())):
            titles = {name: _title(pairs, num) for name, pairs in chosen.items()}
            return " and ".join(dict.fromkeys(key for pairs in chosen.values() for key, _ in pairs)), titles
    return "setting", labels


def _title(pairs: Sequence[tuple[str, str]], num: int) -> str:
    return pairs[0][1] if num == 1 else ", ".join(f"{name}={value}" for name, value in pairs)


# --- comparing ----------------------------------------------------------------------------------------------------


def standings(study: Study, tag: str) -> list[Standing]:
    """Every setting that has to do with an environment, compared with the reference."""
    played = [s for s in study.settings if _plays(s, tag)]
    reference = _reference(study, played)
    return [_standing(setting, reference, tag) for setting in played]


def _plays(setting: Setting, tag: str) -> bool:
    """Whether it is validated there, or may still be."""
    tags = {known for trial in setting.trials for known in validation_tags(trial.run.metrics)}
    return tag in tags or not tags


def _reference(study: Study, settings: Sequence[Setting]) -> Setting | None:
    """The experiment's own; else the first that can be compared with."""
    own = [setting for setting in settings if setting.label == study.record.reference]
    comparable = [setting for setting in settings if setting.is_comparable()]
    return (own or comparable or [None])[0]


def _standing(setting: Setting, reference: Setting | None, tag: str) -> Standing:
    lasts = [trial.last(tag) for trial in setting.trials]
    by_seed = tuple(value.value for value in lasts if value is not None)
    success = _pooled(setting, tag, lasts)
    if reference is setting:
        return Standing(setting, success, by_seed, is_reference=True)
    change, problem = compare(reference, setting, tag) if reference else (None, "there is nothing to compare with")
    return Standing(setting, success, by_seed, change, problem=problem)


def _pooled(setting: Setting, tag: str, lasts: Sequence[Value | None]) -> Value | None:
    """The success of the last validations: of one run as it was stored, of several over all their levels."""
    known = [value for value in lasts if value is not None]
    if len(known) < 2:
        return known[0] if known else None
    step = max(value.step for value in known)
    outcomes = [paired_outcomes(trial.run, trial.run, tag)[0] for trial in setting.trials]
    if not all(outcomes):
        return Value(step, fmean(value.value for value in known))
    rate = Rate(sum(map(sum, outcomes)), sum(map(len, outcomes)))
    return Value(step, rate.mean, rate.interval)


def compare(reference: Setting, setting: Setting, tag: str) -> tuple[Change | None, str]:
    """The difference between two settings, seed by seed and level by level; or why it is unknown."""
    for one in (reference, setting):
        if not one.is_comparable():
            return None, f"{one.title} has not ended ({one.status})"
    others = {trial.cell.seed: trial for trial in reference.trials}
    pairs = [(others[trial.cell.seed], trial) for trial in setting.trials if trial.cell.seed in others]
    before: list[bool] = []
    after: list[bool] = []
    by_seed = []
    for first, second in pairs:
        old, new, problem = paired_outcomes(first.run, second.run, tag)
        if problem:
            return None, problem
        by_seed.append(fmean(new) - fmean(old))
        before += old
        after += new
    if not pairs:
        return None, f"{setting.title} and {reference.title} have no seed in common"
    return Change(paired_difference(before, after), tuple(by_seed)), ""


def seed_interval(differences: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean; None for a single value."""
    num = len(differences)
    if num < 2:
        return None
    quantile = T[num - 2] if num - 2 < len(T) else 1.96 + 2.4 / (num - 1)  # to the second digit
    reach = quantile * stdev(differences) / math.sqrt(num)
    return Interval(fmean(differences) - reach, fmean(differences) + reach)


# --- words --------------------------------------------------------------------------------------------------------


def headline(found: Sequence[Standing]) -> tuple[str, str]:
    """The finding in one line, and its tone: good, bad or flat."""
    reference = next((standing for standing in found if standing.is_reference), None)
    kinds = _by_kind(found)
    compared = sum(len(kinds[kind]) for kind in ("more", "less", "unsure", "noise"))
    stopped = [standing.setting.title for standing in found if standing.setting.stops and not standing.is_reference]
    if reference is not None and not compared and stopped:
        return f"Stopped early by a rule: {', '.join(stopped)}", "bad"
    if reference is None or not compared:
        return "There is nothing to compare yet", "flat"
    name = reference.setting.title
    real = len(kinds["more"]) + len(kinds["less"])
    if not real:
        return f"No setting differs from {name} by more than noise", "flat"
    parts = [f"{len(kinds[kind])} {word}" for kind, word in (("more", "better"), ("less", "worse")) if kinds[kind]]
    settings = "settings differs" if real == 1 else "settings differ"
    tone = "good" if kinds["more"] else "bad"
    return f"{real} of {compared} {settings} from {name} by more than noise: {' and '.join(parts)}", tone


def findings(found: Sequence[Standing]) -> list[str]:
    """Which differences are real and which are noise, in plain sentences."""
    reference = next((standing for standing in found if standing.is_reference), None)
    if reference is None:
        return ["No setting has been validated to its end yet."]
    kinds = _by_kind(found)
    sentences = [f"Compared with {reference.setting.title}, {_success_text(reference)}, on the same validation levels."]
    if kinds["more"] or kinds["less"]:
        listed = ", ".join(_told(standing) for standing in (*kinds["more"], *kinds["less"]))
        sentences.append(f"More than noise: {listed}.")
    if kinds["unsure"]:
        listed = ", ".join(_told(standing) for standing in kinds["unsure"])
        sentences.append(
            f"More than noise on these levels, but not over the seeds, which differ among themselves: {listed}."
        )
    if kinds["noise"]:
        sentences.append(f"Within noise: {', '.join(_told(standing) for standing in kinds['noise'])}.")
    sentences += _unfinished(found)
    sentences += _caveats(found, sum(len(kinds[kind]) for kind in ("more", "less", "unsure", "noise")))
    return sentences


def _by_kind(found: Sequence[Standing]) -> dict[str, list[Standing]]:
    """Comparisons by verdict. What a rule has stopped had less training, and is told apart."""
    kinds: dict[str, list[Standing]] = {kind: [] for kind in ("more", "less", "unsure", "noise")}
    for standing in found:
        if standing.change is not None and not standing.setting.stops:
            kinds[standing.change.verdict].append(standing)
    return kinds


def _unfinished(found: Sequence[Standing]) -> list[str]:
    stopped = [f"{s.setting.title} ({s.setting.stops})" for s in found if s.setting.stops]
    waiting = [f"{s.setting.title} ({s.setting.status})" for s in found if not s.setting.is_comparable()]
    unknown = [
        f"{s.setting.title} ({s.problem})"
        for s in found
        if s.problem and s.setting.is_comparable() and s.change is None
    ]
    sentences = []
    if stopped:
        sentences.append(f"Stopped early, which counts as a failed training regime: {'; '.join(stopped)}.")
    if waiting:
        sentences.append(f"Not ended: {'; '.join(waiting)}.")
    if unknown:
        sentences.append(f"Not comparable: {'; '.join(unknown)}.")
    return sentences


def _caveats(found: Sequence[Standing], num_compared: int) -> list[str]:
    sentences = []
    seeds = max((len(standing.setting.trials) for standing in found), default=0)
    if num_compared and seeds == 1:
        sentences.append(
            "One training seed: a difference is one between these runs. Whether the setting makes it, only more seeds "
            "(--seeds 3) can tell."
        )
    if num_compared >= 5:
        sentences.append(
            f"Of {num_compared} comparisons at 95 %, about {0.05 * num_compared:.1f} would look real by chance alone."
        )
    return sentences


def _success_text(standing: Standing) -> str:
    return value_text("success", standing.success) if standing.success else "without a validation"


def _told(standing: Standing) -> str:
    return f"{standing.setting.title} {change_text(standing.change)}"


def change_text(change: Change | None) -> str:
    if change is None:
        return "–"
    pooled = change.pooled
    return f"{100 * pooled.mean:+.1f} [{100 * pooled.low:+.1f}, {100 * pooled.high:+.1f}] points"


def seeds_text(values: Sequence[float]) -> str:
    return " · ".join(percent(value) for value in values)


def verdict_text(standing: Standing) -> str:
    if standing.is_reference:
        return "reference"
    if standing.setting.stops:
        return "stopped early"
    if standing.change is None:
        return standing.problem
    return VERDICTS[standing.change.verdict]


VERDICTS: Mapping[str, str] = {
    "more": "better, more than noise",
    "less": "worse, more than noise",
    "unsure": "more than noise here, but the seeds vary",
    "noise": "within noise",
}
