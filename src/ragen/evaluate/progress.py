"""How far an evaluation has come: a bar in a terminal, a line for every tenth elsewhere.

with Progress("pocket, 5 turns", 512) as progress:
    progress.advance(16)
"""

import sys
import time
from typing import Any

from ragen.format import duration


class Progress:
    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, total, 0
        self._tenths, self._start = 0, time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self.title, total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
            return
        tenths = 10 * self.done // max(1, self.total)
        if tenths > self._tenths:
            self._tenths = tenths
            took = duration(time.monotonic() - self._start)
            print(f"{self.title}: {self.done} of {self.total} episodes, {took}", file=sys.stderr, flush=True)
