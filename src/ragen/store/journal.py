"""Finished episodes, one line each as they end, so that an interrupted evaluation can resume.

    with Journal(folder, setting).opened() as journal:         # one process at a time; a second one is refused
        journal.records                                        # episodes that earlier attempts have finished
        journal.append(key, record)
    journal.remove()                                           # once all results are written

The file name is a hash of the setting: the same command finds its journal, and no other command does. The first line
is the setting itself.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError
from ragen.store import json_lines
from ragen.store.lock import Locked, try_lock
from ragen.store.reading import problem_in

EpisodeKey = tuple[str, int, int, int]  # tag, seed, group, member


class Journal:
    """`shape` describes a valid record, as `reading.problem_in` takes it."""

    def __init__(self, folder: str | Path, setting: Mapping[str, Any], shape: Any = dict):
        self.entry = {"place": [(str, int)], "record": shape}
        self.setting = json.loads(json.dumps(setting, sort_keys=True))
        name = hashlib.sha256(json.dumps(self.setting).encode()).hexdigest()[:16]
        self.path = Path(folder) / f".journal-{name}.jsonl"
        self.records: dict[EpisodeKey, dict[str, Any]] = {}
        self.notes: list[str] = []  # on lines that could not be read
        self._write_lock = threading.Lock()

    @contextmanager
    def opened(self, fresh: bool = False) -> Iterator["Journal"]:
        """Read the journal, or with `fresh` clear it, and be the only process that writes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = try_lock(self.path.with_suffix(".lock"))
        except Locked as error:
            raise ConfigError(
                f"{self.path}: {error.owner} is running the same evaluation; wait for it, or change output.dir"
            ) from None
        try:
            if fresh:
                self.path.unlink(missing_ok=True)
            self._read()
            yield self
        finally:
            lock.release()

    def _read(self) -> None:
        """Lines that are not valid are noted and skipped: their episodes are played again."""
        records, skipped = json_lines.read(self.path)
        if not records:
            json_lines.append(self.path, self.setting)
        elif records[0] != self.setting:
            raise ConfigError(f"{self.path} is not a journal of this evaluation: remove it")
        valid = [entry for entry in records[1:] if not problem_in(entry, self.entry) and len(entry["place"]) == 4]
        damaged = len(records[1:]) - len(valid)
        self.records = {tuple(entry["place"]): entry["record"] for entry in valid}
        self.notes = skipped + [f"{damaged} lines of {self.path.name} hold no episode: skipped"] * bool(damaged)

    def append(self, key: EpisodeKey, record: Mapping[str, Any]) -> None:
        with self._write_lock:
            json_lines.append(self.path, {"place": key, "record": record})
            self.records[key] = dict(record)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
