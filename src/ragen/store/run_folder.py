"""A run on disk. `RunFolder` owns the layout: nothing else knows these file names.

    folder = RunFolder("checkpoints/ragen/test")
    with folder.owned():                                    # a second process is refused, naming this one
        folder.write_config(config)
        folder.append_metrics(1, {"actor/entropy": 0.41})
        folder.write_episodes(1, "val", groups)

    config.yaml                        the resolved tree
    metrics.jsonl                      one object a line: {"step": 1, "actor/entropy": 0.41, …}
    episodes/<split>-<step>.jsonl.gz   one episode a line, see `episodes.episode_record`
    failures.jsonl                     groups that an environment did not let finish, see `train.failures.record_of`
    report.html                        see `report.html.write_report`
    wandb-id, tensorboard/             see `run.sinks`
    finished.json                      how the run ended, see `write_finished`; absent until then
    .owner                             the lock of the process that writes here

A file is written whole (temporary name, sync, rename) or appended by whole lines, so a run killed at any moment leaves
files that can be read. A folder that is removed or moved while its run writes to it stops the run: nothing makes a
second folder of half a run.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from ragen.config.tree import to_dict
from ragen.errors import RunFailed
from ragen.statistics import bounded
from ragen.store import json_lines, stored_config
from ragen.store.episodes import write_episodes
from ragen.store.fsync import make_folder, write_whole
from ragen.store.json_lines import decode, encode
from ragen.store.lock import UNKNOWN, Locked, is_locked, owner_of, this_process, try_lock
from ragen.store.reading import Unreadable, read_json
from ragen.types import Group

LAST_STEP = 10**12  # a larger one is damage


def ending(status: str, step: int, rule: str | None = None, explanation: str = "") -> dict[str, Any]:
    """What `finished.json` holds."""
    return {"status": status, "step": step, "rule": rule, "explanation": explanation}


class FolderInUse(ValueError):
    """Another process writes to this run folder."""


class FolderLost(RunFailed):
    """The run folder was removed, moved or taken over while its run was writing to it."""


class EpisodeFile(NamedTuple):
    split: str
    step: int
    path: Path


@dataclass
class Metrics:
    """What `metrics.jsonl` holds: one row a step, in order of steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines that could not be read

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was written; values may be NaN, and one that overflows sums is infinite."""
        found = [(row["step"], row.get(key)) for row in self.rows]
        return [(step, bounded(value)) for step, value in found if _is_number(value)]

    def names(self) -> list[str]:
        """Every metric that occurs, in order of first appearance."""
        return [key for key in dict.fromkeys(key for row in self.rows for key in row) if key != "step"]

    def last_step(self) -> int | None:
        return self.rows[-1]["step"] if self.rows else None


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.episodes_path = self.path / "episodes"
        self.failures_path = self.path / "failures.jsonl"
        self.report_path = self.path / "report.html"
        self.finished_path = self.path / "finished.json"
        self.owner_path = self.path / ".owner"
        self._is_written = False  # this process owns the folder and has written its config

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def owned(self, key: str = "trainer.default_local_dir") -> Iterator["RunFolder"]:
        """Be the only process that writes here. Creates the folder; `key` is the one that chooses another."""
        is_new = not self.path.exists()
        make_folder(self.path)
        in_use = "{} is in use by {}: wait for it, or choose another directory with {}"
        if owner := self._owner_on_another_host():
            in_use += f". If that process is gone, delete {self.owner_path}"
            raise FolderInUse(in_use.format(self.path, owner, key))
        try:
            lock = try_lock(self.owner_path)
        except Locked as error:
            raise FolderInUse(in_use.format(self.path, error.owner, key)) from None
        except OSError:
            self._remove_if_empty(is_new)
            raise
        try:
            for leftover in (*self.path.glob(".*.part"), *self.episodes_path.glob(".*.part")):  # of a killed owner
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield self
        finally:
            self._is_written = False
            lock.release()
            self._remove_if_empty(is_new)

    def _remove_if_empty(self, is_new: bool) -> None:
        """A run that could not even write its config leaves nothing."""
        with suppress(OSError):
            if is_new:
                self.path.rmdir()

    def check_present(self) -> None:
        """Raise `FolderLost` if the folder is no longer the one that this process has begun to write."""
        if not self._is_written:
            return
        again = "Its steps are lost: run the same command to start again"
        if not self.config_path.is_file():
            raise FolderLost(f"{self.path} was removed or moved while the run was writing to it. {again}")
        if (owner := owner_of(self.owner_path)) not in (this_process(), UNKNOWN):
            raise FolderLost(f"{self.path} was removed, and {owner} writes there now. Wait for it, then look there")

    def live_owner(self) -> str | None:
        """The process that writes here now, as `process 4711 on host`."""
        if owner := self._owner_on_another_host():
            return owner
        return owner_of(self.owner_path) if is_locked(self.owner_path) else None

    def _owner_on_another_host(self) -> str | None:
        """A network file system may not share locks: there the note of another host counts until it is removed."""
        owner = owner_of(self.owner_path)
        host = owner.partition(" on ")[2]
        return owner if host and host != socket.gethostname() else None

    def write_config(self, config: Any) -> None:
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=120)
        write_whole(self.config_path, text.encode())
        self._is_written = owner_of(self.owner_path) == this_process()

    def read_config(self) -> dict[str, Any]:
        """The stored tree; empty where there is none. `ragen.config.tree.build` makes a `Config` of it."""
        return stored_config.read_config(self.config_path)

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one line. Numbers of any library are stored as plain ones, floats exactly."""
        row = {"step": step} | {key: encode(key, value) for key, value in metrics.items() if key != "step"}
        self.check_present()
        json_lines.append(self.metrics_path, row)

    def append_table(self, name: str, records: Iterable[Mapping[str, Any]]) -> Path:
        """Add lines to a table beside the metrics; returns its path."""
        self.check_present()
        json_lines.append(self.path / name, *records)
        return self.path / name

    def read_metrics(self) -> Metrics:
        """All valid rows. Lines of one step are one row; of a value written twice the later one stands."""
        lines = json_lines.read(self.metrics_path, is_metrics_row)
        rows: dict[int, dict[str, Any]] = {}
        not_numbers: dict[str, int] = {}
        for record in lines.records:
            row = rows.setdefault(record["step"], {})
            for key, stored in record.items():
                value = _metric(stored)
                if value is None and stored is not None:
                    not_numbers.setdefault(key, record["step"])
                else:
                    row[key] = value
        notes = [f"{key} of step {step} is not a number: skipped" for key, step in not_numbers.items()]
        return Metrics([rows[step] for step in sorted(rows)], lines.skipped + notes)

    def rewind(self, step: int) -> list[str]:
        """Remove what was recorded after the line of `step`: a resumed run writes it again. Returns what is damaged."""
        # A later line may be about an earlier step (the success of the merged model): it goes too.
        notes = json_lines.rewind(
            self.metrics_path,
            is_kept=lambda record: is_metrics_row(record) and record["step"] <= step,
            is_last=lambda record: record["step"] == step,
        )
        json_lines.rewind(self.failures_path, is_kept=lambda record: is_metrics_row(record) and record["step"] <= step)
        for file in self.episode_files():
            if file.step > step:
                file.path.unlink()
        self.finished_path.unlink(missing_ok=True)
        return notes

    def write_episodes(self, step: int, split: str, groups: Iterable[Group]) -> Path:
        """Store whole groups. `split` names the set (`train`, `val`, `val-greedy`, …)."""
        path = self.episodes_path / f"{split}-{step:06d}.jsonl.gz"
        self.check_present()
        write_episodes(path, step, groups)
        return path

    def episode_files(self, split: str | None = None) -> list[EpisodeFile]:
        """What is stored, by split and step."""
        found = []
        for path in self.episodes_path.glob("*-*.jsonl.gz"):
            name, _, step = path.name.removesuffix(".jsonl.gz").rpartition("-")
            if step.isdigit() and split in (None, name):
                found.append(EpisodeFile(name, int(step), path))
        return sorted(found)

    def write_finished(self, status: str, step: int, rule: str | None = None, explanation: str = "") -> None:
        """The last thing that a run writes: `status` is `finished`, or `early_stopped` by a rule at a step."""
        record = ending(status, step, rule, explanation)
        self.check_present()
        write_whole(self.finished_path, json.dumps(record, indent=1).encode())

    def read_finished(self) -> dict[str, Any] | None:
        """How the run ended; None for one that has not, `status` unknown where the record cannot be read."""
        try:
            record = read_json(self.finished_path)
        except Unreadable:
            return {"status": "unknown"}
        if record is None:
            return None
        kinds = {"status": str, "step": int, "rule": str | None, "explanation": str}
        is_whole = "status" in record and all(isinstance(record[key], kinds.get(key, object)) for key in record)
        return record if is_whole else {"status": "unknown"}

    def write_report(self, html: str) -> Path:
        self.check_present()
        write_whole(self.report_path, html.encode("utf-8", errors="replace"))
        return self.report_path


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric(stored: Any) -> Any:
    """A value of a metrics file: a number, true or false, or text; None for everything else."""
    value = decode(stored)
    return value if isinstance(value, (int, float, str)) else None


def is_metrics_row(record: Mapping[str, Any]) -> bool:
    return type(record.get("step")) is int and 0 <= record["step"] <= LAST_STEP
