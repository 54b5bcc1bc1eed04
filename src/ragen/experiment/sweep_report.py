"""The report of a whole experiment: one HTML page and one Markdown table, from its record and its run folders.

    record = find_record("logs/kl_sweep_Qwen2.5-3B.log")       # or the directory beside it, or an older .log.1
    write_sweep_report(record)                                 # -> [….html, ….md], beside the summary log

It can be written at any time, also while the experiment is running.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragen.diagnose.collapse import FIRST_TURN
from ragen.diagnose.early_stop import REWARD_STD
from ragen.errors import ConfigError
from ragen.experiment import compare
from ragen.experiment.compare import Setting, Standing, Study, standings
from ragen.experiment.results import totals_line
from ragen.format import harmless, markdown_table, percent
from ragen.report.charts import NARROW, SHARE, SMALL, WIDE, Axis, Bar, BarGroup, Level, Line, bar_charts, line_chart
from ragen.report.pages import Card, render
from ragen.report.runs import Value, value_text
from ragen.report.verdict import PREFIX, baselines, validations
from ragen.store.fsync import write_whole
from ragen.store.sweep_results import SEPARATOR, record_path

MOST_LINES = 8  # in one chart
MOST_BANDS = 3
STOPPED = "✕"
HUES = (225, 200, 170, 130, 75, 40, 20, 345)  # of the lines of a chart, in order
CURVES = (
    ("Reward spread in a group", REWARD_STD, Axis(low=0.0), "standard deviation; no spread, no signal"),
    ("Entropy", "actor/entropy", Axis(low=0.0), "nats a token"),
    ("Information I(X;Z)", f"{FIRST_TURN}/mi_seq_estimate", Axis(low=0.0), "nats; of prompts and reasonings"),
    ("Gradient norm", "actor/grad_norm", Axis(low=0.0), "of the actor, before clipping"),
)


def find_record(path: str | Path) -> Path | None:
    """The record of the experiment that a summary log, a record or a folder belongs to; None if there is none."""
    path = Path(path)
    if kind := re.search(r"\.(log|json)(\.\d+)?$", path.name):
        found = record_path(path) if kind[1] == "log" else path
        return found if found.is_file() and path.exists() else None
    if not path.is_dir():
        return None
    beside = path.parent / f"{path.name}.json"
    if beside.is_file():
        return beside
    inside = [found for found in sorted(path.glob("*.json")) if found.with_suffix(".log").is_file()]
    if len(inside) > 1:
        raise ConfigError(f"{path} holds several experiments: name one of {', '.join(map(str, inside))}")
    return inside[0] if inside else None


def write_sweep_report(record: Path) -> list[Path]:
    """Write both files atomically beside the summary log: `x.html` for `x.log`, `x.1.html` for `x.log.1`."""
    study = compare.read_study(record)
    name = re.sub(r"\.json(?=(\.\d+)?$)", "", record.name)
    paths = [record.with_name(f"{name}.{kind}") for kind in ("html", "md")]
    for path, text in zip(paths, (page(study), markdown(study)), strict=True):
        write_whole(path, harmless(text).encode())
    return paths


def markdown(study: Study) -> str:
    """Title, findings and a table for each environment."""
    parts = [f"# {study.record.title}", f"{_facts(study)}."]
    for tag in study.tags:
        found = standings(study, tag)
        table = markdown_table(_headings(study), [_texts(study, standing) for standing in found])
        parts += [f"## {tag}: {compare.headline(found)[0]}", *compare.findings(found), table]
    if not study.tags:
        parts.append("No validation was made yet.")
        parts.append("\n".join(f"- {setting.title}: {setting.status}" for setting in study.settings))
    return "\n\n".join(parts) + "\n"


def _headings(study: Study) -> list[str]:
    seeds = ["by seed"] if study.num_seeds > 1 else []
    return [study.axis, "status", "step", "success [95 %]", *seeds, "difference [95 %]", "verdict"]


def _texts(study: Study, standing: Standing) -> list[str]:
    seeds = [" · ".join(map(percent, standing.by_seed))] if study.num_seeds > 1 else []
    return [
        standing.setting.title,
        standing.setting.status,
        "–" if standing.success is None else str(standing.success.step),
        value_text("success", standing.success),
        *seeds,
        compare.change_text(standing.change),
        compare.verdict_text(standing),
    ]


def _facts(study: Study) -> str:
    models = dict.fromkeys(trial.run.model for trial in study.trials if trial.run.model)
    steps = {trial.run.total_steps for trial in study.trials if trial.run.total_steps}
    facts = [f"model {', '.join(models)}" if models else "", f"{max(steps)} steps" if steps else ""]
    facts.append(f"{study.num_seeds} seeds" if study.num_seeds > 1 else "one seed")
    facts.append(
        totals_line(trial.status if trial.status != "running" else "missing" for trial in study.trials).lower()
    )
    return " · ".join(fact for fact in facts if fact).replace(SEPARATOR, ", ")


def page(study: Study) -> str:
    return render(
        "sweep",
        title=study.record.title,
        summary=study.record.summary,
        facts=_facts(study),
        axis=study.axis,
        headings=_headings(study),
        environments=[_environment(study, tag) for tag in study.tags],
        settings=study.settings,
        curves=list(_training_cards(study)),
        has_seeds=study.num_seeds > 1,
        hues=HUES,
        stopped=STOPPED,
    )


def _environment(study: Study, tag: str) -> dict[str, Any]:
    found = standings(study, tag)
    text, tone = compare.headline(found)
    validated = next((values for trial in study.trials if (values := validations(trial.run.metrics, tag))), [])
    levels = [Level(name, value) for name, value in baselines(validated).items()]
    return {
        "tag": tag,
        "headline": text,
        "tone": tone,
        "findings": compare.findings(found),
        "rows": [(_colour(study, standing.setting), _texts(study, standing)) for standing in found],
        "bars": bar_charts(
            [_bar(one.setting, one.success) for one in found if one.success], f"success against {study.axis}"
        ),
        "baselines": "".join(f"; {level.label} play {percent(level.value)}" for level in levels),
        "curves": list(_success_cards(study, tag, levels)),
    }


def _bar(setting: Setting, success: Value) -> BarGroup:
    low, high = success.interval or (None, None)
    note = f"step {success.step}{f' {STOPPED}' if setting.stops else ''}"
    title = f"{setting.title}: {value_text('success', success)}"
    return BarGroup(setting.title, note, [Bar(success.value, low, high, title)])


def _success_cards(study: Study, tag: str, levels: Sequence[Level]) -> Iterator[Card]:
    for lines in _panels(study, f"{PREFIX}{tag}/success", tag):
        wide, narrow = (line_chart(lines, SHARE, size, levels, True, "success") for size in (WIDE, NARROW))
        yield Card("", wide, narrow=narrow)


def _training_cards(study: Study) -> Iterator[Card]:
    for title, metric, axis, note in CURVES:
        for lines in _panels(study, metric):
            yield Card(title, line_chart(lines, axis, SMALL, name=title), note=note)


def _panels(study: Study, metric: str, tag: str | None = None) -> Iterator[list[Line]]:
    """The lines of each chart: at most MOST_LINES settings, all of one group."""
    panels: list[list[Setting]] = []
    for index, setting in enumerate(study.settings):
        if index % MOST_LINES == 0 or panels[-1][-1].group != setting.group:
            panels.append([])
        panels[-1].append(setting)
    for settings in panels:
        lines = [line for line in (_line(study, setting, metric, tag) for setting in settings) if line.points]
        if lines:
            yield lines


def _line(study: Study, setting: Setting, metric: str, tag: str | None) -> Line:
    """The mean of its runs, step by step."""
    values: dict[int, list[float]] = {}
    for trial in setting.trials:
        for step, value in trial.run.metrics.series(metric):
            if math.isfinite(value):
                values.setdefault(step, []).append(value)
    points = [(step, sum(found) / len(found)) for step, found in sorted(values.items())]
    band = []
    if tag is not None and len(setting.trials) == 1 and len(study.settings) <= MOST_BANDS:
        known = validations(setting.trials[0].run.metrics, tag)
        band = [(value.step, *value.interval) for value in known if value.interval is not None]
    label = f"{setting.title} {STOPPED}" if setting.stops else setting.title
    return Line(label, points, band, dots=tag is not None, colour=_colour(study, setting))


def _colour(study: Study, setting: Setting) -> int:
    return study.settings.index(setting) % MOST_LINES
