"""What is written lasts: a power cut after `sync(path)` takes nothing of it back.

os.rename(temporary, target)
sync(target.parent)                 # a folder: the names in it, and so the rename
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file's content, or the names within a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
