"""The guard of a run: a process that starts it, ends it on request, and kills it when nobody watches any more.

    python -I run_guard.py                  # reads a job from stdin, see `run_process.job`; answers on stdout

A run dies with its guard (`ragen.lifeline`), and a guard ends its run when its watcher is gone: nothing is left,
whichever of them is killed. A lock beside the log is held by the guard and by the run itself, so it is free once both
are gone: nobody starts a second run before. A node needs only Python and the directory of the experiment.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ragen import lifeline

PAUSE = 0.1
PATIENCE = 60.0  # seconds that an earlier run with the same log may take to end
STOPPED = "stopped before it started"


class WatcherGone(Exception):
    pass


class Refused(Exception):
    """Why a run does not start."""


def guard() -> None:
    if os.fork():
        os._exit(0)  # not a child of the watcher: when a watcher ends, Ray kills its children, and the guard is needed
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in its workers, and children would inherit that
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a child would inherit
    try:
        job = _read_job()
        with open(job["log"], "ab") as log, _locked(Path(job["lock"])) as lock:
            if not job["append"]:
                log.truncate(0)
            ended = _run(job, log, lock)
    except WatcherGone:
        return
    except Refused as error:
        ended = {"error": str(error)}
    except OSError as error:
        ended = {"error": f"{error.strerror or error}: {error.filename or 'the log'}"}
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(ended).encode())


def _read_job() -> dict[str, Any]:
    content = b""
    while b"\n" not in content:
        content += _message()
    line, _, request = content.partition(b"\n")
    if request:
        raise Refused(STOPPED)
    return json.loads(line)


def _message() -> bytes:
    part = os.read(0, 1 << 16)
    if not part:
        raise WatcherGone
    return part


def _is_told(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock of a run, once an earlier run has ended. The file is removed at the end."""
    deadline = time.monotonic() + PATIENCE
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):  # not a removed one
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Refused(f"an earlier run has not ended: it holds {path}") from None
        os.close(lock)
        if _is_told(PAUSE):
            _message()
            raise Refused(STOPPED)
    try:
        yield lock
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _run(job: dict[str, Any], log: IO[bytes], lock: int) -> dict[str, Any]:
    started, deadline = time.time(), None
    end, rope = os.pipe()  # the kernel closes `rope` when this process ends, however it ends
    child = subprocess.Popen(
        job["command"],
        cwd=job["folder"],
        env=job["environment"] | {lifeline.VARIABLE: str(end)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(end, lock),
        preexec_fn=lambda: lifeline.bind(end),
    )
    os.close(end)
    with contextlib.suppress(WatcherGone):
        while child.poll() is None and (deadline is None or time.monotonic() < deadline):
            if _is_told(PAUSE):
                child.send_signal(signal.SIGTERM if b"terminate" in _message() else signal.SIGINT)
                deadline = deadline or time.monotonic() + job["grace"]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # also what it may have left behind
    status = child.wait()
    lifeline.kill_marked(job["mark"])
    os.close(rope)
    return {"status": status, "started": started, "ended": time.time()}


if __name__ == "__main__":
    guard()
