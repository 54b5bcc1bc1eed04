"""The report's section on gradient analysis: where the gradient comes from, in one sentence, tables and charts.

    section("pocket-sokoban", metrics, Path("checkpoints/ragen/test"))      # for templates/gradients.html.jinja

`ragen plot gradients RUN` draws the same numbers as image files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragen.report.charts import MAX_COLOURS, Line, legend, xy_chart
from ragen.report.gradient_data import BEFORE, NAMES, TABLE, TERMS, Analysis, Source, answer, at, steps
from ragen.report.pages import Card
from ragen.store import json_lines
from ragen.store.run_folder import Metrics

SIZE = (360, 220)
STD = "reward std of a bucket's groups"
PAIRS = {"task_entropy": "task, entropy", "task_kl": "task, KL", "entropy_kl": "entropy, KL"}


def section(run: str, metrics: Metrics, folder: Path) -> dict[str, Any] | None:
    """What the page shows; None for a run without analysis."""
    source = Source(run, {row["step"]: row for row in metrics.rows}, json_lines.read(folder / TABLE).records)
    found = [at(source, step) for step in steps(source)]
    if not found:
        return None
    last = found[-1]
    buckets = last.buckets()
    between = [(one.number, [last.cosine(one.name, other.name) for other in buckets]) for one in buckets]
    names = [bucket.name for bucket in last.with_whole()]
    of_terms = {name: {pair: _term_cosine(last, name, pair) for pair in PAIRS} for name in names}
    pairs = [pair for pair in PAIRS if any(cosines[pair] is not None for cosines in of_terms.values())]
    return {
        "last": last,
        "names": NAMES,
        "sentences": [answer(last, prefix).sentence for prefix in last.prefixes()],
        "earlier": [answer(analysis).sentence for analysis in found[:-1]],
        "cards": list(_cards(found)),
        # A bucket has cosine 1 with itself; a matrix of nothing else is not shown.
        "between_buckets": between if any(sum(c is not None for c in cosines) > 1 for _, cosines in between) else [],
        "pairs": [PAIRS[pair] for pair in pairs],
        "between_terms": [(name, [cosines[pair] for pair in pairs]) for name, cosines in of_terms.items()],
    }


def _term_cosine(analysis: Analysis, bucket: str, pair: str) -> float | None:
    value = analysis.row.get(f"grad_cos/{bucket}/{pair}")
    return float(value) if isinstance(value, (int, float)) and -1.001 <= value <= 1.001 else None


def _cards(found: Sequence[Analysis]) -> Iterator[Card]:
    last = found[-1]
    step = f"step {last.step}"
    shown = _evenly(found, MAX_COLOURS - bool(last.buckets(BEFORE)))
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
    """At most `most` of them, including the first and the last."""
    if len(found) <= most:
        return list(found)
    return [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
