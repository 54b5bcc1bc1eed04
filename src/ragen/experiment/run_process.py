"""One run as a child process that cannot outlive its watcher.

    ended = run_child(job(["python", "-m", "ragen", "train", "sokoban"], Path("logs/one.log"), dict(os.environ)))
    ended["status"]                     # its exit status; negative: the signal that killed it

Between the watcher and the child stands a guard: this file, run as a script, which reads from a pipe. A message asks
the child to end (SIGINT, time to save, then SIGKILL); a KeyboardInterrupt in `run_child` sends it, and the function
still returns how the child ended. The end of the pipe means that the watcher is gone: the child is killed at once, with
everything that it has started. A node needs only the standard library and the directory of the experiment.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

GRACE = 120.0  # seconds to end after SIGINT: the run finishes its step and saves
PAUSE = 0.1
LOOK = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]))
"""

Job = dict[str, Any]


def job(
    command: Sequence[str], log: Path, environment: Mapping[str, str], append: bool = False, grace: float = GRACE
) -> Job:
    """Everything that a node needs to start a child. Its output goes to `log`, which is emptied unless `append`."""
    return {
        "command": list(command),
        "folder": os.getcwd(),
        "log": str(log),
        "environment": dict(environment),
        "append": append,
        "grace": grace,
        "guard": [sys.executable, "-I", str(Path(__file__).resolve())],
    }


def run_child(job: Job, on_pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a child to its end, and `on_pause` meanwhile: `status`, `started`, `ended`; or `error` if it cannot start."""
    with subprocess.Popen(
        job["guard"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=job["folder"], start_new_session=True
    ) as guard:
        assert guard.stdin and guard.stdout
        _tell(guard.stdin, json.dumps(job))
        answer = b""
        while True:
            try:
                on_pause()
                if select.select([guard.stdout], [], [], PAUSE)[0]:
                    part = os.read(guard.stdout.fileno(), 1 << 16)
                    if not part:
                        break
                    answer += part
            except KeyboardInterrupt:
                _tell(guard.stdin, "stop")
    return json.loads(answer) if answer else {"error": "the guard of the run was killed"}


def _tell(guard: IO[bytes], text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has just ended
        guard.write(f"{text}\n".encode())
        guard.flush()


def gpu_names(python: str, devices: Sequence[str]) -> list[str]:
    """The names that torch gives to these devices, in order, up to the first that does not exist."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    done = subprocess.run([python, "-c", LOOK], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["torch failed"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def guard() -> None:
    if os.fork():
        os._exit(0)  # not a child of the watcher: when a watcher ends, Ray kills its children, and the guard is needed
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in its workers, and children would inherit that
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a child would inherit
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            return  # the watcher is gone before it sent the job
        line += part
    try:
        ended = _watched(json.loads(line))
    except OSError as error:
        ended = {"error": f"{error.strerror or error}: {error.filename or 'the log'}"}
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(ended).encode())


def _watched(job: Job) -> dict[str, Any]:
    started, deadline = time.time(), None
    with open(job["log"], "ab" if job["append"] else "wb") as log:
        child = subprocess.Popen(
            job["command"],
            cwd=job["folder"],
            env=job["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while child.poll() is None:
        if select.select([0], [], [], PAUSE)[0]:
            if not os.read(0, 1 << 16):
                break
            child.send_signal(signal.SIGINT)
            deadline = deadline or time.monotonic() + job["grace"]
        if deadline is not None and time.monotonic() > deadline:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # also what it may have left behind
    return {"status": child.wait(), "started": started, "ended": time.time()}


if __name__ == "__main__":
    guard()
