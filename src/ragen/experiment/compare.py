"""The findings of an experiment: each setting's success, and its difference from the reference, with intervals.

    study = read_study(Path("logs/kl_sweep_Qwen2.5-3B.json"))
    for standing in standings(study, "CoordSokoban"):
        standing.success, standing.change             # Value(…), Change(pooled=Difference(…), …)
    findings(standings(study, "CoordSokoban"))        # in plain sentences

A setting is a cell, or all repetitions of one. Validation plays the same levels in all of them, so two settings are
compared level by level, and with several seeds by seed and level. Such an interval is about the trained runs: with one
seed, another seed might give another result. With several, the differences of the seeds have an interval too
(Student's t), and a difference counts as real only if neither interval holds zero.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ragen.format import in_points
from ragen.report.runs import ListedRun, Value, paired_outcomes, read_run, value_text, values_of
from ragen.report.verdict import PREFIX, early_stop, validation_tags
from ragen.statistics import Difference, Interval, Rate, mean_interval, paired_difference
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import MISSING, Cell, Record, read_record, status_of

ENDED = ("success", "early_stopped")  # statuses of runs that can be compared
VERDICTS: Mapping[str, str] = {
    "more": "better, more than noise",
    "less": "worse, more than noise",
    "unsure": "more than noise here, but the seeds vary",
    "noise": "within noise",
}


@dataclass(frozen=True)
class Trial:
    """One run of a setting."""

    cell: Cell
    run: ListedRun
    status: str

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
        counts = Counter(trial.status for trial in self.trials)
        return ", ".join(f"{count} {status}" if len(counts) > 1 else status for status, count in counts.items())

    @property
    def stops(self) -> str:
        """What ended its runs early; empty if nothing did."""
        found = []
        for trial in self.trials:
            if trial.status.startswith("early_stopped"):
                stop = early_stop(trial.run.metrics, trial.run.folder.read_finished())
                at = f" at step {stop.step}" if stop and stop.step is not None else ""
                found.append(f"{trial.status.partition(':')[2]}{at}")
        how_many = f"{len(found)} of {len(self.trials)} runs: " if found and len(self.trials) > 1 else ""
        return how_many + ", ".join(dict.fromkeys(found))

    @property
    def is_comparable(self) -> bool:
        return all(trial.status.partition(":")[0] in ENDED for trial in self.trials)


@dataclass(frozen=True)
class Study:
    """An experiment, read back."""

    record: Record
    settings: tuple[Setting, ...]
    axis: str  # the field that its cells differ in

    @property
    def trials(self) -> list[Trial]:
        return [trial for setting in self.settings for trial in setting.trials]

    @property
    def tags(self) -> list[str]:
        """The environments that were validated."""
        return list(dict.fromkeys(tag for trial in self.trials for tag in validation_tags(trial.run.metrics)))

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
        return mean_interval(self.by_seed)

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
    problem: str = ""  # why there is no change


# --- reading ------------------------------------------------------------------------------------------------------


def read_study(path: Path) -> Study:
    """An experiment from its record, with the results that exist so far."""
    record = read_record(path)
    latest = record.latest_lines()
    axis, titles = _titles(list(record.cells.values()))

    def trial(cell: Cell) -> Trial:
        run, status = read_run(cell.name, RunFolder(record.run_folder(cell))), status_of(latest.get(cell.name, ""))
        return Trial(cell, run, run.status if status == MISSING and run.status.startswith("running") else status)

    settings = (
        Setting(label, titles[cells[0].name], cells[0].group, tuple(map(trial, cells)))
        for label, cells in record.by_setting().items()
    )
    return Study(record, tuple(settings), axis)


def _titles(cells: Sequence[Cell]) -> tuple[str, dict[str, str]]:
    """The field that cells differ in, and a title for each by name: as few fields as tell them apart."""
    known = {cell.name: [pair for pair in cell.fields if pair[0] not in ("name", "seed")] for cell in cells}
    common = set.intersection(*(set(pairs) for pairs in known.values())) if cells else set()
    differing = {name: [pair for pair in pairs if pair not in common] for name, pairs in known.items()}
    labels = {cell.name: cell.setting for cell in cells}
    for num in range(1, max(map(len, differing.values()), default=0) + 1):
        chosen = {name: tuple(pairs[:num]) for name, pairs in differing.items()}
        if len(set(chosen.values())) == len(set(labels.values())):
            axis = " and ".join(dict.fromkeys(key for pairs in chosen.values() for key, _ in pairs))
            if num == 1:
                return axis, {name: value for name, ((_, value),) in chosen.items()}
            return axis, {name: ", ".join(map("=".join, pairs)) for name, pairs in chosen.items()}
    return "setting", labels


# --- comparing ----------------------------------------------------------------------------------------------------


def standings(study: Study, tag: str) -> list[Standing]:
    """Every setting that is validated in an environment, or may still be, compared with the reference."""
    played = []
    for setting in study.settings:
        tags = {known for trial in setting.trials for known in validation_tags(trial.run.metrics)}
        if tag in tags or not tags:
            played.append(setting)
    own = [setting for setting in played if setting.label == study.record.reference]
    candidates = own or [setting for setting in played if setting.is_comparable]
    reference = next(iter(candidates), None)
    return [_standing(setting, reference, tag) for setting in played]


def _standing(setting: Setting, reference: Setting | None, tag: str) -> Standing:
    lasts = [value for trial in setting.trials if (value := trial.last(tag)) is not None]
    by_seed = tuple(value.value for value in lasts)
    success = _pooled(setting, tag, lasts)
    if reference is setting:
        return Standing(setting, success, by_seed, is_reference=True)
    change, problem = compare(reference, setting, tag) if reference else (None, "there is nothing to compare with")
    return Standing(setting, success, by_seed, change, problem=problem)


def _pooled(setting: Setting, tag: str, lasts: Sequence[Value]) -> Value | None:
    """The success of the last validations: of one run as it was stored, of several over all their levels."""
    if len(lasts) < 2:
        return next(iter(lasts), None)
    step = max(value.step for value in lasts)
    outcomes = [paired_outcomes(trial.run, trial.run, tag)[0] for trial in setting.trials]
    if not all(outcomes):
        return Value(step, fmean(value.value for value in lasts))
    rate = Rate(sum(map(sum, outcomes)), sum(map(len, outcomes)))
    return Value(step, rate.mean, rate.interval)


def compare(reference: Setting, setting: Setting, tag: str) -> tuple[Change | None, str]:
    """The difference between two settings, seed by seed and level by level; or why it is unknown."""
    for one in (reference, setting):
        if not one.is_comparable:
            return None, f"{one.title} has not ended ({one.status})"
    others = {trial.cell.seed: trial.run for trial in reference.trials}
    pairs = [
        paired_outcomes(others[trial.cell.seed], trial.run, tag)
        for trial in setting.trials
        if trial.cell.seed in others
    ]
    if not pairs:
        return None, f"{setting.title} and {reference.title} have no seed in common"
    for _, _, problem in pairs:
        if problem:
            return None, problem
    before = [outcome for old, _, _ in pairs for outcome in old]
    after = [outcome for _, new, _ in pairs for outcome in new]
    by_seed = tuple(fmean(new) - fmean(old) for old, new, _ in pairs)
    return Change(paired_difference(before, after), by_seed), ""


# --- sentences ----------------------------------------------------------------------------------------------------


def headline(found: Sequence[Standing]) -> tuple[str, str]:
    """The finding in one line, and its tone: good, bad or flat."""
    reference, kinds, compared = _sorted(found)
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
    reference, kinds, compared = _sorted(found)
    if reference is None:
        return ["No setting has been validated to its end yet."]
    success = value_text("success", reference.success) if reference.success else "without a validation"
    sentences = [f"Compared with {reference.setting.title}, {success}, on the same validation levels."]
    for heading, members in (
        ("More than noise", [*kinds["more"], *kinds["less"]]),
        ("More than noise on these levels, but not over the seeds, which differ among themselves", kinds["unsure"]),
        ("Within noise", kinds["noise"]),
    ):
        if members:
            changes = (f"{one.setting.title} {change_text(one.change)}" for one in members)
            sentences.append(f"{heading}: {', '.join(changes)}.")
    sentences += _unfinished(found)
    if compared and max(len(standing.setting.trials) for standing in found) == 1:
        sentences.append(
            "One training seed: a difference is one between these runs. Whether the setting makes it, only more seeds "
            "(--seeds 3) can tell."
        )
    if compared >= 5:
        sentences.append(
            f"Of {compared} comparisons at 95 %, about {0.05 * compared:.1f} would look real by chance alone."
        )
    return sentences


def _sorted(found: Sequence[Standing]) -> tuple[Standing | None, dict[str, list[Standing]], int]:
    """The reference, the comparisons by verdict, and their number. A run that a rule has stopped is left out."""
    reference = next((standing for standing in found if standing.is_reference), None)
    kinds: dict[str, list[Standing]] = {kind: [] for kind in VERDICTS}
    for standing in found:
        if standing.change is not None and not standing.setting.stops:
            kinds[standing.change.verdict].append(standing)
    return reference, kinds, sum(map(len, kinds.values()))


def _unfinished(found: Sequence[Standing]) -> list[str]:
    parts = {
        "Stopped early, which counts as a failed training regime": [
            f"{one.setting.title} ({one.setting.stops})" for one in found if one.setting.stops
        ],
        "Not ended": [f"{one.setting.title} ({one.setting.status})" for one in found if not one.setting.is_comparable],
        "Not comparable": [
            f"{one.setting.title} ({one.problem})" for one in found if one.setting.is_comparable and one.problem
        ],
    }
    return [f"{heading}: {'; '.join(listed)}." for heading, listed in parts.items() if listed]


def change_text(change: Change | None) -> str:
    return "–" if change is None else f"{in_points(change.pooled)} points"


def verdict_text(standing: Standing) -> str:
    if standing.is_reference:
        return "reference"
    if standing.setting.stops:
        return "stopped early"
    return standing.problem if standing.change is None else VERDICTS[standing.change.verdict]
