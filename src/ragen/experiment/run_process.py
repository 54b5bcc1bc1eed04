"""One run as a child process that cannot outlive its watcher.

    ended = run_child(job(["python", "-m", "ragen", "train", "sokoban"], Path("logs/one.log"), dict(os.environ)))
    ended["status"]                     # its exit status; negative: the signal that killed it

Between the watcher and the child stands a guard (`run_guard.py`), which reads from a pipe. A message asks the child to
end (SIGINT, or SIGTERM if the file `job["terminate"]` exists; time to save; then SIGKILL); a SIGINT during `run_child`
sends it, and the function still returns how the child ended. The end of the pipe means that the watcher is
gone: the child is killed at once, with everything that it has started. If the guard is killed the child dies with it,
and `run_child` returns when it has: `lost`. This module is sent to nodes that have no ragen: standard library only.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

GRACE = 150.0  # seconds to end after SIGINT or SIGTERM: the run finishes its step and saves
PAUSE = 0.1
PATIENCE = 60.0  # seconds for a killed child to be gone
MARK = "RAGEN_RUN"
LOOK = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]))
"""

Job = dict[str, Any]


def job(
    command: Sequence[str], log: Path, environment: Mapping[str, str], append: bool = False, grace: float = GRACE
) -> Job:
    """Everything that a node needs to start a child. Its output goes to `log`, which is emptied unless `append`."""
    mark = uuid.uuid4().hex
    return {
        "command": list(command),
        "folder": os.getcwd(),
        "log": str(log),
        "lock": str(lock_path(log)),  # held while the child or its guard is alive
        "terminate": str(log.with_name(f".{log.name}.terminate")),  # exists: a request to stop is a SIGTERM
        "environment": {**environment, MARK: mark},
        "mark": f"{MARK}={mark}",  # all processes of the run have it in their environment
        "append": append,
        "grace": grace,
        "guard": [sys.executable, "-I", str(Path(__file__).resolve().with_name("run_guard.py"))],
    }


def lock_path(log: Path) -> Path:
    return log.with_name(f".{log.name}.lock")


def run_child(job: Job, on_pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a child to its end, and `on_pause` meanwhile: `status`, `started`, `ended`; or `error` if there is none."""
    with _taken_interrupts() as interrupts:
        answer = _watch(job, interrupts, on_pause)
        if answer:
            return json.loads(answer)
        _wait_for_the_end(os.path.join(job["folder"], job["lock"]))
    return {"error": "the guard of the run was killed, and the run with it", "lost": True}


@contextlib.contextmanager
def _taken_interrupts() -> Iterator[list[int]]:
    """A list that SIGINT is added to: a KeyboardInterrupt could come where nothing catches it.

    Shells start background jobs with SIGINT ignored, and Ray could not cancel those. Threads get no signals.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: one of C code


def _watch(job: Job, interrupts: list[int], on_pause: Callable[[], None]) -> bytes:
    """Start the guard, pass interrupts on, and return its answer; empty if it was killed."""
    terminate = os.path.join(job["folder"], job["terminate"])
    pipe = subprocess.PIPE  # not buffered: the guard may be killed at any moment
    with subprocess.Popen(
        job["guard"], bufsize=0, stdin=pipe, stdout=pipe, cwd=job["folder"], start_new_session=True
    ) as guard:
        assert guard.stdin and guard.stdout
        _tell(guard.stdin, json.dumps(job))
        answer = b""
        while True:
            if interrupts:
                interrupts.pop()
                _tell(guard.stdin, "terminate" if os.path.exists(terminate) else "stop")
            on_pause()
            if select.select([guard.stdout], [], [], PAUSE)[0]:
                part = os.read(guard.stdout.fileno(), 1 << 16)
                if not part:
                    return answer
                answer += part


def _tell(guard: IO[bytes], text: str) -> None:
    rest = memoryview(f"{text}\n".encode())
    with contextlib.suppress(BrokenPipeError):  # it has just ended
        while rest:  # a signal ends a write to a full pipe early, and a large environment fills it
            rest = rest[guard.write(rest) :]


def _wait_for_the_end(lock: str) -> None:
    """A killed process takes a moment to free its memory and devices."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with open(lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            time.sleep(PAUSE)


def gpu_names(python: str, devices: Sequence[str]) -> list[str]:
    """The names that torch gives to these devices, in order, up to the first that does not exist."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    done = subprocess.run([python, "-c", LOOK], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["torch failed"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
