"""A real disk of a few kB, where the system permits to mount one; elsewhere the test is skipped.

with small_disk(tmp_path / "disk", "64k") as place:
    filler = fill(place)          # not a byte is free
    filler.unlink()
"""

import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(place, size):
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not permitted: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place):
    """Until not a byte is free; returns the file."""
    with (place / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return place / "fill"
