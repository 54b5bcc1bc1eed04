"""Progress of a long count: a bar on a terminal, elsewhere a line for every tenth.

with progress("pocket, 5 turns", 512, "episodes") as advance:
    advance(16)
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragen.format import duration, harmless


@contextmanager
def progress(title: str, total: int, unit: str, is_brief: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts; everything goes to stderr. A brief one leaves nothing behind."""
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from ragen.terminal import Screen

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Screen(stderr=True), transient=is_brief) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, start = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if not is_brief and 10 * done // total > 10 * before // total:
            elapsed = duration(time.monotonic() - start)
            print(f"{harmless(title)}: {done} of {total} {unit}, {elapsed}", file=sys.stderr, flush=True)

    yield advance
