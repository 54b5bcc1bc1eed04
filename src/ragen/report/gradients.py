"""The report's section on gradient analysis: where the gradient comes from, in one sentence, tables and charts.

    section("pocket-sokoban", metrics, Path("checkpoints/ragen/test"))      # HTML; empty for a run without analysis

The same numbers as pictures in files: `ragen plot gradients RUN`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ragen.format import short
from ragen.report.charts import Axis, Line, escape, nice_ticks
from ragen.report.gradient_data import (
    AFTER,
    BEFORE,
    NAMES,
    TABLE,
    TERMS,
    Analysis,
    Bucket,
    Source,
    answer,
    at,
    read_table,
    steps,
)
from ragen.store.run_folder import Metrics

SIZE = (360, 220)
MOST_LINES = 5  # of a chart; a page has so many colours
STD = "reward std of a bucket's groups"
PAIRS = {"task_entropy": "task, entropy", "task_kl": "task, KL", "entropy_kl": "entropy, KL"}
MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
    lambda x, y: f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    lambda x, y: f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
    lambda x, y: f"M{x:.1f} {y + 4:.1f}l4 -7h-8z",
    lambda x, y: f"M{x - 1:.1f} {y - 4:.1f}h2v8h-2zM{x - 4:.1f} {y - 1:.1f}h8v2h-8z",
)


def section(name: str, metrics: Metrics, folder: Path) -> str:
    source = Source(name, {row["step"]: row for row in metrics.rows}, read_table(folder / TABLE))
    found = [at(source, step) for step in steps(source)]
    if not found:
        return ""
    last = found[-1]
    charts = "".join((_task_chart(found), _regulariser_chart(last), _snr_chart(last)))
    prefixes = [AFTER, *([BEFORE] if last.has(BEFORE) else [])]
    sentences = "".join(f"<p>{escape(answer(last, prefix).sentence)}</p>" for prefix in prefixes)
    return (
        f"<section><h2>Where the gradient comes from</h2>"
        f'<div class="card">{sentences}{_bucket_table(last, AFTER)}{_more(found)}</div>'
        f'<div class="charts">{charts}</div>{_cosines(last)}</section>'
    )


def _more(found: Sequence[Analysis]) -> str:
    """The groups before the filter, and what earlier steps say."""
    last, parts = found[-1], []
    if last.has(BEFORE):
        table = _bucket_table(last, BEFORE)
        parts.append(f"<details><summary>All groups, before the filter</summary>{table}</details>")
    if len(found) > 1:
        earlier = "".join(f"<p>{escape(answer(analysis).sentence)}</p>" for analysis in found[:-1])
        parts.append(f"<details><summary>Earlier steps</summary>{earlier}</details>")
    return "".join(parts)


# --- tables -------------------------------------------------------------------------------------------------------


def _bucket_table(analysis: Analysis, prefix: str) -> str:
    """A row for each bucket, and `all`."""
    terms = analysis.terms(prefix)
    buckets = [*analysis.buckets(prefix), analysis.whole(prefix)]
    has_snr = any(bucket.snr is not None for bucket in buckets)
    heads = ["groups", "sequences", "reward std", *(f"{NAMES[term]} norm" for term in terms)]
    heads += ["signal to noise"] if has_snr else []
    rows = "".join(_row(bucket.name, _cells(bucket, terms, has_snr)) for bucket in buckets)
    note = '<p class="soft small">Signal to noise: unrelated groups give 1, a common direction more.</p>'
    return _table(["bucket", *heads], rows) + (note if has_snr else "")


def _cells(bucket: Bucket, terms: Sequence[str], has_snr: bool) -> list[str]:
    low, high = bucket.get("reward_std_min"), bucket.get("reward_std_max")
    ends = "" if low is None or high is None else f" ({short(low)} to {short(high)})"
    counts = [
        short(None if (count := bucket.get(key)) is None else int(count)) for key in ("group_rv_count", "sample_count")
    ]
    norms = [short(bucket.norm(term)) for term in terms]
    return [*counts, f"{short(bucket.reward_std)}{ends}", *norms, *([short(bucket.snr)] if has_snr else [])]


def _cosines(analysis: Analysis) -> str:
    tables = [table for table in (_bucket_cosines(analysis), _term_cosines(analysis)) if table]
    return f'<div class="validation">{"".join(tables)}</div>' if tables else ""


def _bucket_cosines(analysis: Analysis) -> str:
    """The matrix of the buckets' task gradients."""
    names = [bucket.name for bucket in analysis.buckets()]
    values = {(one, other): analysis.cosine(one, other) for one in names for other in names}
    if all(value is None for (one, other), value in values.items() if one != other):
        return ""
    numbers = [name.removeprefix("bucket_") for name in names]
    rows = "".join(
        f"<tr><td>{number}</td>{''.join(_shaded(values[one, other]) for other in names)}</tr>"
        for number, one in zip(numbers, names, strict=True)
    )
    return _figure("Cosine between the buckets' task gradients", _table(["", *numbers], rows), analysis.step)


def _term_cosines(analysis: Analysis) -> str:
    buckets = [bucket.name for bucket in (*analysis.buckets(), analysis.whole())]
    shown = {
        pair: words
        for pair, words in PAIRS.items()
        if any(_cosine(analysis, name, pair) is not None for name in buckets)
    }
    if not shown:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_shaded(_cosine(analysis, name, pair)) for pair in shown)}</tr>"
        for name in buckets
    )
    return _figure("Cosine between the terms of the loss", _table(["bucket", *shown.values()], rows), analysis.step)


def _cosine(analysis: Analysis, bucket: str, pair: str) -> float | None:
    value = analysis.row.get(f"grad_cos/{bucket}/{pair}")
    return float(value) if isinstance(value, (int, float)) and -1.001 <= value <= 1.001 else None


def _shaded(value: float | None) -> str:
    """The number, the darker the further from 0."""
    if value is None:
        return '<td class="number">–</td>'
    shade = f"rgba(128,128,128,{min(1.0, abs(value)) * 0.45:.2f})"
    return f'<td class="number" style="background:{shade}">{round(value, 2) + 0.0:.2f}</td>'


def _table(heads: Sequence[str], rows: str) -> str:
    first, *others = (escape(head) for head in heads)
    cells = "".join(f'<th class="number">{head}</th>' for head in others)
    return f"<table><thead><tr><th>{first}</th>{cells}</tr></thead><tbody>{rows}</tbody></table>"


def _row(name: str, cells: Sequence[str]) -> str:
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
    return f"<tr><td>{escape(name)}</td>{numbers}</tr>"


# --- charts -------------------------------------------------------------------------------------------------------


def _task_chart(found: Sequence[Analysis]) -> str:
    """A line for each step that was analysed, the first and the last among them; and the last before the filter."""
    last = found[-1]
    has_twin = last.has(BEFORE)
    chosen = _spread(found, MOST_LINES - has_twin)
    lines = [Line(f"step {analysis.step}", _points(analysis.buckets(), "task")) for analysis in chosen]
    if has_twin:
        lines.append(Line(f"step {last.step}, before the filter", _points(last.buckets(BEFORE), "task")))
    return _chart("Task gradient and reward variance", lines, STD, "norm", None)


def _spread(found: Sequence[Analysis], most: int) -> list[Analysis]:
    if len(found) <= most:
        return list(found)
    return [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)]


def _regulariser_chart(analysis: Analysis) -> str:
    lines = [Line(NAMES[term], _points(analysis.buckets(), term)) for term in TERMS if term != "task"]
    return _chart("Entropy and KL gradient and reward variance", lines, STD, "norm", analysis.step)


def _snr_chart(analysis: Analysis) -> str:
    points = [(bucket.reward_std, bucket.snr) for bucket in analysis.buckets()]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    lines = [Line("signal to noise", known)]
    return _chart("Signal to noise of the task gradient", lines, STD, "1: nothing but noise", analysis.step)


def _points(buckets: Sequence[Bucket], term: str) -> list[tuple[float, float]]:
    pairs = [(bucket.reward_std, bucket.norm(term)) for bucket in buckets]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _chart(title: str, lines: Sequence[Line], x_name: str, y_name: str, step: int | None) -> str:
    known = [line for line in lines if line.points]
    if not known:
        return ""
    legend = _legend(known) if len(known) > 1 else ""
    return _figure(title, f"{xy_chart(known, x_name, y_name, SIZE, title)}{legend}", step)


def _figure(title: str, content: str, step: int | None) -> str:
    when = "" if step is None else f'<span class="value">step {step}</span>'
    return f'<figure class="card"><figcaption><span>{escape(title)}</span>{when}</figcaption>{content}</figure>'


def xy_chart(lines: Sequence[Line], x_name: str, y_name: str, size: tuple[int, int], name: str) -> str:
    """Lines over a quantity that is no step; each has a mark of its own besides its colour. Both axes hold 0."""
    width, height = size
    x_ticks = nice_ticks(*_ends([x for line in lines for x, _ in line.points]), 5)
    y_ticks = nice_ticks(*_ends([y for line in lines for _, y in line.points]), 4)
    axis = Axis()
    left, right = 14 + 6.2 * max(len(axis.tick(tick)) for tick in y_ticks), width - 12.0
    top, bottom = 22.0, height - 38.0

    def across(x: float) -> float:
        return left + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - left)

    def down(y: float) -> float:
        return bottom - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - top)

    parts = [
        f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        f'<text class="tick" x="{left - 6:.1f}" y="{down(tick) + 3.5:.1f}" text-anchor="end">{axis.tick(tick)}</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<text class="tick" x="{across(tick):.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{axis.tick(tick)}</text>'
        for tick in x_ticks
    ]
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    parts.append(f'<text class="tick" x="{left:.1f}" y="10">{escape(y_name)}</text>')
    parts.append(f'<text class="tick" x="{right:.1f}" y="{height - 6}" text-anchor="end">{escape(x_name)}</text>')
    for index, line in enumerate(lines):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        for x, y in line.points:
            words = escape(f"{line.label}: {short(y)} at {short(x)}")
            mark = MARKS[index](across(x), down(y))
            parts.append(f'<path class="dot s{index}" d="{mark}"><title>{words}</title></path>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high > low else (0.0, 1.0)


def _legend(lines: Sequence[Line]) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 20 8"><path class="line key s{index}" d="M0 4h20"/>'
        f'<path class="dot s{index}" d="{MARKS[index](10, 4)}"/></svg>{escape(line.label)}</span>'
        for index, line in enumerate(lines)
    )
    return f'<div class="legend">{keys}</div>'
