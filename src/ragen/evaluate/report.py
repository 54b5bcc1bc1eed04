"""The comparison of models: a table in the terminal and as Markdown, and a page with bars, pass@k and some episodes.

    print_table(rows, console)
    write_report(path, rows, examples, settings)      # ….html and ….md beside the lines

A row is a model in an environment within a limit of turns. Differences are paired, on the levels that both have played:
of a checkpoint against what its run began from, if that plays too; of others against the first model, and for the
first model against its first limit of turns. `report/templates/evaluation.html.jinja` lays out the page.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragen.env.registry import make
from ragen.evaluate.metrics import difference
from ragen.evaluate.run import ModelResult
from ragen.evaluate.setting import Setting
from ragen.format import harmless, in_points, markdown_table, percent
from ragen.report import charts, pages, replay
from ragen.report.charts import Bar, BarGroup
from ragen.statistics import Estimate
from ragen.store.episodes import episode_record
from ragen.store.fsync import write_whole
from ragen.types import Episode

DASH = "–"
CHARACTERS_IN_A_CHART = 100  # across
MISSING = (
    "Episodes that did not finish are not scored: the interval reaches from all of them lost to all of them won. "
    "Return, turns, tokens and invalid replies are those of the others alone"
)


def headings(rows: Sequence[ModelResult]) -> list[str]:
    k = _largest_k(rows)
    pass_at = [f"pass@{k}"] if k > 1 else []
    compared = ["difference"] if any(reference_of(row, rows) is not None for row in rows) else []
    return ["model", "turns", "success", *compared, *pass_at, "return", "turns used", "tokens", "invalid", "notes"]


def cells(row: ModelResult, rows: Sequence[ModelResult]) -> list[str]:
    """The texts of one row, in the order of `headings`."""
    found, k = row.measured, _largest_k(rows)
    texts = {"model": row.model, "turns": str(row.max_turn), "notes": "; ".join(_notes(row))}
    if found is not None:
        texts |= {
            "success": success_text(row, found.success),
            "difference": _difference(row, rows),
            f"pass@{k}": rate_text(found.pass_at.get(k)),
            "return": _number(found.mean_return),
            "turns used": _number(found.turns),
            "tokens": _number(found.tokens, digits=0),
            "invalid": rate_text(found.invalid),
        }
    return [texts.get(name, DASH) for name in headings(rows)]


def table_rows(rows: Sequence[ModelResult], tag: str) -> list[list[str]]:
    """All rows of one environment, between random and optimal play."""
    shown = [row for row in rows if row.tag == tag]
    models = (cells(row, rows) for row in shown)
    return [*_baseline("random", rows, shown), *models, *_baseline("optimal", rows, shown)]


def _baseline(name: str, rows: Sequence[ModelResult], shown: Sequence[ModelResult]) -> Iterator[list[str]]:
    """Random or optimal play, once for each limit of turns."""
    for max_turn in dict.fromkeys(row.max_turn for row in shown):
        reached = next(row.reached for row in shown if row.max_turn == max_turn)
        value = getattr(reached, name)
        texts = {"model": f"{name} play", "turns": str(max_turn), "success": "unknown", "notes": value}
        if isinstance(value, float):
            is_whole = reached.num_levels >= max(len(row.asked) for row in shown)
            texts |= {"success": percent(value), "notes": "exact"}
            texts["notes"] += "" if is_whole else f", over {reached.num_levels} levels"
        yield [texts.get(column, DASH) for column in headings(rows)]


def reference_of(row: ModelResult, rows: Sequence[ModelResult]) -> ModelResult | None:
    """The row that this one is compared with."""
    of_tag = [other for other in rows if other.tag == row.tag]
    first = of_tag[0]
    model = row.against or first.model
    if row.model != model:
        return next(other for other in of_tag if other.model == model and other.max_turn == row.max_turn)
    return None if row.max_turn == first.max_turn else first


def _difference(row: ModelResult, rows: Sequence[ModelResult]) -> str:
    reference = reference_of(row, rows)
    found = None if reference is None else difference(reference.outcomes, row.outcomes, row.asked)
    if reference is None or found is None:
        return DASH
    against = reference.model if reference.model != row.model else f"{reference.max_turn} turns"
    return f"{in_points(found)}{', noise' if found.is_noise else ''} vs {against}"


def _notes(row: ModelResult) -> Iterator[str]:
    yield f"{row.measured.num_levels if row.measured else 0} levels, {len(row.outcomes)} episodes"
    if row.num_failed:
        reason = max(row.failures, key=lambda reason: row.failures[reason])
        yield f"{row.num_failed} failed and not scored: {reason}"
    if row.num_left:
        yield f"{row.num_left} not played"
    most = _largest_k([row])
    if row.measured is not None and most not in row.measured.pass_at:
        yield f"no level has all of its {most} samples, so that there is no pass@{most}"
    yield from row.notes


def success_text(row: ModelResult, success: Estimate) -> str:
    """Success, and how many episodes finished where not all did."""
    finished = "" if row.is_whole else f", {len(row.outcomes)} of {row.num_asked} finished"
    return f"{rate_text(success)}{finished}"


def rate_text(estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    value, low, high = estimate
    return percent(value, None if low is None or high is None else (low, high))


def _number(estimate: Estimate | None, digits: int = 2) -> str:
    if estimate is None:
        return DASH
    bounds = "" if estimate.low is None else f" [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return f"{estimate.value:.{digits}f}{bounds}"


def _largest_k(rows: Sequence[ModelResult]) -> int:
    return max((max(row.asked.values(), default=1) for row in rows), default=1)


def footnote(rows: Sequence[ModelResult]) -> str:
    """How to read the numbers."""
    text = "[ ]: 95 % intervals, with a level as one observation; differences in points of success, on the same levels"
    return text if all(row.is_whole for row in rows) else f"{text}. {MISSING}"


def print_table(rows: Sequence[ModelResult], console: Console) -> None:
    """As wide as the terminal; elsewhere nothing is cut."""
    for tag in dict.fromkeys(row.tag for row in rows):
        if not console.is_terminal:
            console.print(markdown_section(rows, tag), soft_wrap=True, markup=False, highlight=False)
            continue
        table = Table(title=tag, title_justify="left", box=None, header_style="dim", pad_edge=False)
        for heading in headings(rows):
            table.add_column(heading, overflow="fold")
        for texts in table_rows(rows, tag):
            table.add_row(*texts)
        console.print(table, markup=False, highlight=False)
    console.print(footnote(rows), markup=False, highlight=False, soft_wrap=not console.is_terminal)


def markdown_section(rows: Sequence[ModelResult], tag: str) -> str:
    return f"{tag}\n\n{markdown_table(headings(rows), table_rows(rows, tag))}\n"


def markdown(rows: Sequence[ModelResult]) -> str:
    parts = ["# Evaluation"] + [f"## {markdown_section(rows, tag)}" for tag in dict.fromkeys(row.tag for row in rows)]
    return "\n\n".join([*parts, footnote(rows)]) + "\n"


def write_report(
    path: Path, rows: Sequence[ModelResult], examples: Sequence[Sequence[Episode]], settings: Sequence[Setting]
) -> Path:
    """Write the page and the Markdown table beside the lines, and return the path of the page."""
    tags = list(dict.fromkeys(row.tag for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    config = settings[0].config
    symbols = {tag: make(config.custom_envs[tag]).symbols() for tag in tags}
    exhibits = []
    for (model, setting), episodes in zip(product(models, settings), examples, strict=True):
        for episode in episodes:
            record = episode_record(episode, 0)
            record["title"] = f"{model}, {setting.max_turn} turns"
            kind = "solved" if episode.final.success else "not solved"
            exhibits.append(replay.view(replay.Exhibit(kind, (record,)), symbols))
    sampled = config.actor_rollout_ref.rollout.val_kwargs
    is_greedy = not (sampled.do_sample and sampled.temperature)
    page = pages.render(
        "evaluation",
        models=models,
        facts={
            "setting": settings[0].start,
            "turns": ", ".join(str(setting.max_turn) for setting in settings),
            "samples of a level": config.es_manager.val.group_size,
            "sampling": "greedy" if is_greedy else f"temperature {sampled.temperature:g}",
        },
        headings=headings(rows),
        footnote=footnote(rows),
        environments=[_environment(rows, tag) for tag in tags],
        exhibits=exhibits,
        symbol_keys=replay.symbol_keys(symbols),
        path=path,
    )
    write_whole(path.with_suffix(".md"), harmless(markdown(rows)).encode("utf-8", errors="replace"))
    write_whole(path.with_suffix(".html"), page.encode("utf-8", errors="replace"))
    return path.with_suffix(".html")


def _environment(rows: Sequence[ModelResult], tag: str) -> dict[str, Any]:
    shown = [(row, row.measured) for row in rows if row.tag == tag and row.measured is not None]
    by_turns = {row.max_turn: row for row, _ in reversed(shown)}
    turns = list(dict.fromkeys(row.max_turn for row, _ in shown))
    groups: dict[str, list[Bar]] = {}
    for row, measured in shown:
        value, low, high = measured.success
        title = f"{row.model}, {row.max_turn} turns: {success_text(row, measured.success)}"
        groups.setdefault(row.model, []).append(Bar(value, low, high, title))
    room = CHARACTERS_IN_A_CHART // max(1, min(len(groups), charts.MAX_GROUPS))
    # Of a long name the end is shown, where names of checkpoints differ.
    labels = {model: model if len(model) <= room else f"…{model[-room + 1 :]}" for model in groups}
    bars = [BarGroup(labels[model], "", bars) for model, bars in groups.items()]
    sampled = [(row, measured.pass_at) for row, measured in shown if len(measured.pass_at) > 1]
    ks = sorted({k for _, pass_at in sampled for k in pass_at})
    return {
        "tag": tag,
        "rows": table_rows(rows, tag),
        "legend": charts.legend([f"{turn} turns" for turn in turns], key="bar"),
        "charts": charts.bar_charts(bars, f"success in {tag}"),
        "reached": "; ".join(_reached(by_turns[turn]) for turn in turns),
        "ks": ks,
        "pass_at": [(row.model, row.max_turn, [rate_text(rates.get(k)) for k in ks]) for row, rates in sampled],
    }


def _reached(row: ModelResult) -> str:
    random, optimal = (
        percent(value) if isinstance(value, float) else "unknown" for value in (row.reached.random, row.reached.optimal)
    )
    return f"within {row.max_turn} turns random play {random}, optimal play {optimal}"
