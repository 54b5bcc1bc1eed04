"""Who runs which cell. A lock is a file beside the cell's result, held for as long as its process lives.

    with held([cell.result_path for cell in plan.cells], "kl_sweep") as locks:     # InUse, naming the first
        locks.release(skipped.result_path)

Disjoint cells of one experiment may so be run from two terminals, and the same cell never twice at once.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ragen.errors import ConfigError


class InUse(ConfigError):
    """Another process runs this cell."""


class Locks:
    def __init__(self, owner: str):
        self._owner = owner
        self._files: dict[Path, int] = {}

    def take(self, path: Path) -> None:
        place = lock_path(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(place)
        except OSError as error:
            raise ConfigError(f"{place.parent}: cannot be written to ({error.strerror}): results go there") from None
        if descriptor is None:
            raise InUse(
                f"{path.stem} is being run by {_first_line(place) or 'another process'}: wait for it, or leave this "
                "cell out with --only"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{self._owner}\n".encode())
        self._files[path] = descriptor

    def release(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            lock_path(path).unlink()  # while it is still held: see `_locked`
        os.close(self._files.pop(path))

    def release_all(self) -> None:
        for path in list(self._files):
            self.release(path)


@contextmanager
def held(paths: Sequence[Path], experiment: str) -> Iterator[Locks]:
    """Hold the locks of all these results, or of none."""
    locks = Locks(f"process {os.getpid()} on {socket.gethostname()} ({experiment})")
    try:
        for path in paths:
            locks.take(path)
        yield locks
    finally:
        locks.release_all()


def lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _locked(place: Path) -> int | None:
    """The open file, locked; None where somebody else holds it."""
    while True:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        # Whoever held it may have removed the file: what is locked must still be what the name shows.
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(place).st_ino:
                return descriptor
        os.close(descriptor)


def _first_line(place: Path) -> str:
    with suppress(OSError):
        return place.read_text(errors="replace").partition("\n")[0]
    return ""
