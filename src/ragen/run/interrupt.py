"""Ctrl-C and SIGTERM: how a run is asked to stop, and when it does.

    with Interrupt(note=print, seconds=120) as interrupt:
        try:
            with interrupt.droppable():         # SIGTERM ends this block with `Preempted`
                play()
                interrupt.commit()              # from here on the weights change: the block is finished
                update()
        except Preempted:
            ...

- Ctrl-C (SIGINT, or SIGUSR1 from a launcher) asks a run to end after its step; a second Ctrl-C ends it at once.
- SIGTERM is the preemption of a cluster, which kills soon: work that has changed nothing yet is dropped, what has begun
  to change weights is finished. If that takes longer than `seconds`, or hangs, the process exits with status 143; the
  next start resumes from the last checkpoint.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

PREEMPTED = 128 + signal.SIGTERM  # the exit status
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Preempted(BaseException):
    """SIGTERM came where work can be dropped. Not an `Exception`: an environment must not swallow it."""


class Interrupt:
    """`is_set`: asked to stop. `is_preempted`: by SIGTERM. Without `seconds` there is no time limit."""

    def __init__(self, note: Callable[[str], None] = print, seconds: float | None = None):
        self.is_set = self.is_preempted = False
        self._note, self._seconds = note, seconds
        self._can_drop = False
        self._before: dict[int, Any] = {}
        self._deadline: _Deadline | None = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
            self._deadline = None if self._seconds is None else _Deadline(self._seconds)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> str:
        """`interrupted`, `preempted` or empty."""
        return "preempted" if self.is_preempted else "interrupted" if self.is_set else ""

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Work that SIGTERM ends with `Preempted`, until `commit`."""
        try:
            self._can_drop = True
            if self.is_preempted:
                raise Preempted
            yield
        finally:
            self._can_drop = False

    def commit(self) -> None:
        """SIGTERM no longer ends this work."""
        self._can_drop = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._preempt()
        elif not self.is_set:
            self.is_set = True
            self._say("interrupted: finishing this step first; press Ctrl-C again to stop at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _preempt(self) -> None:
        if not self.is_preempted:
            self.is_set = self.is_preempted = True
            limit = "" if self._seconds is None else f", within {self._seconds:g} s"
            self._say(f"SIGTERM: saving and stopping{limit}")
        if self._can_drop:
            raise Preempted

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the signal may come in the middle of a print, and prints do not nest
            self._note(text)


class _Deadline:
    """Ends the process some time after SIGTERM, even where the main thread hangs and runs no Python handler."""

    def __init__(self, seconds: float):
        self._seconds, self._cancelled = seconds, threading.Event()
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def _wait(self) -> None:
        while numbers := self._signals.recv(16):  # one byte a signal
            if signal.SIGTERM in numbers and not self._cancelled.wait(self._seconds):
                text = (
                    f"SIGTERM {self._seconds:g} s ago: not saved in time; the same command resumes where it last saved"
                )
                with suppress(OSError):
                    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
                os._exit(PREEMPTED)

    def cancel(self) -> None:
        self._cancelled.set()
        signal.set_wakeup_fd(self._before)
        self._wakeup.close()  # the thread reads the end, and ends
