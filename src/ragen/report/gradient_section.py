"""The report's section on gradient analysis: where the gradient comes from, in one sentence, tables and charts.

    section("pocket-sokoban", metrics, Path("checkpoints/ragen/test"))      # for templates/gradients.html.jinja

`ragen plot gradients RUN` draws the same numbers as image files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ragen.format import short
from ragen.report.charts import MAX_COLOURS, Line, legend, xy_chart
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
from ragen.report.pages import Card
from ragen.store.run_folder import Metrics

SIZE = (360, 220)
STD = "reward std of a bucket's groups"
PAIRS = {"task_entropy": "task, entropy", "task_kl": "task, KL", "entropy_kl": "entropy, KL"}


class Cell(NamedTuple):
    text: str
    shade: str = ""  # of its background, as an opacity


@dataclass(frozen=True)
class NumberTable:
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    title: str = ""
    note: str = ""


def section(name: str, metrics: Metrics, folder: Path) -> dict[str, Any] | None:
    """What the page shows; None for a run without analysis."""
    source = Source(name, {row["step"]: row for row in metrics.rows}, read_table(folder / TABLE))
    found = [at(source, step) for step in steps(source)]
    if not found:
        return None
    last = found[-1]
    return {
        "sentences": [answer(last, prefix).sentence for prefix in last.prefixes()],
        "buckets": _bucket_table(last, AFTER),
        "buckets_before": _bucket_table(last, BEFORE) if last.has(BEFORE) else None,
        "earlier": [answer(analysis).sentence for analysis in found[:-1]],
        "cards": list(_cards(found)),
        "cosines": list(_cosine_tables(last)),
        "step": last.step,
    }


# --- tables -------------------------------------------------------------------------------------------------------


def _bucket_table(analysis: Analysis, prefix: str) -> NumberTable:
    """A row for each bucket, and `all`."""
    terms = analysis.terms(prefix)
    buckets = [*analysis.buckets(prefix), analysis.whole(prefix)]
    has_snr = any(bucket.snr is not None for bucket in buckets)
    heads = ["bucket", "groups", "sequences", "reward std", *(f"{NAMES[term]} norm" for term in terms)]
    rows = [(bucket.name, [Cell(text) for text in _cells(bucket, terms, has_snr)]) for bucket in buckets]
    if not has_snr:
        return NumberTable(heads, rows)
    note = "Signal to noise: unrelated groups give 1, a common direction more."
    return NumberTable([*heads, "signal to noise"], rows, note=note)


def _cells(bucket: Bucket, terms: Sequence[str], has_snr: bool) -> Iterator[str]:
    for key in ("group_rv_count", "sample_count"):
        count = bucket.get(key)
        yield short(None if count is None else int(count))
    low, high = bucket.get("reward_std_min"), bucket.get("reward_std_max")
    yield short(bucket.reward_std) + ("" if low is None or high is None else f" ({short(low)} to {short(high)})")
    yield from (short(bucket.norm(term)) for term in terms)
    if has_snr:
        yield short(bucket.snr)


def _cosine_tables(analysis: Analysis) -> Iterator[NumberTable]:
    """Between the task gradients of the buckets, and between the terms of the loss in each bucket."""
    names = [bucket.name for bucket in analysis.buckets()]
    between = {(one, other): analysis.cosine(one, other) for one in names for other in names}
    if any(value is not None for (one, other), value in between.items() if one != other):
        numbers = [bucket.number for bucket in analysis.buckets()]
        cells = [[_cosine_cell(between[one, other]) for other in names] for one in names]
        rows = list(zip(numbers, cells, strict=True))
        yield NumberTable(["", *numbers], rows, "Cosine between the buckets' task gradients")
    names.append(analysis.whole().name)
    terms = {(name, pair): _term_cosine(analysis, name, pair) for name in names for pair in PAIRS}
    shown = [pair for pair in PAIRS if any(terms[name, pair] is not None for name in names)]
    if shown:
        rows = [(name, [_cosine_cell(terms[name, pair]) for pair in shown]) for name in names]
        yield NumberTable(["bucket", *(PAIRS[pair] for pair in shown)], rows, "Cosine between the terms of the loss")


def _cosine_cell(value: float | None) -> Cell:
    """Darker the further from 0."""
    return Cell("–") if value is None else Cell(f"{round(value, 2) + 0.0:.2f}", f"{min(1.0, abs(value)) * 0.45:.2f}")


def _term_cosine(analysis: Analysis, bucket: str, pair: str) -> float | None:
    value = analysis.row.get(f"grad_cos/{bucket}/{pair}")
    return float(value) if isinstance(value, (int, float)) and -1.001 <= value <= 1.001 else None


# --- charts -------------------------------------------------------------------------------------------------------


def _cards(found: Sequence[Analysis]) -> Iterator[Card]:
    last = found[-1]
    step = f"step {last.step}"
    shown = _evenly(found, MAX_COLOURS - last.has(BEFORE))
    task = [Line(f"step {analysis.step}", analysis.norms_by_std("task")) for analysis in shown]
    task.append(Line(f"{step}, before the filter", last.norms_by_std("task", BEFORE)))
    others = [Line(NAMES[term], last.norms_by_std(term)) for term in TERMS if term != "task"]
    pairs = [(bucket.reward_std, bucket.snr) for bucket in last.buckets()]
    snr = [Line("signal to noise", [(std, snr) for std, snr in pairs if std is not None and snr is not None])]
    for title, lines, y_name, when in (
        ("Task gradient and reward variance", task, "norm", ""),
        ("Entropy and KL gradient and reward variance", others, "norm", step),
        ("Signal to noise of the task gradient", snr, "1: nothing but noise", step),
    ):
        known = [line for line in lines if line.points]
        if known:
            key = legend([line.label for line in known], key="mark") if len(known) > 1 else ""
            yield Card(title, xy_chart(known, STD, y_name, SIZE, title), when, key)


def _evenly(found: Sequence[Analysis], most: int) -> list[Analysis]:
    """At most so many, the first and the last among them."""
    if len(found) <= most:
        return list(found)
    return [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)]
