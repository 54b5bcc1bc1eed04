"""The verdict on a run, in words, from its metrics and its validation episodes alone.

    verdict(metrics, before, after).headline            # "Validation success rose by 15.2 points"
    read_verdict(folder).health.headline                # "Healthy: validation success rose (39.1 % at step 0, …"
    early_stop(metrics, folder.read_finished())         # Stop("reward_variance_collapse", step=41, …), or None

It says "within noise" where that is all that can be said. Two ways to judge a change: the 95 % intervals of the first
and the last validation, and, where both played the same levels once each, the paired difference, which sees more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ragen.diagnose.collapse import regime
from ragen.diagnose.health import Health, HealthVerdict
from ragen.diagnose.history import finite
from ragen.diagnose.success import success_change
from ragen.format import in_points, percent, short
from ragen.statistics import Difference, Interval, paired_difference
from ragen.store.episodes import SHOWN, read_episodes
from ragen.store.reading import Unreadable
from ragen.store.run_folder import Metrics, RunFolder

PREFIX = "val-env/"
STOPPED = "early_stopped/"
POINTS_WORTH_NAMING = 0.0005  # a change that rounds to 0.0 points is none

SuccessVerdict = tuple[str, str, list[str]]  # how success changed: headline, tone (good, bad or flat), sentences


@dataclass(frozen=True)
class Validated:
    """One validation of one environment."""

    step: int
    success: float
    interval: Interval | None
    random: float | None
    optimal: float | None

    @property
    def text(self) -> str:
        return percent(self.success, self.interval)


@dataclass(frozen=True)
class RunVerdict:
    headline: str
    tone: str  # good, bad or flat
    sentences: list[str]
    health: HealthVerdict


@dataclass(frozen=True)
class Stop:
    """A rule ended the run before its budget."""

    rule: str
    step: int | None
    explanation: str = ""  # in the rule's own words, with its numbers


def early_stop(metrics: Metrics, finished: Mapping[str, Any] | None = None) -> Stop | None:
    """What ended the run early: from the record of its end, or from the metrics where there is none."""
    if finished and finished.get("status") == "early_stopped":
        rule, step, explanation = map(finished.get, ("rule", "step", "explanation"))
        step = step if isinstance(step, int) else metrics.last_step()
        return Stop(str(rule or "unknown"), step, str(explanation or ""))
    found = ((key, row["step"]) for row in metrics.rows for key, value in row.items() if value)
    return next((Stop(key.removeprefix(STOPPED), step) for key, step in found if key.startswith(STOPPED)), None)


def validation_tags(metrics: Metrics) -> list[str]:
    """The environments that were validated."""
    names = [key.removeprefix(PREFIX).rpartition("/") for key in metrics.names() if key.startswith(PREFIX)]
    return list(dict.fromkeys(tag for tag, _, name in names if name == "success"))


def validations(metrics: Metrics, tag: str, name: str = "success") -> list[Validated]:
    """Every validation with a finite success, in order of steps. `name` may be `greedy_success`."""
    found = []
    for row in metrics.rows:
        success = finite(row, f"{PREFIX}{tag}/{name}")
        if success is None:
            continue
        low, high = (finite(row, f"{PREFIX}{tag}/{name}_{end}") for end in ("low", "high"))
        interval = None if low is None or high is None else Interval(low, high)
        random, optimal = (finite(row, f"{PREFIX}{tag}/{level}") for level in ("random", "optimal"))
        found.append(Validated(row["step"], success, interval, random, optimal))
    return found


def baselines(values: Sequence[Validated]) -> dict[str, float]:
    """What random and optimal play reach on these levels, where known."""
    names = ("random", "optimal")
    return {name: reached for name in names for value in values if (reached := getattr(value, name)) is not None}


def verdict(
    metrics: Metrics,
    before: Sequence[dict[str, Any]] = (),
    after: Sequence[dict[str, Any]] = (),
    finished: Mapping[str, Any] | None = None,
) -> RunVerdict:
    """`before` and `after` are the episodes of the first and the last validation, where they were stored."""
    headline, tone, sentences = _of_all(metrics, before, after)
    stop = early_stop(metrics, finished)
    if stop:
        at = "" if stop.step is None else f" at step {stop.step}"
        sentences = [*sentences, f"The run was stopped early{at} by the rule {stop.rule}."]
    sentences = [*sentences, *_reasoning(metrics), *_non_finite(metrics), *metrics.notes]
    change = success_change(metrics.rows, paired(before, after))
    if change.outcome == "none":
        tone = "bad"
    health = Health.of(metrics.rows).verdict(change, stop.rule if stop else "")
    return RunVerdict(headline, "bad" if stop else tone, sentences, health)


def read_verdict(folder: RunFolder, finished: Mapping[str, Any] | None = None) -> RunVerdict:
    """The verdict on a run on disk. `finished`: how it ended, if that is not stored yet."""
    metrics = folder.read_metrics()
    before, after = first_and_last_episodes(folder, metrics.notes)
    return verdict(metrics, before, after, folder.read_finished() if finished is None else finished)


def first_and_last_episodes(folder: RunFolder, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The episodes of the first validation, and of the last if that is another one."""
    files = folder.episode_files("val")
    before = _read_episodes(files[0].path, notes) if files else []
    return before, _read_episodes(files[-1].path, notes) if len(files) > 1 else []


def _read_episodes(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return read_episodes(path, SHOWN)
    except Unreadable as error:
        notes.append(f"{path.name} cannot be read ({error.why}): its episodes are not shown")
        return []


def _of_all(metrics: Metrics, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> SuccessVerdict:
    """The verdicts of all environments as one."""
    tags = validation_tags(metrics)
    if not metrics.rows:
        return "Nothing was measured yet", "flat", ["The run folder holds no metrics."]
    if not tags:
        return "No validation was made", "flat", ["Without validation nothing can be said about success."]
    parts = []
    for tag in tags:
        change = paired(*([episode for episode in some if episode["tag"] == tag] for some in (before, after)))
        subject = f"{tag}: success" if len(tags) > 1 else "Validation success"
        parts.append(_of_tag(subject, validations(metrics, tag), change))
    headlines, tones, sentences = zip(*parts, strict=True)
    tone = next((tone for tone in ("bad", "good") if tone in tones), "flat")
    return "; ".join(headlines), tone, [*chain(*sentences)]


def _of_tag(subject: str, values: Sequence[Validated], change: Difference | None) -> SuccessVerdict:
    if not values:
        return f"{subject} is unknown", "flat", ["No validation gave a finite success rate."]
    first, last = values[0], values[-1]
    if len(values) < 2:
        only = f"There is only one validation, at step {first.step}: {first.text}. Two are needed to see a change."
        headline = f"{subject} is {percent(first.success)}; too early to see a change"
        return headline, "flat", [only, *_standing(values)]
    gain = last.success - first.success
    is_noise, evidence = _evidence(first, last, change)
    moved = f"{subject} {'rose' if gain > 0 else 'fell'} by {100 * abs(gain):.1f} points"
    if abs(gain) < POINTS_WORTH_NAMING:
        headline, tone = f"{subject} did not change", "flat"
    elif is_noise:
        headline, tone = f"{moved}, which is within noise", "flat"
    else:
        headline, tone = moved, "good" if gain > 0 else "bad"
    steps = f"From {first.text} at step {first.step} to {last.text} at step {last.step}"
    story = f"{steps}: {100 * gain:+.1f} points. {evidence}"
    return headline, tone, [story, *_peak(values), *_standing(values)]


def paired(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Difference | None:
    """The change on the levels that both played; None if a level was played more than once (those are no pairs)."""
    old, new = ({(one["tag"], one["seed"]): one["success"] for one in episodes} for episodes in (before, after))
    if len(old) != len(before) or len(new) != len(after):
        return None
    levels = sorted(old.keys() & new.keys())
    return paired_difference([old[level] for level in levels], [new[level] for level in levels]) if levels else None


def _evidence(first: Validated, last: Validated, change: Difference | None) -> tuple[bool, str]:
    """Whether a change is within noise, and how we know."""
    if first.interval is None or last.interval is None:
        is_noise, text = True, "No intervals were stored"
        meaning = ": whether this is more than noise is unknown"
    else:
        is_noise = first.interval.overlaps(last.interval)
        text = f"The 95 % intervals {'overlap' if is_noise else 'do not overlap'}"
        meaning = ": this may be chance" if is_noise else ""
    if change is None:
        return is_noise, f"{text}{meaning}."
    meaning = "zero is among the possible values" if change.is_noise else "this is more than noise"
    levels = f"Level by level, on {change.num_levels} shared levels"
    return change.is_noise, f"{text}. {levels}, {in_points(change)} points: {meaning}."


def _standing(values: Sequence[Validated]) -> Iterator[str]:
    """Where the agent is between random and optimal play."""
    first, last = values[0], values[-1]
    reached = baselines(values)
    random, optimal = reached.get("random"), reached.get("optimal")
    if random is None:
        return
    if optimal is not None and optimal > random:
        begun, covered = ((value.success - random) / (optimal - random) for value in (first, last))
        start = f" ({percent(begun)} at the start)" if len(values) > 1 and begun > 0 else ""
        distance = f": the agent has covered {percent(covered)} of the way between them{start}" if covered > 0 else ""
        levels = f"Random play reaches {percent(random)} and optimal play {percent(optimal)} of these levels"
        yield f"{levels}{': the agent is at the optimum' if covered >= 1 else distance}."
    else:
        unknown = "; the best possible is unknown" if optimal is None else ""
        yield f"Random play reaches {percent(random)} of these levels{unknown}."
    if last.interval is not None and random in last.interval:
        yield "The agent is not distinguishable from random play."
    elif last.success < random:
        yield "It is worse than random play."


def _peak(values: Sequence[Validated]) -> Iterator[str]:
    best, last = max(values, key=lambda value: value.success), values[-1]
    has_fallen = best.interval is not None and last.interval is not None and not best.interval.overlaps(last.interval)
    if best.step != last.step:
        since = ", and has fallen since" if has_fallen else ""
        yield f"It was at its best at step {best.step} with {best.text}{since}."


def _reasoning(metrics: Metrics) -> Iterator[str]:
    """The regime at the last measurement, with its numbers."""
    measured = [row for row in metrics.rows if regime(row) is not None]
    found = regime(measured[-1], measured[0]) if measured else None
    if found is not None:
        near = "" if found.is_clear else ", nearer to its threshold than noise"
        yield (
            f"The reasoning at step {measured[-1]['step']} is {found.name}: I(X;Z) {found.information:.2f} nats (low "
            f"below {found.information_threshold:.2f}{near}), H(Z|X) {found.entropy:.3f} nats a token (low below "
            f"{found.entropy_threshold:.3f})."
        )


def _non_finite(metrics: Metrics) -> Iterator[str]:
    for key in metrics.names():
        points = [(step, value) for step, value in metrics.series(key) if not math.isfinite(value)]
        if points:
            step, value = points[0]
            times = "once" if len(points) == 1 else f"{len(points)} times"
            yield f"{key} was not finite {times}, first at step {step} ({short(value)})."
