"""What a sweep leaves on disk: a log and a folder for each run, a summary log with their results, and a record.

    record = read_record(record_path(Path("logs/kl_sweep_Qwen2.5-3B.log")))
    latest = record.latest_lines()                        # cell name -> its last line in the summary log
    for cell in record.cells.values():
        record.run_folder(cell), status_of(latest.get(cell.name, ""))

    kl=0.001 | filter=nofilter | include_zero=True | train_time=41.20s | … | gpu=1xH100 | status=success

A line has the documented fields in the documented order; the value of `name` stands without `name=`. `status` is
`success`, `fail`, `early_stopped:<rule>` or `preempted`. The last line of a cell counts. Resuming reads the summary log
only: a line that is deleted by hand makes its cell run again. The record, `.json` beside it, holds what every cell was
told to run. An experiment that starts over keeps both: `x.log.1` and `x.json.1`, which also says where each run was.
While a cell runs, its process holds a lock beside its result: two terminals can run different cells of one sweep.
"""

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError
from ragen.store.free_name import rotate
from ragen.store.fsync import append_lines, write_whole
from ragen.store.lock import Lock, Locked, is_locked, locked, try_lock
from ragen.store.reading import problem_in, read_bytes, read_json

SEPARATOR = " | "
MISSING = "missing"
FOLDER_LINE = b"run folder: "  # the first line that a run prints begins so
# Field -> the metric of the run that it comes from.
TIMES = {
    "train_time": "timing_s/train_total",
    "eval_time": "timing_s/eval_total",
    "total_time": "timing_s/total",
    "collapse_time": "timing_s/collapse_total",
    "collapse_first_time": "timing_s/collapse_first_turn_total",
    "collapse_multi_time": "timing_s/collapse_multi_turn_total",
}
# What a record must hold.
CELL = dict.fromkeys(("name", "label", "group", "log_path", "result_path", "checkpoint_dir", "wandb_project"), str) | {
    "start": [str],
    "overrides": [str],
    "num_gpus": int,
    "seed": (int, type(None)),
    "fields": [[str]],
    "log_head": [str],
}
RECORD = {
    "experiment": str,
    "title": str,
    "summary": str,
    "fields": [str],
    "reference": (str, type(None)),
    "cells": [CELL],
}
NEEDED = {*RECORD, *CELL} - {"log_head"}
KNOWN_AFTERWARDS = (*TIMES, "wall_time", "gpu", "status")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. Paths are relative to the repository's root."""

    name: str  # the documented run name, with -s<k> where there are seeds
    label: str  # the documented directory label, `0001` for 0.001, with -s<k> where there are seeds; unique in a plan
    group: str  # group of the smoke test or of the search, else ""
    start: tuple[str, ...]  # what `ragen train` gets first: ("--config-name", "_2_sokoban") or ("sokoban",)
    overrides: tuple[str, ...]  # every key=value but the device list, in order
    num_gpus: int  # consecutive devices that it needs
    seed: int | None  # k of -s<k>
    log_path: Path
    result_path: Path
    checkpoint_dir: Path  # trainer.default_local_dir
    wandb_project: str
    fields: tuple[tuple[str, str], ...]  # the part of its summary line that is known beforehand
    log_head: tuple[str, ...] = ()  # the first lines of its log, below the title
    ran_in: Path | None = None  # in the record of an experiment that has started over since: its log is another run's

    @property
    def setting(self) -> str:
        """The label that all repetitions share."""
        return self.label if self.seed is None else self.label.removesuffix(f"-s{self.seed}")

    @property
    def run_folder(self) -> Path:
        """Where its run writes: a numbered sibling of the planned folder if its log says so."""
        return run_folder(self.log_path) or self.checkpoint_dir


# --- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def held(cells: Sequence[Cell], experiment: str) -> Iterator[dict[str, Lock]]:
    """Hold the locks of all these cells, by name, or of none. Raises `Locked`, naming the first owner."""
    locks: dict[str, Lock] = {}
    try:
        for cell in cells:
            locks[cell.name] = _take_lock(cell, experiment)
        yield locks
    finally:
        for lock in locks.values():
            lock.release()


def _take_lock(cell: Cell, experiment: str) -> Lock:
    path = lock_path(cell)
    try:
        return try_lock(path, experiment)
    except Locked as error:
        error.args = (f"{cell.name} is being run by {error.owner}: wait for it, or skip this cell with --only",)
        raise
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be written to ({error.strerror}): results go there") from None


def any_held(cells: Iterable[Cell]) -> bool:
    return any(is_locked(lock_path(cell)) for cell in cells)


def lock_path(cell: Cell) -> Path:
    return cell.result_path.with_name(f".{cell.result_path.name}.lock")


# --- the log of a run ---------------------------------------------------------------------------------------------


def run_folder(log: Path, offset: int = 0) -> Path | None:
    """The folder that a run says it writes to."""
    return reported_path(log, FOLDER_LINE, offset)


def reported_path(log: Path, opening: bytes, offset: int = 0) -> Path | None:
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


# --- lines of the summary -----------------------------------------------------------------------------------------


def result_line(fields: Sequence[str], cell: Cell, values: Mapping[str, str]) -> str:
    """The summary line of a cell. A field that is named twice takes the cell's values for it in order."""
    known: dict[str, deque[str]] = defaultdict(deque)
    own_name = ("name", cell.name)
    for name, value in (own_name, *(field for field in cell.fields if field != own_name)):
        known[name].append(value)
    parts = []
    for name in fields:
        text = known[name].popleft() if known[name] else values.get(name)
        if text is not None:
            parts.append(text if name == "name" else f"{name}={text}")
    return SEPARATOR.join(parts)


def status_of(line: str) -> str:
    parts = reversed(line.split(SEPARATOR))
    return next((part.removeprefix("status=") for part in parts if part.startswith("status=")), MISSING)


def latest_lines(cells: Iterable[Cell], fields: Sequence[str], text: str) -> dict[str, str]:
    """Cell name -> its last line in a summary log."""
    names: dict[tuple[str, ...], str] = {}
    for cell in cells:
        other = names.setdefault(_before(result_line(fields, cell, {})), cell.name)
        if other != cell.name:
            raise ConfigError(f"{other} and {cell.name} have the same summary line: they cannot be told apart")
    ended = ((names.get(_before(line)), line) for line in text.splitlines() if status_of(line) != MISSING)
    return {name: line for name, line in ended if name is not None}


def _before(line: str) -> tuple[str, ...]:
    """The part of a line that was known before its run: it tells the cells of a sweep apart."""
    parts = line.rstrip().split(SEPARATOR)
    return tuple(part for part in parts if part.partition("=")[0] not in KNOWN_AFTERWARDS)


class SummaryLog:
    """Several processes may append: lines stay whole."""

    def __init__(self, path: Path):
        self.path = path

    def text(self) -> str:
        return (read_bytes(self.path) or b"").decode(errors="replace")

    def append(self, lines: Sequence[str]) -> None:
        with self.locked():
            self.write(lines)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For a moment, nobody else changes this log or the record beside it."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def write(self, lines: Sequence[str]) -> None:
        """Append while `locked`."""
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")
        append_lines(self.path, content, keeps_half_line=True)


# --- the record ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What a sweep has written about itself. Paths are relative to `root`."""

    experiment: str
    title: str
    summary: Path
    fields: tuple[str, ...]
    reference: str | None
    cells: dict[str, Cell]  # by name
    root: Path = Path()

    def latest_lines(self) -> dict[str, str]:
        return latest_lines(self.cells.values(), self.fields, SummaryLog(self.root / self.summary).text())

    def run_folder(self, cell: Cell) -> Path:
        return self.root / (cell.ran_in or run_folder(self.root / cell.log_path) or cell.checkpoint_dir)

    def by_setting(self) -> dict[str, list[Cell]]:
        """The repetitions of each setting."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells.values():
            found.setdefault(cell.setting, []).append(cell)
        return found

    def write(self) -> None:
        entries = {**vars(self), "cells": [asdict(cell) for cell in self.cells.values()]}
        del entries["root"]
        write_whole(record_path(self.summary), json.dumps(entries, indent=1, default=str).encode())


def record_path(summary: Path) -> Path:
    """`x.json` for `x.log`, `x.json.1` for `x.log.1`."""
    return _renamed(summary, "log", "json")


def summary_path(record: Path) -> Path:
    return _renamed(record, "json", "log")


def _renamed(path: Path, old: str, new: str) -> Path:
    name, number = re.fullmatch(rf"(.*?)(?:\.{old}(\.\d+)?)?", path.name, re.DOTALL).groups()  # type: ignore[union-attr]
    return path.with_name(f"{name}.{new}{number or ''}")


def keep_older(summary: Path) -> None:
    """Keep a summary log and its record under a number, before the experiment starts over."""
    record = record_path(summary)
    if record.is_file():
        with suppress(ConfigError):  # a damaged record is kept as it is
            stored = read_record(record)
            cells = {name: replace(cell, ran_in=cell.run_folder) for name, cell in stored.cells.items()}
            replace(stored, cells=cells).write()
        rotate(record)
    rotate(summary)


def read_record(path: Path) -> Record:
    stored = read_json(path) or {}
    if problem := problem_in(stored, RECORD, NEEDED):
        raise ConfigError(f"{path} is not the record of an experiment ({problem})")
    try:
        summary = Path(stored["summary"]).with_name(summary_path(path).name)
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


def recorded_cells(summary: Path) -> dict[str, Cell]:
    """By name; none where there is no record."""
    path = record_path(summary)
    return read_record(path).cells if path.exists() else {}


def _cell(entry: Mapping[str, Any]) -> Cell:
    """A cell as it was before JSON made lists and texts of it."""
    names = ("log_path", "result_path", "checkpoint_dir", "ran_in")
    paths = {name: Path(entry[name]) for name in names if entry.get(name)}
    texts = {name: tuple(entry.get(name, ())) for name in ("start", "overrides", "log_head")}
    return Cell(**{**entry, **paths, **texts, "fields": tuple((name, value) for name, value in entry["fields"])})
