"""What an experiment leaves behind: a result file for each run, one summary log, and a record of its cells.

    log = SummaryLog(plan.summary_path)
    with log.shared(is_fresh=True):                    # an older summary becomes .log.1, unless somebody writes to it
        log.append([result_line(plan, cell, values)])
    latest = latest_lines(plan.cells, plan.summary_fields, log.text())     # cell name -> its last line
    closing_block(plan, latest)

    kl=0.001 | filter=nofilter | include_zero=True | train_time=41.20s | … | gpu=1xH100 | status=success

A line has the documented fields in the documented order; the value of `name` stands bare. `status` is `success`,
`fail` or `early_stopped:<rule>`. The last line of a cell is the one that counts: a run that failed and was run again
counts once. The summary log alone decides what a resumed experiment skips, so a line that is deleted by hand makes its
cell run again.

The record is the summary's neighbour `.json`: what every cell was told to run, for resuming and for the report.
"""

import fcntl
import json
import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError
from ragen.experiment.cell import Cell, Plan
from ragen.report.runs import IDENTITY
from ragen.store.fsync import write_whole
from ragen.store.resume import ASIDE, BUDGET
from ragen.store.run_folder import RunFolder

SEPARATOR = " | "
TIMES = {
    "train_time": "timing_s/train_total",
    "eval_time": "timing_s/eval_total",
    "total_time": "timing_s/total",
    "collapse_time": "timing_s/collapse_total",
    "collapse_first_time": "timing_s/collapse_first_turn_total",
    "collapse_multi_time": "timing_s/collapse_multi_turn_total",
}
KNOWN_AFTERWARDS = (*TIMES, "wall_time", "gpu", "status")
MISSING = "missing"
FOLDER_LINE = b"run folder: "  # the first line that a run prints begins so
ERROR_LINES, ERROR_WIDTH = 2, 300
# What may differ between two parts of one experiment without making their numbers differ.
NO_MATTER = (*(key for key in ASIDE if key != BUDGET), *IDENTITY, "trainer.save_freq")
NO_MATTER_IN = ("micro_batch_size", "gpu_memory_utilization")


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: str
    error: str = ""
    wall_seconds: float = 0.0
    gpu: str = ""
    times: Mapping[str, float] = field(default_factory=dict)  # by field name; what is not there was not measured

    def values(self) -> dict[str, str]:
        """The fields of its line."""
        times = {name: f"{self.times[name]:.2f}s" if name in self.times else "N/A" for name in TIMES}
        return times | {"wall_time": f"{int(self.wall_seconds)}s", "gpu": self.gpu, "status": self.status}


# --- one run ------------------------------------------------------------------------------------------------------


def judge(cell: Cell, ended: Mapping[str, Any], gpu: str, log_offset: int = 0) -> Result:
    """The result of a run from its exit status, its log and its folder. `log_offset`: where this try's log begins."""
    if "error" in ended:
        return Result("fail", str(ended["error"]), gpu=gpu)
    folder = RunFolder(run_folder(cell.log_path, log_offset) or cell.checkpoint_dir)
    status, error = _judged(ended["status"], folder, cell.log_path, log_offset)
    return Result(status, error, ended["ended"] - ended["started"], gpu, measured_times(folder))


def _judged(code: int, folder: RunFolder, log: Path, offset: int) -> tuple[str, str]:
    if code == 0:
        return "success", ""
    if code == 3:
        return f"early_stopped:{(folder.read_finished() or {}).get('rule') or 'unknown'}", ""
    how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    said = last_lines(log, offset)
    return "fail", f"{how}: {said}" if said else how


def measured_times(folder: RunFolder) -> dict[str, float]:
    """Seconds by field name, from the run's own metrics."""
    found = {}
    metrics = folder.read_metrics()
    for name, key in TIMES.items():
        values = [value for _, value in metrics.series(key) if math.isfinite(value)]
        if values:
            found[name] = values[-1]
    return found


def run_folder(log: Path, offset: int = 0) -> Path | None:
    """The folder that a run says it writes to, which may be a numbered sibling of the planned one."""
    return said_path(log, FOLDER_LINE, offset)


def said_path(log: Path, opening: bytes, offset: int = 0) -> Path | None:
    """The path in the last line of a log that begins so."""
    found = None
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            for line in file:
                if line.startswith(opening) and line.endswith(b"\n"):
                    found = Path(os.fsdecode(line.removeprefix(opening).rstrip()))
    except FileNotFoundError:
        return None
    return found


def last_lines(log: Path, offset: int = 0) -> str:
    """The last words of a run, on one line."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    words = [" ".join(line.split()) for line in lines]
    words = [line if len(line) <= ERROR_WIDTH else f"{line[: ERROR_WIDTH - 1]}…" for line in words if line]
    return " / ".join(words[-ERROR_LINES:])


# --- lines --------------------------------------------------------------------------------------------------------


def result_line(fields: Sequence[str], cell: Cell, values: Mapping[str, str]) -> str:
    """The summary line of a cell. A field that is named twice takes the cell's values for it in order."""
    known = defaultdict(deque)
    for name, value in (("name", cell.name), *cell.fields):
        known[name].append(value)
    if ("name", cell.name) in cell.fields:
        known["name"].popleft()
    parts = []
    for name in fields:
        value = known[name].popleft() if known[name] else values.get(name)
        if value is not None:
            parts.append(value if name == "name" else f"{name}={value}")
    return SEPARATOR.join(parts)


def missing_line(fields: Sequence[str], cell: Cell) -> str:
    return result_line(fields, cell, {"status": MISSING})


def status_of(line: str) -> str:
    for part in reversed(line.split(SEPARATOR)):
        name, _, value = part.partition("=")
        if name == "status":
            return value
    return MISSING


def latest_lines(cells: Iterable[Cell], fields: Sequence[str], text: str) -> dict[str, str]:
    """Cell name -> its last line in a summary log."""
    names: dict[tuple[str, ...], str] = {}
    for cell in cells:
        other = names.setdefault(_before(result_line(fields, cell, {})), cell.name)
        if other != cell.name:
            raise ConfigError(f"{other} and {cell.name} have the same summary line: they cannot be told apart")
    found = {}
    for line in text.splitlines():
        name = names.get(_before(line))
        if name is not None and status_of(line) != MISSING:
            found[name] = line
    return found


def _before(line: str) -> tuple[str, ...]:
    """What was known of a line before its run: that is what tells the cells of an experiment apart."""
    parts = line.rstrip().split(SEPARATOR)
    return tuple(part for part in parts if part.partition("=")[0] not in KNOWN_AFTERWARDS)


def closing_block(plan: Plan, latest: Mapping[str, str], gpu: str = "") -> list[str]:
    """Every cell in order, and the totals."""
    lines = [latest.get(cell.name) or missing_line(plan.summary_fields, cell) for cell in plan.cells]
    projects = dict.fromkeys(cell.wandb_project for cell in plan.cells)
    facts = {"project": ", ".join(projects), "steps": plan.options.steps, "gpu": gpu}
    return [
        "",
        f"=== {plan.title} Completed: {date()} ===",
        "=== Summary ===",
        SEPARATOR.join(f"{name}={value}" for name, value in facts.items() if value),
        *lines,
        totals_line(map(status_of, lines)),
    ]


def totals_line(statuses: Iterable[str]) -> str:
    """A run that a rule has stopped is a failed one."""
    counts = Counter(status if status in ("success", MISSING) else "failed" for status in statuses)
    line = f"Total: {counts.total()} | Success: {counts['success']} | Failed: {counts['failed']}"
    return f"{line} | Missing: {counts[MISSING]}" if counts[MISSING] else line


def date() -> str:
    return datetime.now().isoformat(" ", "seconds")


# --- the summary log ----------------------------------------------------------------------------------------------


class SummaryLog:
    """Lines are appended whole, whoever else appends."""

    def __init__(self, path: Path):
        self.path = path

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""

    @contextmanager
    def shared(self, is_fresh: bool) -> Iterator[bool]:
        """Write to this log, alone or with others; yields whether an older summary was put aside, which `is_fresh`
        asks for and only somebody who is alone may do."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
            os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror}): the summary goes there") from None
        try:
            is_alone = _try_lock(descriptor)
            if is_alone and is_fresh and self.path.stat().st_size > 0:
                put_aside(self.path)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield is_alone
        finally:
            os.close(descriptor)

    def append(self, lines: Sequence[str]) -> None:
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")
        with self.locked() as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                while content:
                    content = content[os.write(descriptor, content) :]
            except OSError:
                os.ftruncate(descriptor, size)  # half a line would spoil the next one
                raise

    @contextmanager
    def locked(self) -> Iterator[int]:
        """For a moment, nobody else changes this log or the record beside it."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def put_aside(path: Path) -> None:
    """`x.log` becomes `x.log.1`, and that one `x.log.2` if there is one already."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    for older in range(number, 1, -1):
        os.replace(path.with_name(f"{path.name}.{older - 1}"), path.with_name(f"{path.name}.{older}"))
    os.replace(path, path.with_name(f"{path.name}.1"))


# --- the record ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What an experiment has written about itself. Paths are relative to `root`."""

    experiment: str
    title: str
    summary: Path
    fields: tuple[str, ...]
    reference: str | None
    cells: dict[str, Cell]  # by name
    root: Path


def record_path(summary: Path) -> Path:
    return summary.with_name(f"{summary.name.removesuffix('.log')}.json")


def read_record(path: Path) -> Record:
    try:
        stored = json.loads(path.read_bytes())
        summary = Path(stored["summary"])
        return Record(
            stored["experiment"],
            stored["title"],
            summary,
            tuple(stored["fields"]),
            stored["reference"],
            {entry["name"]: _cell(entry) for entry in stored["cells"]},
            path.resolve().parents[len(summary.parts) - 1] if not summary.is_absolute() else Path("/"),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is not the record of an experiment ({error!r})") from None


def write_record(plan: Plan, cells: Iterable[Cell], is_fresh: bool = False) -> None:
    """Note what cells were told to run. Other cells of the same experiment keep their entries unless `is_fresh`."""
    with SummaryLog(plan.summary_path).locked():
        known = {} if is_fresh else recorded_cells(plan.summary_path)
        known |= {cell.name: cell for cell in cells}
        order = {cell.name: place for place, cell in enumerate(plan.cells)}
        record = {
            "experiment": plan.name,
            "title": plan.title,
            "summary": str(plan.summary_path),
            "fields": plan.summary_fields,
            "reference": plan.reference,
            "cells": [
                asdict(cell) for cell in sorted(known.values(), key=lambda cell: order.get(cell.name, len(order)))
            ],
        }
        write_whole(record_path(plan.summary_path), json.dumps(record, indent=1, default=str).encode())


def recorded_cells(summary: Path) -> dict[str, Cell]:
    """By name; none where there is no record."""
    path = record_path(summary)
    return read_record(path).cells if path.exists() else {}


def _cell(entry: Mapping[str, Any]) -> Cell:
    """A cell as it was before JSON made lists and texts of it."""
    paths = {name: Path(entry[name]) for name in ("log_path", "result_path", "checkpoint_dir")}
    words = {name: tuple(entry.get(name, ())) for name in ("start", "overrides", "log_head")}
    pairs = tuple((name, value) for name, value in entry["fields"])
    return Cell(**{**entry, **paths, **words, "fields": pairs})


def changed_settings(now: Cell, before: Cell) -> list[str]:
    """In words, what differs between a cell and one of the same name, where it may make its numbers differ."""
    if now.start != before.start:
        return [f"{' '.join(before.start)}, now {' '.join(now.start)}"]
    old, new = _settings(before.overrides), _settings(now.overrides)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}={old.get(key, '(unset)')}, now {new.get(key, '(unset)')}" for key in keys]


def _settings(words: Iterable[str]) -> dict[str, str]:
    pairs = (word.lstrip("+~").partition("=") for word in words)
    return {
        key: value
        for key, _, value in pairs
        if not key.startswith(NO_MATTER) and not any(part in key for part in NO_MATTER_IN)
    }
