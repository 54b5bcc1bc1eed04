"""Every write to disk: whole, and on the disk before we continue.

    write_whole(path, content)          # readers see the old content or all of the new
    append_lines(path, b"one\\ntwo\\n")   # all of these lines, or the file as it was
    make_folder(path)
    os.rename(temporary, target)
    sync(target.parent)                 # a directory: the names in it, and so the rename

Where the disk is full all of them wait a moment, then raise `WriteFailed` (`full_disk.py`).
"""

import os
from pathlib import Path

from ragen.store.full_disk import no_space, patiently


def sync(path: Path) -> None:
    """Flush a file's content, or the names within a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a directory and those above it, unless it exists."""
    patiently(lambda: path.mkdir(parents=True, exist_ok=True), path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name always shows either the old content or all of the new."""
    make_folder(path.parent)
    patiently(lambda: _replace(path, content), path, len(content))


def append_lines(path: Path, content: bytes, keeps_half_line: bool = False) -> None:
    """Add lines to a file, all or none.

    Half a line at its end would swallow the first of them. A killed process has left it: it is removed, or with
    `keeps_half_line`, for files that people edit, ended.
    """
    make_folder(path.parent)
    patiently(lambda: _append(path, content, keeps_half_line), path, len(content))


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, content)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # the rename itself


def _append(path: Path, content: bytes, keeps_half_line: bool) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            if keeps_half_line:
                content = b"\n" + content
            else:
                size = os.pread(descriptor, size, 0).rfind(b"\n") + 1
                os.ftruncate(descriptor, size)
        try:
            _write_all(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, size)  # what was written of the lines
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    """A full disk may take a part of what is written and report no error."""
    rest = memoryview(content)
    while rest:
        num_written = os.write(descriptor, rest)
        if not num_written:
            raise no_space()
        rest = rest[num_written:]
    os.fsync(descriptor)
