"""List or compare the runs below checkpoints/, model_saving/ and models/, or below other directories.

examples:
  ragen runs
  ragen runs model_saving/kl_sweep_Qwen2.5-3B --sort success
  ragen runs --metric actor/entropy
  ragen runs --compare pocket-sokoban pocket-sokoban-2
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ragen.cli import CommandParser
from ragen.diagnose.health import title_of
from ragen.errors import ConfigError, did_you_mean, shown
from ragen.format import in_points, sparkline
from ragen.invocation_dir import caller_folder, from_caller
from ragen.report import runs as on_disk
from ragen.report.runs import ListedRun, difference, different_settings, value_text, values_of
from ragen.report.verdict import PREFIX, validation_tags
from ragen.store.find_run import ROOTS, find_runs
from ragen.terminal import Screen, shortened, table

STYLES = {"running": "cyan", "finished": "green", "interrupted": "yellow", "stopped early": "red"}
RIGHT = ("step", "success", "best", "age")
DROPPED = ("health", "estimator", "model", "env", "age", "best", "step")  # in a narrow terminal, in this order
STATUS_WIDTH, NAME_WIDTH = 13, 16  # in a narrow terminal
SPARK_WIDTH = 24


def parser() -> argparse.ArgumentParser:
    made = CommandParser("runs", __doc__)
    made.add_argument("folders", nargs="*", metavar="DIR", help="where to look for runs")
    made.add_argument("--sort", default="age", metavar="COLUMN", help="a column of the list (default age)")
    made.add_argument("--metric", metavar="NAME", help="show this metric instead of validation success")
    made.add_argument("--compare", nargs="+", metavar="RUN", help="directories or names of two or more runs")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    options, caller = parser().parse_args(arguments), caller_folder()
    folders = [from_caller(folder, caller) for folder in options.folders]
    if options.compare:
        return compare_runs(options.compare, folders, options.json, caller)
    return list_runs(folders, options.sort, options.metric, options.json)


def list_runs(folders: Sequence[str], sort: str = "age", metric: str | None = None, as_json: bool = False) -> int:
    """Print one line for each run; newest first, or sorted by a column, numbers from high to low."""
    if sort not in SORT_KEYS:
        raise ConfigError(f"--sort {shown(sort)}: must be one of {', '.join(SORT_KEYS)}{did_you_mean(sort, SORT_KEYS)}")
    runs = sorted((on_disk.read_run(*found, metric) for found in find_runs(folders)), key=SORT_KEYS[sort])
    if metric and runs and not any(run.values for run in runs):
        known = dict.fromkeys(name for run in runs for name in run.metrics.names())
        raise ConfigError(f"--metric {shown(metric)}: no run has this metric{did_you_mean(metric, known)}")
    if as_json:
        print(json.dumps([run.as_data() for run in runs], indent=1))
        return 0
    screen = Screen()
    if not runs:
        screen.print(f"no runs below {', '.join(folders) or ' or '.join(ROOTS)}", soft_wrap=True)
        return 0
    rows = [columns_of(run) for run in runs]
    headings = {key: key for key in rows[0]} | {"success": metric or "success"}
    for line in list_lines(rows, headings, screen.line_width):
        screen.print(line, soft_wrap=True)
    for problem in (f"{run.name}: {problem}" for run in runs for problem in run.problems):
        screen.print(problem, style="yellow", soft_wrap=True)
    return 0


def _descending(number: float | None) -> float:
    return math.inf if number is None else -number


SORT_KEYS: dict[str, Any] = {
    "age": lambda run: run.seconds_old,
    "name": lambda run: run.name,
    "env": lambda run: run.environments,
    "model": lambda run: run.model,
    "estimator": lambda run: run.estimator,
    "step": lambda run: _descending(run.metrics.last_step()),
    "status": lambda run: (run.status, run.rule),
    "success": lambda run: _descending(run.last.value if run.last else None),
    "best": lambda run: _descending(run.best.value if run.best else None),
    "health": lambda run: run.health,
}


def columns_of(run: ListedRun) -> dict[str, str]:
    step, best = run.metrics.last_step(), run.best
    return {
        "name": run.name,
        "env": "+".join(run.environments) or "–",
        "model": run.model or "–",
        "estimator": run.estimator or "–",
        "step": f"{'–' if step is None else step}/{'–' if run.total_steps is None else run.total_steps}",
        "status": f"{run.status}: {run.rule}" if run.rule else run.status,
        "success": value_text(run.metric, run.last),
        "best": "–" if best is None else f"{value_text(run.metric, best._replace(interval=None))} @{best.step}",
        "health": title_of(run.health),
        "age": age(run.seconds_old),
    }


def list_lines(rows: Sequence[Mapping[str, str]], headings: Mapping[str, str], width: int | None) -> list[Text]:
    """A heading and one line for each run. A line that is too long loses the rule of an early stop first."""
    lines = table(rows, headings, None, RIGHT, style=_style)
    if width is None or max(map(len, lines)) <= width:
        return lines
    rows = [
        {**row, "status": shortened(row["status"].partition(":")[0], STATUS_WIDTH)} if "status" in row else row
        for row in rows
    ]
    return table(rows, headings, width, RIGHT, DROPPED, NAME_WIDTH, _style)


def _style(column: str, text: str) -> str:
    if column == "name":
        return "bold"
    return next((style for word, style in STYLES.items() if column == "status" and text.startswith(word)), "")


def age(seconds: float) -> str:
    """40 s, 12 min, 5 h, 3 d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def compare_runs(names: Sequence[str], folders: Sequence[str] = (), as_json: bool = False, caller: str = "") -> int:
    """Print the settings that differ, and validation with the difference from the first run."""
    if len(names) < 2:
        raise ConfigError(f"--compare {' '.join(names)}: name at least two runs")
    runs = [on_disk.find_run(name, folders, caller) for name in names]
    tags = list(dict.fromkeys(tag for run in runs for tag in validation_tags(run.metrics)))
    if as_json:
        print(json.dumps(_comparison_data(runs, tags), indent=1))
        return 0
    screen, letters = Screen(), [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(runs))]
    lettered = dict(zip(letters, runs, strict=True))
    parts = [_run_lines(lettered), _settings_lines(lettered, screen.line_width)]
    for part in (*parts, *(_validation_lines(lettered, tag) for tag in tags)):
        screen.print(*part, sep="\n", soft_wrap=True)
    if not tags:
        screen.print("validation: no run was validated", soft_wrap=True)
    return 0


def _run_lines(runs: Mapping[str, ListedRun]) -> Iterator[Text]:
    for letter, run in runs.items():
        row = columns_of(run)
        status = (row["status"], _style("status", run.status))
        yield Text.assemble((f"{letter}  ", "bold"), f"{run.name}  ", status, f"  step {row['step']}")
        yield from (Text(f"   {problem}", "yellow") for problem in run.problems)


def _settings_lines(runs: Mapping[str, ListedRun], width: int | None) -> Iterator[Text]:
    settings = different_settings(list(runs.values()))
    yield Text()
    is_readable = all(run.config for run in runs.values())
    if not (is_readable and settings):
        yield Text(f"settings: {'no difference' if is_readable else 'not all of them can be read'}", "bold")
        return
    yield Text("settings that differ", "bold")
    rows = [{"name": key} | dict(zip(runs, map(shown, values), strict=True)) for key, values in settings.items()]
    lines = table(rows, {"name": "", **{letter: letter for letter in runs}}, None, style=_style)
    if width is None or max(map(len, lines)) <= width:
        yield from lines
        return
    for row in rows:
        yield Text(row["name"])
        yield from (Text(f"  {letter}  {row[letter]}") for letter in runs)


def _validation_lines(runs: Mapping[str, ListedRun], tag: str) -> Iterator[Text]:
    metric = f"{PREFIX}{tag}/success"
    series = {letter: values_of(run.metrics, metric) for letter, run in runs.items()}
    numbers = [value.value for values in series.values() for value in values]
    yield Text()
    yield Text(f"validation, {tag}", "bold")
    for letter, values in series.items():
        if not values:
            yield Text(f"{letter}  –")
            continue
        line = Text.assemble((f"{letter}  ", "bold"), value_text(metric, values[-1]))
        line.append(f" step {values[-1].step}  ", "dim")
        drawn = [value.value for value in values[-SPARK_WIDTH:]]
        yield line.append(sparkline(drawn, min(numbers), max(numbers)), "cyan")
    first, *others = runs
    for letter in others:
        if series[first] and series[letter]:
            change, problem = difference(runs[first], runs[letter], tag)
            if change is not None:
                verdict = "within noise" if change.is_noise else "more than noise"
                problem = f"{in_points(change)} points on {change.num_levels} shared levels: {verdict}"
            yield Text(f"{letter} - A  {problem}")


def _comparison_data(runs: Sequence[ListedRun], tags: Sequence[str]) -> dict[str, Any]:
    validation = {}
    for tag in tags:
        lasts = [values_of(run.metrics, f"{PREFIX}{tag}/success")[-1:] for run in runs]
        changes = [difference(runs[0], run, tag) for run in runs[1:]]
        validation[tag] = {
            "last": [values[0].as_data() if values else None for values in lasts],
            "difference_from_first": [change._asdict() if change else {"problem": why} for change, why in changes],
        }
    return {"runs": [run.as_data() for run in runs], "settings": different_settings(runs), "validation": validation}
