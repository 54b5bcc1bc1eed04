"""Finished episodes, one line each as they end: an evaluation that was interrupted goes on where it stopped.

    with Journal(folder, setting).opened() as journal:         # one writer; a second is refused
        journal.records                                        # what an earlier attempt has finished, by place
        journal.append(place, record)
    journal.remove()                                           # once everything is in its own file

The name is a hash of the setting, so that the same command finds its journal and any other one does not. The first
line holds the setting itself.
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError

Place = tuple[str, int, int, int]  # tag, seed, group, member


class Journal:
    def __init__(self, folder: str | Path, setting: Mapping[str, Any]):
        self.setting = json.dumps(setting, sort_keys=True)
        name = hashlib.sha256(self.setting.encode()).hexdigest()[:16]
        self.path = Path(folder) / f".journal-{name}.jsonl"
        self.records: dict[Place, dict[str, Any]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, fresh: bool = False) -> Iterator["Journal"]:
        """Read what is there and be the one that writes. `fresh` forgets it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path}: another process makes this very evaluation; wait for it, or change output.dir"
                ) from None
            if fresh:
                file.truncate(0)
            self._read(file)
            self._file = file
            yield self

    def _read(self, file: Any) -> None:
        """Whole lines count; half a line, which a killed process leaves, is cut off."""
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        os.truncate(file.fileno(), len(whole))
        first, *lines = whole.split(b"\n")
        if not first:
            file.write(self.setting.encode() + b"\n")
            return
        if first.decode(errors="replace") != self.setting:
            raise ConfigError(f"{self.path} is no journal of this evaluation: remove it")
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
                self.records[tuple(entry["place"])] = entry["record"]
            except (ValueError, KeyError, TypeError):
                continue  # it is played again

    def append(self, place: Place, record: Mapping[str, Any]) -> None:
        line = json.dumps({"place": place, "record": record}).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self.records[place] = dict(record)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
