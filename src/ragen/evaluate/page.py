"""The page of an evaluation: its tables, success as bars, pass@k, and some episodes turn by turn.

    write_report(path, rows, examples, settings)      # ….html and ….md beside the lines

`templates/evaluation.html.jinja` lays it out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen.env.registry import make
from ragen.evaluate.run import ModelResult
from ragen.evaluate.setting import Setting
from ragen.evaluate.table import footnote, headings, markdown, rate_text, success_text, table_rows
from ragen.format import percent
from ragen.report import charts, pages, replay
from ragen.report.charts import Bar, BarGroup
from ragen.store.episodes import episode_record
from ragen.store.fsync import write_whole
from ragen.types import Episode

CHARACTERS_IN_A_CHART = 100  # across


def write_report(
    path: Path, rows: Sequence[ModelResult], examples: Sequence[Sequence[Episode]], settings: Sequence[Setting]
) -> Path:
    """Write the page and the Markdown table beside the lines, and return the path of the page."""
    tags = list(dict.fromkeys(row.tag for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    config = settings[0].config
    envs = {tag: make(config.custom_envs[tag]) for tag in tags}
    symbols = {tag: env.symbols() for tag, env in envs.items()}
    exhibits = []
    for (model, setting), episodes in zip([(m, s) for m in models for s in settings], examples, strict=True):
        for episode in episodes:
            record = episode_record(episode, 0, lambda tag, state: envs[tag].render(state))
            record["title"] = f"{model}, {setting.max_turn} turns"
            kind = "solved" if episode.final.success else "not solved"
            exhibits.append(replay.view(replay.Exhibit(kind, (record,)), symbols))
    sampled = config.actor_rollout_ref.rollout.val_kwargs
    page = pages.render(
        "evaluation",
        models=models,
        facts={
            "setting": settings[0].start,
            "turns": ", ".join(str(setting.max_turn) for setting in settings),
            "samples of a level": config.es_manager.val.group_size,
            "sampling": f"temperature {sampled.temperature:g}"
            if sampled.do_sample and sampled.temperature
            else "greedy",
        },
        headings=headings(rows),
        footnote=footnote(rows),
        environments=[_environment(rows, tag) for tag in tags],
        exhibits=exhibits,
        symbol_keys=replay.symbol_keys(symbols),
        path=path,
    )
    write_whole(path.with_suffix(".md"), markdown(rows).encode("utf-8", errors="replace"))
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
    bars = [BarGroup(_shortened(model, room), "", bars) for model, bars in groups.items()]
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


def _shortened(model: str, room: int) -> str:
    """The end of a long name, where names of checkpoints differ."""
    return model if len(model) <= room else f"…{model[-room + 1 :]}"


def _reached(row: ModelResult) -> str:
    random, optimal = (
        percent(value) if isinstance(value, float) else "unknown" for value in (row.reached.random, row.reached.optimal)
    )
    return f"within {row.max_turn} turns random play {random}, optimal play {optimal}"
