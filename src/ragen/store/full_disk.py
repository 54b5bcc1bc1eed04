"""A disk without space: wait a moment, then fail with the file, the space that it needs and the fix.

    patiently(lambda: os.mkdir(path), path)                       # tries again while the disk is full
    raise write_failed(path, error, num_bytes=2_000)              # the message of a write that will not succeed

A full disk often has space again after a moment (another program removes its temporary files), so a write is tried for
`PATIENCE` seconds. Other errors fail at once.
"""

import errno
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ragen.errors import RunFailed
from ragen.format import size_text

PATIENCE = 30.0  # seconds
PAUSE = 0.5
FULL = (errno.ENOSPC, errno.EDQUOT)
ADVICE = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some of the quota",
    errno.EROFS: "make the file system writable",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
} | dict.fromkeys((errno.EACCES, errno.EPERM), "make the directory writable")

Result = TypeVar("Result")


class WriteFailed(OSError, RunFailed):
    """A file that could not be written. What was there before is intact."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def patiently(write: Callable[[], Result], path: Path, num_bytes: float = 0) -> Result:
    """Call `write`, and again while the disk is full. It must leave nothing behind when it fails."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            return write()
        except (WriteFailed, TimeoutError):  # a lock that another process holds
            raise
        except OSError as error:
            if error.errno not in FULL or time.monotonic() - began >= PATIENCE:
                raise write_failed(path, error, num_bytes) from error
            if not is_told:
                _tell(f"{path}: {error.strerror}; trying again for {PATIENCE:.0f} s")
                is_told = True
            time.sleep(PAUSE)


def write_failed(path: Path, error: OSError, num_bytes: float = 0) -> WriteFailed:
    number = error.errno or errno.EIO
    space = f": it needs {size_text(num_bytes)}, and {size_text(free_bytes(path))} are free" if num_bytes else ""
    message = f"not written ({error.strerror or error}){space}. Fix: {advice(number)}, then run the same command again"
    return WriteFailed(number, message, str(path))


def advice(number: int) -> str:
    return ADVICE.get(number, "use a directory that can be written to")


def free_bytes(path: Path) -> float:
    """Bytes that can still be written beside or below a path; infinite where the system does not say."""
    there = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/"))
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else math.inf


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _tell(text: str) -> None:
    with suppress(OSError):  # stderr may be a file on the same disk
        print(text, file=sys.stderr, flush=True)
