"""One lock for everything on disk. The operating system holds it, so a killed process leaves no lock behind.

    with locked(folder / ".lock"):                                  # waits for its turn
    with locked(path, on_wait=lambda owner: print(f"waiting for {owner}")):
    with locked(path, blocking=False, note="kl_sweep"):             # or raises Locked, which names the owner
    lock = try_lock(path)                                           # or raises Locked; lock.release()

The lock file names its owner, its directory is made, and it is removed when the lock is released. A process must not
lock the same path twice.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from ragen.errors import ConfigError
from ragen.store.full_disk import patiently
from ragen.store.reading import Unreadable, read_bytes

POLL_SECONDS = 0.02
UNKNOWN = "another process"  # an owner that the lock file does not name
PATIENCE = 0.1  # seconds before a lock counts as taken: one that is just being released takes a moment


class Locked(ConfigError):
    """Another process, or another part of this one, holds the lock."""

    def __init__(self, path: Path, owner: str):
        super().__init__(f"{path} is locked by {owner}")
        self.path, self.owner = path, owner


class Lock:
    def __init__(self, path: Path, lock: filelock.FileLock):
        self.path, self._lock = path, lock

    def release(self) -> None:
        if owner_of(self.path).startswith(this_process()):  # not that of a process that has made the directory again
            self.path.unlink(missing_ok=True)  # while it is held: a waiting process notices that the file was removed
        self._lock.release()


def try_lock(path: Path, note: str = "") -> Lock:
    """Take the lock, or raise `Locked`. `note` follows the owner's name in the messages of others."""
    try:
        return _acquire(path, note, PATIENCE)
    except filelock.Timeout:
        raise Locked(path, owner_of(path)) from None


@contextmanager
def locked(
    path: Path, *, blocking: bool = True, on_wait: Callable[[str], None] | None = None, note: str = ""
) -> Iterator[None]:
    """Hold the lock. A blocking call waits for it, and first calls `on_wait` with the owner's name."""
    try:
        lock = try_lock(path, note)
    except Locked as error:
        if not blocking:
            raise
        if on_wait is not None:
            on_wait(error.owner)
        lock = _acquire(path, note, -1)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock. The lock file stays as it is, need not be writable, and is never made."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _is_free(descriptor, time.monotonic() + PATIENCE)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)


def owner_of(path: Path) -> str:
    """`process 4711 on host (note)`, as far as the lock file tells."""
    try:
        content = read_bytes(path) or b""
    except Unreadable:
        content = b""
    return content.decode(errors="replace").partition("\n")[0] or UNKNOWN


def _acquire(path: Path, note: str, timeout: float) -> Lock:
    lock = _file_lock(path)
    patiently(lambda: lock.acquire(timeout, POLL_SECONDS), path)
    owner = f"{this_process()}{f' ({note})' if note else ''}\n".encode()
    try:
        patiently(lambda: path.write_bytes(owner), path, len(owner))
    except OSError:
        path.unlink(missing_ok=True)
        lock.release()
        raise
    return Lock(path, lock)


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _file_lock(path: Path) -> filelock.FileLock:
    # A lock of marker files, which filelock would fall back to, outlives a process that is killed.
    return filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
