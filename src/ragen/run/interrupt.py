"""Ctrl-C, and the SIGTERM of a cluster: the first asks a run to end after its step, the second ends it at once.

    with Interrupt(note=print) as interrupt:
        while not interrupt.is_set:
            ...

In the middle of a step the weights belong to no step: a run that stops between steps can save and loses nothing.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    def __init__(self, note: Callable[[str], None] = print):
        self.is_set = False
        self._note = note
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            if number == signal.SIGINT:  # a launcher of workers sends SIGTERM after the first Ctrl-C
                raise KeyboardInterrupt
            return
        self.is_set = True
        with suppress(RuntimeError):  # the signal may come in the middle of a print, and prints do not nest
            self._note("interrupted: finishing this step first; press Ctrl-C again to stop at once")
