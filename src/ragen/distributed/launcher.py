"""Start workers on this machine: one process each; they end together, with one exit status. No torch.

    if must_launch(num_workers=4):
        status = launch(4, 1, ["sokoban", "model_path=pocket"])      # ragen train sokoban model_path=pocket, four times

A worker reads RANK, LOCAL_RANK and WORLD_SIZE, as under torchrun, and finds the others through a directory (`SHARED`).
When one fails the others cannot continue: they get some time to end, then they are killed. Signals are forwarded. If
this process is killed, the workers die with it (`ragen.lifeline`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ragen import lifeline
from ragen.errors import ConfigError

SHARED = "RAGEN_WORKERS"  # a directory shared by all workers of one launch
MEETING, FAILED = "meeting", "failed"  # files in it: the rendezvous, and the rank of the first worker that failed
ENDINGS = (0, 3, 4, 130, 143)  # exit statuses of a run that ended normally: all its workers have the same
GRACE, IMPATIENCE = 20.0, 2.0  # seconds for workers to end: after one has failed, after a second Ctrl-C
PAUSE = 0.05


def must_launch(num_workers: int) -> bool:
    """Whether this process should start the workers instead of being one."""
    return num_workers > 1 and "RANK" not in os.environ


def launch(num_workers: int, num_nodes: int, arguments: Sequence[str]) -> int:
    """Run `ragen train` with these arguments in `num_workers` processes; returns the run's exit status."""
    if num_nodes > 1:
        raise ConfigError(
            f"trainer.nnodes={num_nodes}: start torchrun on every node yourself, for example\n"
            f"  torchrun --nnodes {num_nodes} --nproc-per-node {num_workers} --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:29500 -m ragen train {' '.join(arguments)}"
        )
    environment = dict(os.environ)
    # With one thread per core in each process, the workers would compete for the cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    command = [sys.executable, "-m", "ragen", "train", *arguments]
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as shared, _taken_signals() as signals, ExitStack() as lifelines:
        environment |= {SHARED: shared, "WORLD_SIZE": str(num_workers)}
        for rank in map(str, range(num_workers)):
            end, rope = os.pipe()  # `rope` closes with this process, and the worker dies
            lifelines.callback(os.close, rope)
            own = {"RANK": rank, "LOCAL_RANK": rank, lifeline.VARIABLE: str(end)}
            processes.append(subprocess.Popen(command, env=environment | own, pass_fds=[end]))
            os.close(end)
        return _status(_wait(processes, signals), Path(shared) / FAILED, signals)


def leave(status: int) -> int:
    """The exit status of a finished run; a launched worker exits with it at once.

    Everything is written by then; at a normal exit, communication threads sometimes abort the process.
    """
    if SHARED in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


@contextmanager
def _taken_signals() -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM are added to, instead of ending this process."""
    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen], signals: Sequence[int]) -> list[int | None]:
    """The exit statuses. Workers that still run long after another failed are killed: None.

    Signals are forwarded here, where all workers have started. A terminal sends Ctrl-C to every process, a scheduler
    perhaps only to this one. A worker that gets both must not take them for two: it gets SIGUSR1, which asks to stop
    and no more.
    """
    since: dict[float, float] = {}  # time limit -> when it started
    num_forwarded = 0
    while True:
        for number in signals[num_forwarded:]:
            num_forwarded += 1
            for process in processes:
                process.send_signal(signal.SIGUSR1 if number == signal.SIGINT else number)
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if not set(codes) <= {None, *ENDINGS}:
            since.setdefault(GRACE, time.monotonic())
        if signals.count(signal.SIGINT) > 1:
            since.setdefault(IMPATIENCE, time.monotonic())
        if any(time.monotonic() - start > limit for limit, start in since.items()):
            for process in processes:
                process.kill()
                process.wait()
            return codes
        time.sleep(PAUSE)


def _status(codes: Sequence[int | None], failed: Path, signals: Sequence[int]) -> int:
    """One exit status for all: that of the first worker that failed."""
    if signals and any(code is None or code < 0 for code in codes):
        print("interrupted", file=sys.stderr)
        return 128 + (signal.SIGTERM if signal.SIGTERM in signals else signal.SIGINT)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"worker {rank} was killed by signal {-code}", file=sys.stderr)
    first = codes[int(failed.read_text())] if failed.exists() else max(code or 0 for code in codes)
    return 1 if first is None or min(code or 0 for code in codes) < 0 else first
