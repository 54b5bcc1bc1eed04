"""Processes that end with the one that started them, even if that one is killed without warning (SIGKILL).

    end, lifeline = os.pipe()                                              # in the parent, which keeps `lifeline`
    subprocess.Popen(command, env={**os.environ, VARIABLE: str(end)}, pass_fds=[end])
    hold()                                                                 # in the child, before anything else

The parent holds one end of a pipe, the child the other one. However the parent ends, the pipe closes. On Linux the
kernel then kills the child, also one that hangs; elsewhere a thread of the child does. The leader of a process group
takes the whole group with it. `kill_marked` finds what has left the group, by its environment. Standard library only.
"""

import fcntl
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "RAGEN_LIFELINE"  # the number of the child's end of the pipe
PAUSE = 0.1


def hold() -> None:
    """Die with the process that passed a lifeline, or with torchrun. Otherwise this does nothing."""
    end = int(os.environ.pop(VARIABLE, -1))  # children do not inherit it
    if _is_pipe(end):
        os.set_inheritable(end, False)
        bind(end) if sys.platform == "linux" else _in_a_thread(_wait_for_end, end)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun leaves its workers behind when it is killed
        _in_a_thread(_wait_for_parent, os.getppid())


def _is_pipe(end: int) -> bool:
    """A program between parent and child may have closed it."""
    try:
        return stat.S_ISFIFO(os.fstat(end).st_mode)
    except OSError:
        return False


def _in_a_thread(wait: Callable[[int], None], on: int) -> None:
    threading.Thread(target=wait, args=(on,), name="lifeline", daemon=True).start()


def bind(end: int) -> None:
    """Ask the kernel of Linux to kill this process, or the group that it leads, when the pipe closes."""
    if sys.platform == "linux":
        fcntl.fcntl(end, fcntl.F_SETOWN, _target())
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)
        if select.select([end], [], [], 0)[0]:  # it closed before
            _die()


def _wait_for_end(end: int) -> None:
    os.read(end, 1)  # nobody writes: it returns when the pipe closes
    _die()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PAUSE)
    _die()


def _die() -> None:
    os.kill(_target(), signal.SIGKILL)


def _target() -> int:
    """For `kill`: this process, or its group if it leads one."""
    return -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()


def kill_marked(mark: str, seconds: float = 10.0) -> None:
    """Kill every process of this user that was started with `mark` (`NAME=value`) in its environment.

    Only Linux shows the environment of other processes; elsewhere this does nothing.
    """
    deadline = time.monotonic() + seconds
    num_clean = 0  # looks in a row that found nothing: a process may just be starting another one
    while num_clean < 2 and time.monotonic() < deadline:
        found = list(_marked(mark.encode()))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        num_clean = 0 if found else num_clean + 1
        time.sleep(PAUSE if found else PAUSE / 10)


def _marked(mark: bytes) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_marked = mark in path.read_bytes().split(b"\0")  # a process that has ended has none
        except OSError:  # it is gone, or belongs to another user
            continue
        if is_marked and int(path.parent.name) != os.getpid():
            yield int(path.parent.name)
