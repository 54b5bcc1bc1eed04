"""`ragen runs`: the runs on disk, listed and compared in the terminal.

    runs = [read_run(name, folder) for name, folder in find_runs([Path("checkpoints")])]
    runs[0].status, runs[0].last             # "finished", Value(step=100, value=0.6, interval=Interval(…))
    difference(runs[0], runs[1], "SimpleSokoban")      # the paired change on the levels that both validated on

A folder that is broken or half written is listed with what can be read of it, and with what is wrong. A run without a
record of its end is running if its owner lives, finished if it has used up its budget, and interrupted otherwise.
"""

import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.text import Text

from ragen.config.tree import leaves
from ragen.diagnose.checks import CHECKS
from ragen.diagnose.health import Health
from ragen.errors import ConfigError, did_you_mean, shown
from ragen.format import percent, short, sparkline
from ragen.report.settings import not_default
from ragen.report.verdict import PREFIX, early_stop, validation_tags
from ragen.statistics import Difference, Interval, paired_difference
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import Metrics, RunFolder
from ragen.terminal import Screen

# Where runs, sweeps and fine-tuning (models/sft/…/lora_weights) write unless told otherwise.
ROOTS = ("checkpoints", "model_saving", "models")
SKIPPED = ("episodes", "tensorboard", "wandb")  # below a run, and large
SPARK_WIDTH = 24
# What a run is called and where it happens, not what it does.
IDENTITY = (
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "system.CUDA_VISIBLE_DEVICES",
)
STYLES = {"running": "cyan", "finished": "green", "interrupted": "yellow", "stopped early": "red"}


class Value(NamedTuple):
    """A metric at a step."""

    step: int
    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class ListedRun:
    """What a run folder says about its run."""

    name: str
    folder: RunFolder
    config: dict[str, Any]  # flat, dotted keys; empty where it cannot be read
    metrics: Metrics
    status: str  # running, finished, stopped early or interrupted
    rule: str  # of an early stop
    metric: str  # the one that the list shows
    seconds_old: float  # since the last sign of life
    problems: tuple[str, ...]

    @property
    def environments(self) -> list[str]:
        tags = self.config.get("es_manager.val.env_configs.tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def model(self) -> str:
        return str(self.config.get("model_path", "")).rstrip("/").rpartition("/")[2]

    @property
    def estimator(self) -> str:
        """Of advantages; fine-tuning has none."""
        return "sft" if _is_tuning(self.config) else str(self.config.get("algorithm.adv_estimator", ""))

    @property
    def total_steps(self) -> int | None:
        total = self.config.get("trainer.total_training_steps")
        return total if isinstance(total, int) else None

    @cached_property
    def values(self) -> list[Value]:
        return values_of(self.metrics, self.metric)

    @property
    def last(self) -> Value | None:
        return self.values[-1] if self.values else None

    @cached_property
    def health(self) -> str:
        """healthy, unknown, or the name of the gravest warning that holds."""
        return Health.of(self.metrics.rows).verdict().word

    @property
    def best(self) -> Value | None:
        """The highest, and the earliest of those."""
        return max(self.values, key=lambda value: value.value, default=None)


# --- reading ------------------------------------------------------------------------------------------------------


def find_runs(roots: Sequence[Path]) -> list[tuple[str, RunFolder]]:
    """Every run folder at or below the roots, and its name: the path below its root."""
    found: dict[Path, tuple[str, RunFolder]] = {}
    for root in roots:
        for place, folders, files in os.walk(root):
            folders[:] = sorted(
                name for name in folders if name not in SKIPPED and not name.startswith((".", "global_step_"))
            )
            path = Path(place)
            if _is_run(files):
                name = path.relative_to(root).as_posix() if path != root else path.resolve().name
                found.setdefault(path.resolve(), (name, RunFolder(path)))
    return list(found.values())


def _is_run(files: Sequence[str]) -> bool:
    """Metrics make a run; one that has just begun has a config and an owner."""
    folder = RunFolder("")
    return folder.metrics_path.name in files or {folder.config_path.name, folder.owner_path.name} <= set(files)


def read_run(name: str, folder: RunFolder, metric: str | None = None) -> ListedRun:
    """All that can be read. `metric` is what the list shows; by default the success of the first validated tag."""
    problems: list[str] = []
    config = _tried(lambda: leaves(folder.read_config()), {}, folder.config_path, problems)
    metrics = _tried(folder.read_metrics, Metrics(), folder.metrics_path, problems)
    finished = _tried(folder.read_finished, None, folder.finished_path, problems)
    if not config and not problems:
        problems.append(f"{folder.config_path.name} is missing or empty")
    if (finished or {}).get("status") == "unknown":
        problems.append(f"{folder.finished_path.name} cannot be read")
    # Fine-tuning still has a model to merge and to validate when its steps are done.
    total = None if _is_tuning(config) else config.get("trainer.total_training_steps")
    status, rule = status_of(folder, metrics, finished, total)
    if not status.startswith("running"):
        problems += metrics.notes  # while a line is being written, it looks torn
    tags = validation_tags(metrics)
    return ListedRun(
        name=name,
        folder=folder,
        config=config,
        metrics=metrics,
        status=status,
        rule=rule,
        metric=metric or (f"{PREFIX}{tags[0]}/success" if tags else ""),
        seconds_old=max(0.0, time.time() - _last_written(folder)),
        problems=tuple(problems),
    )


def _is_tuning(config: Mapping[str, Any]) -> bool:
    return config.get("rl_or_sft") == "sft"


def _tried(read: Callable[[], Any], otherwise: Any, path: Path, problems: list[str]) -> Any:
    try:
        return read()
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read ({' '.join(str(error).split())[:120]})")
        return otherwise


def status_of(
    folder: RunFolder, metrics: Metrics, finished: Mapping[str, Any] | None, total: Any = None
) -> tuple[str, str]:
    """In one or two words, and the rule that stopped the run."""
    owner = _owner(folder)
    if owner is not None:
        return "running" if owner["host"] == socket.gethostname() else f"running on {owner['host']}", ""
    stop = early_stop(metrics, finished)
    if stop is not None:
        return "stopped early", stop.rule
    last = metrics.last_step()
    used_up = isinstance(total, int) and last is not None and last >= total
    return "finished" if used_up or (finished or {}).get("status") == "finished" else "interrupted", ""


def _owner(folder: RunFolder) -> dict[str, Any] | None:
    try:
        return folder.live_owner()
    except (OSError, ValueError, TypeError):  # none, or not one of ours
        return None


def _last_written(folder: RunFolder) -> float:
    for path in (folder.metrics_path, folder.config_path, folder.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return time.time()


def values_of(metrics: Metrics, metric: str) -> list[Value]:
    """A metric where it is finite, with its interval where one was stored."""
    low, high = (dict(metrics.series(f"{metric}_{end}")) for end in ("low", "high"))
    found = []
    for step, value in metrics.series(metric):
        if math.isfinite(value):
            known = step in low and step in high
            found.append(Value(step, value, Interval(low[step], high[step]) if known else None))
    return found


# --- comparing ----------------------------------------------------------------------------------------------------


def different_settings(runs: Sequence[ListedRun]) -> dict[str, list[Any]]:
    """The settings in which runs differ, leaving aside names, places, devices and keys without effect."""
    keys = dict.fromkeys(key for run in runs for key, _, _ in not_default(run.config))
    found = {}
    for key in keys:
        values = [run.config.get(key) for run in runs]
        if key not in IDENTITY and any(value != values[0] for value in values[1:]):
            found[key] = values
    return found


def difference(first: ListedRun, second: ListedRun, tag: str) -> tuple[Difference | None, str]:
    """How much more often the second succeeds at the last validation, level by level; or why that is unknown."""
    before, after, problem = paired_outcomes(first, second, tag)
    return (None, problem) if problem else (paired_difference(before, after), "")


def paired_outcomes(first: ListedRun, second: ListedRun, tag: str) -> tuple[list[bool], list[bool], str]:
    """Whether each succeeded, at its last validation, on the levels that both played; or why there are no pairs.

    Levels are the same where seed and first observation are: the same seed under other settings is another level.
    """
    played = []
    for run in (first, second):
        episodes, problem = _last_episodes(run, tag)
        if problem:
            return [], [], problem
        by_level = {(item["seed"], _first_state(item)): bool(item["success"]) for item in episodes}
        if len(by_level) < len(episodes):
            return [], [], f"{run.name} played levels more than once, which makes no pairs"
        played.append(by_level)
    levels = sorted(played[0].keys() & played[1].keys())
    if not levels:
        return [], [], "no level was played by both"
    return [played[0][level] for level in levels], [played[1][level] for level in levels], ""


def _last_episodes(run: ListedRun, tag: str) -> tuple[list[dict[str, Any]], str]:
    values = values_of(run.metrics, f"{PREFIX}{tag}/success")
    files = [file for file in run.folder.episode_files("val") if values and file.step == values[-1].step]
    if not files:
        return [], f"{run.name} has no stored episodes of its last validation"
    try:
        episodes = read_episodes(files[0].path)
    except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
        return [], f"{files[0].path.name} of {run.name} cannot be read ({error})"
    return [item for item in episodes if item["tag"] == tag], ""


def _first_state(episode: Mapping[str, Any]) -> str:
    return episode["turns"][0]["state_text"] if episode["turns"] else ""


# --- words --------------------------------------------------------------------------------------------------------


def value_text(metric: str, value: Value | None) -> str:
    if value is None:
        return "–"
    if not _is_rate(metric):
        return short(value.value)
    if value.interval is None:
        return percent(value.value)
    return f"{percent(value.value)} [{100 * value.interval.low:.1f}, {100 * value.interval.high:.1f}]"


def _is_rate(metric: str) -> bool:
    return metric.endswith("success")


def age(seconds: float) -> str:
    """40 s, 12 min, 5 h, 3 d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def row_of(run: ListedRun) -> dict[str, str]:
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
        "health": CHECKS[run.health].title if run.health in CHECKS else {"unknown": "–"}.get(run.health, run.health),
        "age": age(run.seconds_old),
    }


RIGHT = ("step", "success", "best", "age")
DROPPED = ("health", "estimator", "model", "env", "age", "best", "step")  # in a narrow terminal, in this order
STATUS_ROOM, NAME_ROOM = 13, 8


def table(rows: Sequence[Mapping[str, str]], headings: Mapping[str, str], width: int | None) -> list[Text]:
    """A heading and a line for each row. `headings`: column -> what stands above it. None: as wide as it gets."""
    columns = list(headings)
    widths = {key: max(len(headings[key]), *(len(row[key]) for row in rows)) for key in columns}

    def excess() -> int:
        return 0 if width is None else sum(widths[key] + 2 for key in columns) - 2 - width

    if "status" in columns and excess() > 0:
        widths["status"] = min(widths["status"], STATUS_ROOM)
    for key in DROPPED:
        if key in columns and excess() > max(0, widths["name"] - 2 * NAME_ROOM):
            columns.remove(key)
    widths["name"] -= min(max(0, excess()), max(0, widths["name"] - NAME_ROOM))
    return [_table_line(row, columns, widths, is_heading=row is headings) for row in (headings, *rows)]


def _table_line(
    row: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], is_heading: bool = False
) -> Text:
    line = Text(style="dim" if is_heading else "")
    for key in columns:
        text, room = row[key], widths[key]
        if key == "status" and len(text) > room:
            text = text.partition(":")[0]  # the rule goes first
        text = _cut(text, room)
        cell = text.rjust(room) if key in RIGHT else text.ljust(room)
        line.append("  " if line else "").append(cell, _style(key, row[key]) if not is_heading else "")
    line.rstrip()
    return line


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _style(column: str, text: str) -> str:
    if column == "name":
        return "bold"
    return next((style for word, style in STYLES.items() if column == "status" and text.startswith(word)), "")


# --- the commands -------------------------------------------------------------------------------------------------

Sort = Callable[[ListedRun], Any]


def _down(number: float | None) -> float:
    return math.inf if number is None else -number


SORTS: dict[str, Sort] = {
    "age": lambda run: run.seconds_old,
    "name": lambda run: run.name,
    "env": lambda run: run.environments,
    "model": lambda run: run.model,
    "estimator": lambda run: run.estimator,
    "step": lambda run: _down(run.metrics.last_step()),
    "status": lambda run: (run.status, run.rule),
    "success": lambda run: _down(run.last.value if run.last else None),
    "best": lambda run: _down(run.best.value if run.best else None),
    "health": lambda run: run.health,
}


def list_runs(folders: Sequence[str], sort: str = "age", metric: str | None = None, as_json: bool = False) -> int:
    """`ragen runs`: a line for each run; newest first, or sorted by a column, numbers from high to low."""
    if sort not in SORTS:
        raise ConfigError(f"--sort {shown(sort)}: must be one of {', '.join(SORTS)}{did_you_mean(sort, SORTS)}")
    roots = _roots(folders)
    runs = sorted((read_run(name, folder, metric) for name, folder in find_runs(roots)), key=SORTS[sort])
    if metric and runs and not any(run.values for run in runs):
        known = dict.fromkeys(name for run in runs for name in run.metrics.names())
        raise ConfigError(f"--metric {shown(metric)}: no run has measured it{did_you_mean(metric, known)}")
    if as_json:
        print(json.dumps([as_data(run) for run in runs], indent=1))
        return 0
    screen = Screen()
    if not runs:
        screen.print(f"no runs below {', '.join(map(str, roots)) or ' or '.join(ROOTS)}", soft_wrap=True)
        return 0
    _print_list(screen, runs, metric)
    return 0


def _print_list(screen: Screen, runs: Sequence[ListedRun], metric: str | None) -> None:
    headings = {key: key for key in row_of(runs[0])} | {"success": metric or "success"}
    for line in table([row_of(run) for run in runs], headings, _width(screen)):
        screen.print(line, soft_wrap=True)
    for run in runs:
        for problem in run.problems:
            screen.print(Text(f"{run.name}: {problem}", "yellow"), soft_wrap=True)


def compare_runs(words: Sequence[str], folders: Sequence[str] = (), as_json: bool = False, caller: str = "") -> int:
    """`ragen runs --compare A B`: settings that differ, and validation with the difference from the first."""
    if len(words) < 2:
        raise ConfigError(f"--compare {' '.join(words)}: name at least two runs")
    runs = [_named_run(word, folders, caller) for word in words]
    tags = list(dict.fromkeys(tag for run in runs for tag in validation_tags(run.metrics)))
    if as_json:
        print(json.dumps(comparison_data(runs, tags), indent=1))
        return 0
    screen = Screen()
    for part in (_who(runs), _settings_lines(runs, _width(screen)), *(_validation_lines(runs, tag) for tag in tags)):
        for line in part:
            screen.print(line, soft_wrap=True)
    if not tags:
        screen.print("validation: none of them was validated", soft_wrap=True)
    return 0


def _named_run(word: str, folders: Sequence[str], caller: str) -> ListedRun:
    """A run by its folder, or by its name or the end of it."""
    for path in (Path(caller, word), Path(word)):
        if path.is_dir() and _is_run(os.listdir(path)):
            return read_run(word.rstrip("/"), RunFolder(path))
    known = dict(find_runs(_roots(folders)))
    fits = [name for name in known if name == word] or [name for name in known if name.endswith(f"/{word}")]
    if len(fits) > 1:
        raise ConfigError(f"run {shown(word)}: there are several, {', '.join(fits)}")
    if not fits:
        raise ConfigError(f"run {shown(word)}: no such run or run folder{did_you_mean(word, known)}")
    return read_run(fits[0], known[fits[0]])


def _roots(folders: Sequence[str]) -> list[Path]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{shown(folder)}: no such folder")
    return [Path(folder) for folder in folders or ROOTS if Path(folder).is_dir()]


def _width(screen: Screen) -> int | None:
    """In a pipe lines are as long as they are, unless COLUMNS says otherwise."""
    return screen.width if screen.is_terminal or os.environ.get("COLUMNS") else None


def _letters(runs: Sequence[ListedRun]) -> list[str]:
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(runs))]


def _who(runs: Sequence[ListedRun]) -> Iterator[Text]:
    for letter, run in zip(_letters(runs), runs, strict=True):
        row = row_of(run)
        yield Text.assemble((f"{letter}  ", "bold"), f"{run.name}  ", (row["status"], _style("status", run.status)),
                            f"  step {row['step']}")  # fmt: skip
        for problem in run.problems:
            yield Text(f"   {problem}", "yellow")


def _settings_lines(runs: Sequence[ListedRun], width: int | None) -> Iterator[Text]:
    letters, settings = _letters(runs), different_settings(runs)
    yield Text()
    if not all(run.config for run in runs):
        yield Text("settings: not all of them can be read", "bold")
        return
    if not settings:
        yield Text("settings: no difference", "bold")
        return
    yield Text("settings that differ", "bold")
    rows = [{"name": key} | dict(zip(letters, map(shown, values), strict=True)) for key, values in settings.items()]
    lines = table(rows, {"name": "", **{letter: letter for letter in letters}}, None)
    if width is None or max(map(len, lines)) <= width:
        yield from lines
        return
    for row in rows:
        yield Text(row["name"])
        yield from (Text(f"  {letter}  {row[letter]}") for letter in letters)


def _validation_lines(runs: Sequence[ListedRun], tag: str) -> Iterator[Text]:
    metric = f"{PREFIX}{tag}/success"
    series = [values_of(run.metrics, metric) for run in runs]
    everything = [value.value for values in series for value in values]
    letters = _letters(runs)
    yield Text()
    yield Text(f"validation, {tag}", "bold")
    for letter, values in zip(letters, series, strict=True):
        if not values:
            yield Text(f"{letter}  –")
            continue
        line = Text.assemble((f"{letter}  ", "bold"), value_text(metric, values[-1]))
        line.append(f" step {values[-1].step}  ", "dim")
        drawn = [value.value for value in values[-SPARK_WIDTH:]]
        yield line.append(sparkline(drawn, min(everything), max(everything)), "cyan")
    for letter, run, values in zip(letters[1:], runs[1:], series[1:], strict=True):
        if not series[0] or not values:
            continue
        change, problem = difference(runs[0], run, tag)
        yield Text(f"{letter} - A  {_change_text(change) if change else problem}")


def _change_text(change: Difference) -> str:
    span = f"{100 * change.mean:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    words = "within noise" if change.is_noise else "more than noise"
    return f"{span} on {change.num_levels} shared levels: {words}"


# --- data ---------------------------------------------------------------------------------------------------------


def as_data(run: ListedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "environments": run.environments,
        "model": run.config.get("model_path"),
        "estimator": run.estimator or None,
        "step": run.metrics.last_step(),
        "total_steps": run.total_steps,
        "status": run.status,
        "rule": run.rule or None,
        "health": run.health,
        "metric": run.metric or None,
        "last": _value_data(run.last),
        "best": _value_data(run.best),
        "seconds_old": round(run.seconds_old, 1),
        "problems": list(run.problems),
    }


def _value_data(value: Value | None) -> dict[str, Any] | None:
    if value is None:
        return None
    known = value.interval is not None and all(map(math.isfinite, value.interval))
    return {"step": value.step, "value": value.value, "interval": list(value.interval) if known else None}


def comparison_data(runs: Sequence[ListedRun], tags: Sequence[str]) -> dict[str, Any]:
    return {
        "runs": [as_data(run) for run in runs],
        "settings": different_settings(runs),
        "validation": {tag: _tag_data(runs, tag) for tag in tags},
    }


def _tag_data(runs: Sequence[ListedRun], tag: str) -> dict[str, Any]:
    lasts = [values_of(run.metrics, f"{PREFIX}{tag}/success")[-1:] for run in runs]
    changes = [difference(runs[0], run, tag) for run in runs[1:]]
    return {
        "last": [_value_data(values[0]) if values else None for values in lasts],
        "difference_from_first": [change._asdict() if change else {"problem": why} for change, why in changes],
    }
