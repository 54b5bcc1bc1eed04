"""The comparison: one table in the terminal, as Markdown and as a page, with a plot.

    print_table(rows, console)
    write_report(path, rows, examples, settings)      # ….html and ….md beside the lines

A row is a model in an environment within a limit of turns. Differences are paired, on the levels that both have played:
of a checkpoint against what its run began from, where that plays too; of others against the first model, and for the
first model against its first limit of turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragen import __version__
from ragen.env.registry import make
from ragen.evaluate.metrics import Estimate, difference
from ragen.evaluate.run import ModelResult as Row
from ragen.evaluate.setting import Setting
from ragen.format import percent
from ragen.report.charts import Axis, Bar, BarGroup, bar_chart, escape
from ragen.report.html import WIDE, page
from ragen.report.replay import Exhibit, draw, symbol_key
from ragen.statistics import Difference
from ragen.store.episodes import episode_record
from ragen.store.fsync import write_whole
from ragen.types import Episode

DASH = "–"
COLOURS = ".bar.b0{fill:var(--s0)}.bar.b1{fill:var(--s1)}.bar.b2{fill:var(--s2)}.bar.b3{fill:var(--s3)}"
SWATCHES = "".join(f".swatch.b{index}{{background:var(--s{index})}}" for index in range(4))
CSS = f"{COLOURS}{SWATCHES}th,td.fit{{white-space:nowrap}}.card{{overflow-x:auto}}"
MISSING = (
    "Episodes that did not finish are not scored: the interval reaches from all of them lost to all of them won. "
    "Return, turns, tokens and invalid replies are those of the others alone"
)
MOST_IN_A_CHART = 8
CHARACTERS_IN_A_CHART = 100  # across


# --- cells --------------------------------------------------------------------------------------------------------


def headings(rows: Sequence[Row]) -> list[str]:
    k = _largest_k(rows)
    pass_at = [f"pass@{k}"] if k > 1 else []
    compared = ["difference"] if any(reference_of(row, rows) is not None for row in rows) else []
    return ["model", "turns", "success", *compared, *pass_at, "return", "turns used", "tokens", "invalid", "notes"]


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The texts of one row, in the order of `headings`."""
    found, columns = row.measured, headings(rows)
    texts = {"model": row.model, "turns": str(row.max_turn), "notes": "; ".join(_notes(row))}
    if found is not None:
        texts |= {
            "success": _success(row),
            "difference": _difference(row, rows),
            f"pass@{_largest_k(rows)}": _rate(found.pass_at.get(_largest_k(rows))),
            "return": _number(found.mean_return),
            "turns used": _number(found.turns),
            "tokens": _number(found.tokens, digits=0),
            "invalid": _rate(found.invalid),
        }
    return [texts.get(name, DASH) for name in columns]


def baseline_cells(name: str, rows: Sequence[Row], shown: Sequence[Row]) -> Iterator[list[str]]:
    """Random or optimal play, once for each limit of turns."""
    for max_turn in dict.fromkeys(row.max_turn for row in shown):
        reached = next(row.reached for row in shown if row.max_turn == max_turn)
        value = getattr(reached, name)
        texts = {"model": f"{name} play", "turns": str(max_turn)}
        texts["success"] = percent(value) if isinstance(value, float) else DASH
        texts["notes"] = "exact" if isinstance(value, float) else value
        if isinstance(value, float) and reached.num_levels < max(len(row.asked) for row in shown):
            texts["notes"] = f"exact, over {reached.num_levels} levels"
        yield [texts.get(column, DASH) for column in headings(rows)]


def table_rows(rows: Sequence[Row], tag: str) -> list[list[str]]:
    """All rows of one environment, between random and optimal play."""
    shown = [row for row in rows if row.tag == tag]
    return [
        *baseline_cells("random", rows, shown),
        *(cells(row, rows) for row in shown),
        *baseline_cells("optimal", rows, shown),
    ]


def reference_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that this one is compared with."""
    of_tag = [other for other in rows if other.tag == row.tag]
    first = of_tag[0]
    model = row.against or first.model
    if row.model != model:
        return next(other for other in of_tag if other.model == model and other.max_turn == row.max_turn)
    return None if row.max_turn == first.max_turn else first


def _difference(row: Row, rows: Sequence[Row]) -> str:
    reference = reference_of(row, rows)
    found = None if reference is None else difference(reference.outcomes, row.outcomes, row.asked)
    if reference is None or found is None:
        return DASH
    against = reference.model if reference.model != row.model else f"{reference.max_turn} turns"
    return f"{difference_text(found)} vs {against}"


def difference_text(found: Difference) -> str:
    points = [f"{100 * value:+.1f}" for value in (found.mean, found.low, found.high)]
    noise = ", noise" if found.is_noise else ""
    return f"{points[0]} [{points[1]}, {points[2]}]{noise}"


def _notes(row: Row) -> Iterator[str]:
    yield f"{row.measured.num_levels if row.measured else 0} levels, {len(row.outcomes)} episodes"
    if row.num_failed:
        reason = max(row.failures, key=row.failures.get)
        yield f"{row.num_failed} failed and not scored: {reason}"
    if row.num_left:
        yield f"{row.num_left} not played"
    most = _largest_k([row])
    if row.measured is not None and most not in row.measured.pass_at:
        yield f"no level has all of its {most} samples, so that there is no pass@{most}"
    yield from row.notes


def _success(row: Row) -> str:
    """With what it is the success of, where that is not everything."""
    finished = "" if row.is_whole else f", {len(row.outcomes)} of {row.num_asked} finished"
    return f"{_rate(row.measured.success)}{finished}"


def _rate(estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    if estimate.low is None:
        return percent(estimate.value)
    return f"{percent(estimate.value)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _number(estimate: Estimate | None, digits: int = 2) -> str:
    if estimate is None:
        return DASH
    if estimate.low is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def _largest_k(rows: Sequence[Row]) -> int:
    return max((max(row.asked.values(), default=1) for row in rows), default=1)


def footnote(rows: Sequence[Row]) -> str:
    """How the numbers are to be read."""
    told = "[ ]: 95 % intervals, with a level as one observation; differences in points of success, on the same levels"
    return told if all(row.is_whole for row in rows) else f"{told}. {MISSING}"


# --- terminal and Markdown ----------------------------------------------------------------------------------------


def print_table(rows: Sequence[Row], console: Console) -> None:
    """In a terminal as wide as it is; elsewhere nothing is cut."""
    for tag in dict.fromkeys(row.tag for row in rows):
        if not console.is_terminal:
            console.print(markdown_table(rows, tag), soft_wrap=True, markup=False, highlight=False)
            continue
        table = Table(title=tag, title_justify="left", box=None, header_style="dim", pad_edge=False)
        for heading in headings(rows):
            table.add_column(heading, overflow="fold")
        for texts in table_rows(rows, tag):
            table.add_row(*texts)
        console.print(table, markup=False, highlight=False)
    console.print(footnote(rows), markup=False, highlight=False, soft_wrap=not console.is_terminal)


def markdown_table(rows: Sequence[Row], tag: str) -> str:
    lines = [f"{tag}", "", f"| {' | '.join(headings(rows))} |", f"|{'---|' * len(headings(rows))}"]
    lines += [f"| {' | '.join(text.replace('|', '/') for text in texts)} |" for texts in table_rows(rows, tag)]
    return "\n".join(lines) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    parts = ["# Evaluation"] + [f"## {markdown_table(rows, tag)}" for tag in dict.fromkeys(row.tag for row in rows)]
    return "\n\n".join([*parts, footnote(rows)]) + "\n"


# --- the page -----------------------------------------------------------------------------------------------------


def write_report(
    path: Path, rows: Sequence[Row], examples: Sequence[Sequence[Episode]], settings: Sequence[Setting]
) -> Path:
    """The page and the Markdown table, beside the lines."""
    write_whole(path.with_suffix(".md"), markdown(rows).encode("utf-8", errors="replace"))
    report = path.with_suffix(".html")
    write_whole(report, render(path, rows, examples, settings).encode("utf-8", errors="replace"))
    return report


def render(path: Path, rows: Sequence[Row], examples: Sequence[Sequence[Episode]], settings: Sequence[Setting]) -> str:
    tags = list(dict.fromkeys(row.tag for row in rows))
    body = [_heading(rows, settings)]
    for tag in tags:
        body += [_table(rows, tag, named=len(tags) > 1), _plot(rows, tag), _pass_at(rows, tag)]
    body += [_examples(rows, examples, settings), f"<footer>{escape(path)} · ragen {escape(__version__)}</footer>"]
    return page("Evaluation · ragen", "".join(body), CSS)


def _heading(rows: Sequence[Row], settings: Sequence[Setting]) -> str:
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    config = settings[0].config
    sampled = config.actor_rollout_ref.rollout.val_kwargs
    how = f"temperature {sampled.temperature:g}" if sampled.do_sample and sampled.temperature else "greedy"
    facts = {
        "setting": settings[0].start,
        "turns": ", ".join(str(setting.max_turn) for setting in settings),
        "samples of a level": str(config.es_manager.val.group_size),
        "sampling": how,
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return f"<header><h1>Evaluation of {escape(models)}</h1><dl>{listed}</dl></header>"


def _table(rows: Sequence[Row], tag: str, named: bool) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in headings(rows))
    lines = []
    for texts in table_rows(rows, tag):
        *most, notes = (escape(text) for text in texts)
        lines.append(f"<tr>{''.join(f'<td class=fit>{text}</td>' for text in most)}<td>{notes}</td></tr>")
    return (
        f"<section><h2>{escape(tag) if named else 'Models'}</h2><div class='card'><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"<p class='soft small'>{escape(footnote(rows))}.</p></section>"
    )


def _plot(rows: Sequence[Row], tag: str) -> str:
    """Success of each model, one bar for each limit of turns."""
    shown = [row for row in rows if row.tag == tag and row.measured is not None]
    turns = list(dict.fromkeys(row.max_turn for row in shown))
    models = list(dict.fromkeys(row.model for row in shown))
    figures = []
    for start in range(0, len(models), MOST_IN_A_CHART):
        some = models[start : start + MOST_IN_A_CHART]
        groups = [
            BarGroup(
                _shortened(model, CHARACTERS_IN_A_CHART // len(some)),
                "",
                [_bar(row) for row in shown if row.model == model],
            )
            for model in some
        ]
        chart = bar_chart(groups, Axis(percent=True, low=0.0, high=1.0), WIDE, name=f"success in {tag}")
        figures.append(f'<figure class="card">{chart}</figure>')
    legend = "".join(f'<span><i class="swatch b{index}"></i>{turn} turns</span>' for index, turn in enumerate(turns))
    reached = "; ".join(_reached(next(row for row in shown if row.max_turn == turn)) for turn in turns)
    return (
        f"<section><h2>Success in {escape(tag)}</h2><div class='legend'>{legend}</div>{''.join(figures)}"
        f"<p class='soft small'>{escape(reached)}</p></section>"
    )


def _shortened(model: str, room: int) -> str:
    """The end of a long name, where names of checkpoints differ."""
    return model if len(model) <= room else f"…{model[-room + 1 :]}"


def _bar(row: Row) -> Bar:
    success = row.measured.success
    title = f"{row.model}, {row.max_turn} turns: {_success(row)}"
    return Bar(f"{row.max_turn}", success.value, success.low, success.high, title)


def _reached(row: Row) -> str:
    texts = [
        f"{name} play {percent(value) if isinstance(value, float) else 'unknown'}"
        for name, value in (("random", row.reached.random), ("optimal", row.reached.optimal))
    ]
    return f"within {row.max_turn} turns {texts[0]}, {texts[1]}"


def _pass_at(rows: Sequence[Row], tag: str) -> str:
    shown = [row for row in rows if row.tag == tag and row.measured is not None and len(row.measured.pass_at) > 1]
    if not shown:
        return ""
    ks = sorted({k for row in shown for k in row.measured.pass_at})
    heads = "".join(f"<th>pass@{k}</th>" for k in ks)
    lines = "".join(
        f"<tr><td>{escape(row.model)}</td><td>{row.max_turn}</td>"
        + "".join(f"<td class=fit>{escape(_rate(row.measured.pass_at.get(k)))}</td>" for k in ks)
        + "</tr>"
        for row in shown
    )
    return (
        f"<section><h2>At least one of k samples</h2><div class='card'><table><thead><tr><th>model</th><th>turns</th>"
        f"{heads}</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _examples(rows: Sequence[Row], examples: Sequence[Sequence[Episode]], settings: Sequence[Setting]) -> str:
    """Some episodes of each model, turn by turn."""
    config = settings[0].config
    envs = {tag: make(config.custom_envs[tag]) for tag in dict.fromkeys(row.tag for row in rows)}
    symbols: Mapping[str, Any] = {tag: env.symbols() for tag, env in envs.items()}
    names = [(model, setting) for model in dict.fromkeys(row.model for row in rows) for setting in settings]
    drawn = []
    for (model, setting), episodes in zip(names, examples, strict=True):
        for episode in episodes:
            record = episode_record(episode, 0, lambda tag, state: envs[tag].render(state))
            record["title"] = f"{model}, {setting.max_turn} turns"
            kind = "solved" if episode.final.success else "not solved"
            drawn.append(draw(Exhibit(kind, (record,)), symbols))
    if not drawn:
        return ""
    key = " ".join(f"<p class='soft small'>{symbol_key(found)}</p>" for found in symbols.values() if found)
    return f"<section><h2>Episodes</h2>{key}{''.join(drawn)}</section>"
