"""The runs on disk: find them, read what each one says about itself, and compare two level by level.

    runs = [read_run(name, folder) for name, folder in find_runs(["checkpoints"])]     # of store.find_run
    runs[0].status, runs[0].last             # "finished", Value(step=100, value=0.6, interval=Interval(…))
    difference(runs[0], runs[1], "SimpleSokoban")      # the paired change on the levels that both validated on

A broken or half-written folder is read as far as possible, with a list of its problems. A run without a record of its
end is running if its owner lives, finished if it has used up its budget, and interrupted otherwise.
"""

import math
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ragen.config.identity_keys import WHERE, changes_only
from ragen.config.tree import leaves
from ragen.format import percent, short
from ragen.report.settings import not_default
from ragen.report.verdict import PREFIX, early_stop, first_and_last_episodes, validation_tags, verdict
from ragen.statistics import Difference, Interval, paired_difference
from ragen.store.episodes import read_episodes
from ragen.store.find_run import named_run
from ragen.store.reading import Unreadable
from ragen.store.run_folder import Metrics, RunFolder


class Value(NamedTuple):
    """A metric at a step."""

    step: int
    value: float
    interval: Interval | None = None

    def as_data(self) -> dict[str, Any]:
        known = self.interval if self.interval and all(map(math.isfinite, self.interval)) else None
        return {"step": self.step, "value": self.value, "interval": known and list(known)}


@dataclass(frozen=True)
class ListedRun:
    """What a run folder says about its run."""

    name: str
    folder: RunFolder
    config: dict[str, Any]  # flat, dotted keys; empty if unreadable
    metrics: Metrics
    status: str  # running, running on HOST, finished, stopped early or interrupted
    rule: str  # of an early stop
    metric: str  # the one that the list shows
    seconds_old: float  # since the last write
    problems: tuple[str, ...]

    @property
    def environments(self) -> list[str]:
        tags = self.config.get("es_manager.val.env_configs.tags")
        return list(map(str, tags)) if isinstance(tags, list) else []

    @property
    def model(self) -> str:
        return str(self.config.get("model_path", "")).rstrip("/").rpartition("/")[2]

    @property
    def estimator(self) -> str:
        """Of advantages; `sft` for fine-tuning, which has none."""
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

    @property
    def best(self) -> Value | None:
        """The highest value, and the earliest of those."""
        return max(self.values, key=lambda value: value.value, default=None)

    @cached_property
    def health(self) -> str:
        """The verdict in a word: `healthy`, `no_gain`, … (`health.WORDS`), or the name of the most serious warning."""
        ended = {"status": "early_stopped", "rule": self.rule} if self.rule else {}
        word = verdict(self.metrics, finished=ended).health.word
        if word != "no_gain":
            return word
        # Level by level a smaller gain is visible. Reading all episodes takes a while, so only where it matters.
        return verdict(self.metrics, *first_and_last_episodes(self.folder, []), ended).health.word

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "environments": self.environments,
            "model": self.config.get("model_path"),
            "estimator": self.estimator or None,
            "step": self.metrics.last_step(),
            "total_steps": self.total_steps,
            "status": self.status,
            "rule": self.rule or None,
            "health": self.health,
            "metric": self.metric or None,
            "last": self.last and self.last.as_data(),
            "best": self.best and self.best.as_data(),
            "seconds_old": round(self.seconds_old, 1),
            "problems": list(self.problems),
        }


def find_run(name: str, folders: Sequence[str] = (), caller: str = "") -> ListedRun:
    """A run by its folder, its name, or the end of its name; raises if there is none."""
    return read_run(*named_run(name, folders, caller))


def read_run(name: str, folder: RunFolder, metric: str | None = None) -> ListedRun:
    """Read what is readable. `metric` is the one to list, by default the success of the first validated tag."""
    problems: list[str] = []

    def tried(read: Callable[[], Any], otherwise: Any, path: Path) -> Any:
        try:
            return read()
        except Unreadable as error:
            problems.append(f"{path.name} cannot be read ({error.why})")
            return otherwise

    config = tried(lambda: leaves(folder.read_config()), {}, folder.config_path)
    metrics = tried(folder.read_metrics, Metrics(), folder.metrics_path)
    finished = tried(folder.read_finished, None, folder.finished_path) or {}
    if not config and not problems:
        problems.append(f"{folder.config_path.name} is missing or empty")
    if finished and not metrics.rows and not problems:
        problems.append(f"{folder.metrics_path.name} is missing or empty")
    if finished.get("status") == "unknown":
        problems.append(f"{folder.finished_path.name} cannot be read")
    # After its last step fine-tuning still has to merge and validate the model.
    total = None if _is_tuning(config) else config.get("trainer.total_training_steps")
    status, rule = status_of(folder, metrics, finished, total)
    if not status.startswith("running"):
        problems += metrics.notes  # a line that is being written looks torn
    tags = validation_tags(metrics)
    metric = metric or (f"{PREFIX}{tags[0]}/success" if tags else "")
    seconds_old = max(0.0, time.time() - _last_written(folder))
    return ListedRun(name, folder, config, metrics, status, rule, metric, seconds_old, tuple(problems))


def _is_tuning(config: Mapping[str, Any]) -> bool:
    return config.get("rl_or_sft") == "sft"


def status_of(
    folder: RunFolder, metrics: Metrics, finished: Mapping[str, Any] | None, total: Any = None
) -> tuple[str, str]:
    """The status, and the rule that stopped the run."""
    try:
        owner = folder.live_owner()
    except OSError:  # another user's
        owner = None
    if owner is not None:  # process 4711 on HOST
        host = re.search(r" on (\S+)", owner)
        return "running" if host is None or host[1] == socket.gethostname() else f"running on {host[1]}", ""
    stop = early_stop(metrics, finished)
    if stop is not None:
        return "stopped early", stop.rule
    last = metrics.last_step()
    used_up = isinstance(total, int) and last is not None and last >= total
    return "finished" if used_up or (finished or {}).get("status") == "finished" else "interrupted", ""


def _last_written(folder: RunFolder) -> float:
    for path in (folder.metrics_path, folder.config_path, folder.path):
        with suppress(OSError):
            return path.stat().st_mtime
    return time.time()


def values_of(metrics: Metrics, metric: str) -> list[Value]:
    """A metric where it is finite, with its interval where one was stored."""
    low, high = (dict(metrics.series(f"{metric}_{end}")) for end in ("low", "high"))
    return [
        Value(step, value, Interval(low[step], high[step]) if step in low and step in high else None)
        for step, value in metrics.series(metric)
        if math.isfinite(value)
    ]


def value_text(metric: str, value: Value | None) -> str:
    if value is not None and metric.endswith("success"):
        return percent(value.value, value.interval)
    return short(value and value.value)


def different_settings(runs: Sequence[ListedRun]) -> dict[str, list[Any]]:
    """The settings in which runs differ, without names, paths, devices and keys that have no effect."""
    changed = dict.fromkeys(key for run in runs for key, _, _ in not_default(run.config))
    keys = [key for key in changed if changes_only(key) not in WHERE]
    found = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def difference(first: ListedRun, second: ListedRun, tag: str) -> tuple[Difference | None, str]:
    """How much more often the second succeeds at the last validation, level by level; or why that is unknown."""
    before, after, problem = paired_outcomes(first, second, tag)
    return (None, problem) if problem else (paired_difference(before, after), "")


def paired_outcomes(first: ListedRun, second: ListedRun, tag: str) -> tuple[list[bool], list[bool], str]:
    """Whether each succeeded, at its last validation, on the levels that both played; or why there are no pairs.

    Levels are the same if seed and first observation are: with other settings a seed gives another level.
    """
    played = []
    for run in (first, second):
        episodes, problem = _last_episodes(run, tag)
        if problem:
            return [], [], problem
        by_level = {(item["seed"], _first_state(item)): bool(item["success"]) for item in episodes}
        if len(by_level) < len(episodes):
            return [], [], f"{run.name} played levels more than once: no pairs"
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
    except Unreadable as error:
        return [], f"{files[0].path.name} of {run.name} cannot be read ({error.why})"
    return [item for item in episodes if item["tag"] == tag], ""


def _first_state(episode: Mapping[str, Any]) -> str:
    return episode["turns"][0]["state_text"] if episode["turns"] else ""
