"""Which process runs which cell. A lock is a file beside the cell's result, held while its process lives.

    with held(plan.cells, "kl_sweep") as locks:        # Locked, naming the first process
        locks.pop(skipped.name).release()

So two terminals can run different cells of one experiment, and no cell runs twice at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragen.errors import ConfigError
from ragen.store.lock import Lock, Locked, is_locked, try_lock
from ragen.store.sweep_results import Cell


@contextmanager
def held(cells: Sequence[Cell], experiment: str) -> Iterator[dict[str, Lock]]:
    """Hold the locks of all these cells, by name, or of none."""
    locks: dict[str, Lock] = {}
    try:
        for cell in cells:
            locks[cell.name] = _take(cell, experiment)
        yield locks
    finally:
        for lock in locks.values():
            lock.release()


def _take(cell: Cell, experiment: str) -> Lock:
    path = lock_path(cell)
    try:
        return try_lock(path, experiment)
    except Locked as error:
        error.args = (f"{cell.name} is being run by {error.owner}: wait for it, or skip this cell with --only",)
        raise
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be written to ({error.strerror}): results go there") from None


def any_held(cells: Iterable[Cell]) -> bool:
    return any(is_locked(lock_path(cell)) for cell in cells)


def lock_path(cell: Cell) -> Path:
    return cell.result_path.with_name(f".{cell.result_path.name}.lock")
