"""The report of a whole experiment: one HTML page and one Markdown table, from its record and its run folders.

    record = find_record("logs/kl_sweep_Qwen2.5-3B.log")       # or the folder beside it; None if it is none
    write_sweep_report(record)                                 # -> [….html, ….md], beside the summary log

It can be written at any time: an experiment that still runs is shown as far as it has come.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragen import __version__
from ragen.diagnose.collapse import FIRST_TURN
from ragen.diagnose.early_stop import REWARD_STD
from ragen.errors import ConfigError
from ragen.experiment.compare import (
    Setting,
    Standing,
    Study,
    change_text,
    findings,
    headline,
    read_study,
    seeds_text,
    standings,
    verdict_text,
)
from ragen.experiment.results import SEPARATOR, record_path, totals_line
from ragen.format import percent
from ragen.report.charts import Axis, Bar, BarGroup, Level, Line, bar_chart, escape, line_chart
from ragen.report.html import NARROW, SMALL, WIDE, page
from ragen.report.runs import value_text
from ragen.report.verdict import PREFIX, validations
from ragen.statistics import Interval
from ragen.store.fsync import write_whole

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
FRAME = "th,td.fit{white-space:nowrap}.card{overflow-x:auto}"
LIGHTNESS = ":root{--l:42%}@media(prefers-color-scheme:dark){:root{--l:66%}}.bar.b0{fill:var(--s0)}"


def find_record(path: str | Path) -> Path | None:
    """The record of the experiment that a summary log, a record or a folder belongs to; None if there is none."""
    path = Path(path)
    if path.suffix == ".log" or path.suffix == ".json":
        found = record_path(path) if path.suffix == ".log" else path
        return found if found.is_file() and path.exists() else None
    if not path.is_dir():
        return None
    beside = path.with_name(f"{path.name}.json")
    if beside.is_file():
        return beside
    inside = [found for found in sorted(path.glob("*.json")) if found.with_suffix(".log").is_file()]
    if len(inside) > 1:
        raise ConfigError(f"{path} holds several experiments: name one of {', '.join(map(str, inside))}")
    return inside[0] if inside else None


def write_sweep_report(record: Path) -> list[Path]:
    """Write both files, whole, beside the summary log."""
    study = read_study(record)
    paths = [record.with_name(f"{record.stem}.{kind}") for kind in ("html", "md")]
    for path, text in zip(paths, (render(study), markdown(study)), strict=True):
        write_whole(path, text.encode("utf-8", errors="replace"))
    return paths


# --- Markdown -----------------------------------------------------------------------------------------------------


def markdown(study: Study) -> str:
    """Title, findings and a table for each environment."""
    parts = [f"# {study.record.title}", f"{_facts(study)}."]
    for tag in study.tags:
        found = standings(study, tag)
        parts += [f"## {tag}: {headline(found)[0]}", *findings(found), "\n".join(_markdown_rows(study, found))]
    if not study.tags:
        parts.append("No validation was made yet.")
        parts.append("\n".join(f"- {setting.title}: {setting.status}" for setting in study.settings))
    return "\n\n".join(parts) + "\n"


def _markdown_rows(study: Study, found: Sequence[Standing]) -> Iterator[str]:
    heads = _headings(study)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join('---' for _ in heads)}|"
    for standing in found:
        yield f"| {' | '.join(text.replace('|', '/') for text in _texts(study, standing))} |"


def _headings(study: Study) -> list[str]:
    seeds = ["by seed"] if study.num_seeds > 1 else []
    return [study.axis, "status", "step", "success [95 %]", *seeds, "difference [95 %]", "verdict"]


def _texts(study: Study, standing: Standing) -> list[str]:
    setting, success = standing.setting, standing.success
    seeds = [seeds_text(standing.by_seed)] if study.num_seeds > 1 else []
    return [
        setting.title,
        setting.status,
        "–" if success is None else str(success.step),
        value_text("success", success),
        *seeds,
        change_text(standing.change),
        verdict_text(standing),
    ]


def _facts(study: Study) -> str:
    trials = [trial for setting in study.settings for trial in setting.trials]
    models = dict.fromkeys(trial.run.model for trial in trials if trial.run.model)
    steps = {trial.run.total_steps for trial in trials if trial.run.total_steps}
    facts = [f"model {', '.join(models)}" if models else "", f"{max(steps)} steps" if steps else ""]
    facts.append(f"{study.num_seeds} seeds" if study.num_seeds > 1 else "one seed")
    facts.append(totals_line(trial.status if trial.status != "running" else "missing" for trial in trials).lower())
    return " · ".join(fact for fact in facts if fact).replace(SEPARATOR, ", ")


# --- HTML ---------------------------------------------------------------------------------------------------------


def render(study: Study) -> str:
    sections = [f"<header><h1>{escape(study.record.title)}</h1><p class='soft'>{escape(_facts(study))}</p></header>"]
    for tag in study.tags:
        sections.append(_environment(study, tag, named=len(study.tags) > 1))
    if not study.tags:
        items = "".join(f"<li>{escape(s.title)}: {escape(s.status)}</li>" for s in study.settings)
        sections.append(f"<section class='card'><p>No validation was made yet.</p><ul>{items}</ul></section>")
    sections += [_training(study), f"<footer>{escape(study.record.summary)} · ragen {escape(__version__)}</footer>"]
    return page(f"{study.record.title} · ragen", "".join(sections), _colours())


def _environment(study: Study, tag: str, named: bool) -> str:
    found = standings(study, tag)
    told, tone = headline(found)
    sentences = "".join(f"<p>{escape(text)}</p>" for text in findings(found))
    prefix = f"{tag}: " if named else ""
    return (
        f'<section class="card verdict {tone}"><p class="headline">{escape(prefix + told)}</p>{sentences}</section>'
        f"{_table(study, found)}{_against_value(study, found, tag)}{_success_curves(study, tag)}"
    )


def _table(study: Study, found: Sequence[Standing]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in _headings(study))
    rows = []
    for standing in found:
        title, status, *others = (escape(text) for text in _texts(study, standing))
        swatch = f'<span class="swatch s{_colour(study, standing.setting)}"></span>'
        cells = [f'<td class="fit">{swatch} {title}</td>', f"<td>{status.replace(':', ': ')}</td>"]
        cells += [f'<td class="fit">{text}</td>' for text in others[:-1]] + [f"<td>{others[-1]}</td>"]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = "Success: interval over the levels. Difference: in points, on the same levels"
    note += ", seed by seed." if study.num_seeds > 1 else "."
    return (
        f'<section><h2>Settings</h2><div class="card"><table><thead><tr>{heads}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="soft small">{escape(note)}</p></section>'
    )


def _against_value(study: Study, found: Sequence[Standing], tag: str) -> str:
    known = [standing for standing in found if standing.success is not None]
    figures = []
    for start in range(0, len(known), MOST_LINES):
        groups = [_bar(standing) for standing in known[start : start + MOST_LINES]]
        chart = bar_chart(groups, Axis(percent=True, low=0.0, high=1.0), WIDE, name=f"success against {study.axis}")
        figures.append(f'<figure class="card">{chart}</figure>')
    if not figures:
        return ""
    baselines = "".join(f"; {level.label} play {percent(level.value)}" for level in _levels(study, tag))
    note = f"at the last validation; lines: 95 % intervals{baselines}; {STOPPED} stopped early"
    return (
        f"<section><h2>Success against {escape(study.axis)}</h2>{''.join(figures)}"
        f'<p class="soft small">{escape(note)}</p></section>'
    )


def _bar(standing: Standing) -> BarGroup:
    success = standing.success
    low, high = success.interval or Interval(success.value, success.value)
    note = f"step {success.step}{f' {STOPPED}' if standing.setting.stops else ''}"
    title = f"{standing.setting.title}: {value_text('success', success)}"
    return BarGroup(standing.setting.title, note, [Bar(standing.setting.title, success.value, low, high, title)])


def _levels(study: Study, tag: str) -> list[Level]:
    """What random and optimal play reach on the validation levels."""
    for setting in study.settings:
        for trial in setting.trials:
            for value in validations(trial.run.metrics, tag):
                known = (("random", value.random), ("optimal", value.optimal))
                return [Level(name, level) for name, level in known if level is not None]
    return []


def _success_curves(study: Study, tag: str) -> str:
    metric = f"{PREFIX}{tag}/success"
    figures = []
    for settings in _panels(study):
        lines = [line for line in (_line(study, setting, metric, tag) for setting in settings) if line[1].points]
        if lines:
            wide, narrow = (
                _chart(lines, Axis(percent=True, low=0.0, high=1.0), size, _levels(study, tag), "success")
                for size in (WIDE, NARROW)
            )
            figures.append(
                f'<figure class="card"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'
            )
    note = f"over training steps; dashed: random and optimal play; {STOPPED} stopped early"
    return (
        f"<section><h2>Success on the validation levels</h2>{''.join(figures)}"
        f'<p class="soft small">{escape(note)}</p></section>'
        if figures
        else ""
    )


def _training(study: Study) -> str:
    figures = []
    for title, metric, axis, note in CURVES:
        for settings in _panels(study):
            lines = [line for line in (_line(study, setting, metric) for setting in settings) if line[1].points]
            if lines:
                figures.append(
                    f'<figure class="card"><figcaption><span>{escape(title)}</span></figcaption>'
                    f'{_chart(lines, axis, SMALL, (), title)}<p class="note">{escape(note)}</p></figure>'
                )
    many = " Lines are means over the seeds." if study.num_seeds > 1 else ""
    note = f'<p class="soft small">Colours as in the table.{many}</p>'
    return f'<section><h2>Training</h2>{note}<div class="charts">{"".join(figures)}</div></section>' if figures else ""


def _panels(study: Study) -> list[Sequence[Setting]]:
    """Settings that are drawn together: so many in a row, of one group."""
    panels: list[list[Setting]] = []
    for place, setting in enumerate(study.settings):
        if not panels or place % MOST_LINES == 0 or panels[-1][-1].group != setting.group:
            panels.append([])
        panels[-1].append(setting)
    return panels


def _line(study: Study, setting: Setting, metric: str, tag: str | None = None) -> tuple[int, Line]:
    """The colour and the curve of a setting: the mean of its runs, step by step."""
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
    return _colour(study, setting), Line(label, points, band, dots=tag is not None)


def _colour(study: Study, setting: Setting) -> int:
    return study.settings.index(setting) % MOST_LINES


def _chart(
    lines: Sequence[tuple[int, Line]], axis: Axis, size: tuple[int, int], levels: Sequence[Level], name: str
) -> str:
    """A line chart whose lines keep their setting's colour: those before a gap in the colours are drawn empty."""
    last = max(colour for colour, _ in lines)
    by_colour = dict(lines)
    drawn = [by_colour.get(colour, Line("", [])) for colour in range(last + 1)]
    return line_chart(drawn, axis, size, levels, end_labels=size != SMALL, name=name)


def _colours() -> str:
    """One hue for each line of a chart, in the order of the settings, in light and dark."""
    rules = []
    for place, hue in enumerate(HUES):
        colour = f"hsl({hue} 70% var(--l))"
        rules.append(f".line.s{place},.key.s{place}{{stroke:{colour};stroke-dasharray:none}}")
        rules.append(f".band.s{place},.dot.s{place},.label.s{place}{{fill:{colour}}}")
        rules.append(f".swatch.s{place}{{background:{colour}}}")
    return FRAME + LIGHTNESS + "".join(rules)
