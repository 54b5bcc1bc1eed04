"""fsync helpers: data reaches the disk before we continue.

write_whole(path, content)          # readers see the old content or all of the new
os.rename(temporary, target)
sync(target.parent)                 # a directory: the names in it, and so the rename
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's content, or the names within a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name always shows either the old content or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # the rename itself
