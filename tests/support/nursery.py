"""Commands in processes that start at once: forked from one that has imported everything.

    with Nursery() as nursery:
        ended = nursery.run("train", "sokoban", "model_path=pocket")        # as `python -m ragen train …`
        child = nursery.start("train", …)
        child.wait_for("rollout"), child.kill(), child.end()

A child says in a small file which phase of training it is in, so that a test can choose its moment, and can tell
afterwards where a kill fell.
"""

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import PATIENCE

SOURCES = Path(__file__).parents[2] / "src"
BETWEEN = "between"  # no phase
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Ended:
    status: int  # as a shell shows it; negative: killed by a signal
    out: str
    err: str


class Nursery:
    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.children = []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *exception):
        for child in self.children:  # those of tests that failed
            child.kill()
        self.server.stdin.close()
        self.server.wait(PATIENCE)
        self.folder.cleanup()

    def ask(self, **request):
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def start(self, *words, **options):
        """Options: those of `live`."""
        log = Path(self.folder.name) / str(len(self.children))
        log.mkdir()
        for name in ("out", "err", "phase"):
            (log / name).touch()
        self.children.append(Child(self, self.ask(words=list(map(str, words)), log=str(log), **options), log))
        return self.children[-1]

    def run(self, *words, **options):
        return self.start(*words, **options).end()


class Child:
    def __init__(self, nursery, pid, log):
        self.nursery, self.pid, self.log = nursery, pid, log
        self.handle = os.pidfd_open(pid)

    @property
    def phase(self):
        """The phase it is in, or was in when it ended."""
        return (self.log / "phase").read_text().strip()

    @property
    def out(self):
        return (self.log / "out").read_text()

    def has_ended(self, seconds=0.0):
        """Whether it ends within `seconds`."""
        return self.handle < 0 or bool(select.select([self.handle], [], [], seconds)[0])

    def wait_until(self, condition):
        """Whether the condition holds before it ends."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.has_ended(0.001):
                return condition()
            assert time.monotonic() < deadline, f"stuck in {self.phase}:\n{self.out}"
        return True

    def wait_for(self, phase, times=1):
        """Whether it enters a phase, for the n-th time from now, before it ends."""
        for _ in range(times):
            if not (self.wait_until(lambda: self.phase != phase) and self.wait_until(lambda: self.phase == phase)):
                return False
        return True

    def send(self, number):
        signal.pidfd_send_signal(self.handle, number)

    def kill(self):
        """Kill -9; returns the phase that it was in, or None if it had ended by itself."""
        if self.has_ended():
            return None
        self.send(signal.SIGKILL)
        return self.phase if self.end().status == -signal.SIGKILL else None

    def end(self):
        """Wait for its end, if it has not come yet."""
        assert self.has_ended(PATIENCE), f"stuck in {self.phase}:\n{self.out}"
        if self.handle >= 0:
            status = self.nursery.ask(wait=self.pid)
            os.close(self.handle)
            self.handle = -1
            self.ended = Ended(os.waitstatus_to_exitcode(status), self.out, (self.log / "err").read_text())
        return self.ended


# --- in the other process -----------------------------------------------------------------------------------------


def serve():
    import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(json.dumps(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(live(**request))
        print(json.dumps(pid), flush=True)


def import_everything():
    """Also what is imported on first use. No thread may be there when a child is forked: nothing is computed."""
    from ragen import cli  # noqa: F401
    from ragen.checkpoint.parts import part_of
    from ragen.config.compose import resolve
    from ragen.config.schema import Optimizer
    from ragen.model.load import find_model, load_model
    from ragen.train import trainer  # noqa: F401
    from ragen.train.optimizer import MasterAdamW

    loaded = load_model(find_model("pocket"))
    MasterAdamW(loaded.model.parameters(), Optimizer(), 1)
    part_of(loaded)
    resolve(["sokoban"], environ={})


def live(words, log, environment=None, code="", max_file_size=None, obey_permissions=False):
    """Run the command, or some code instead. Returns the exit status.

    `max_file_size` in bytes stands for a full disk. `obey_permissions`: a superuser may write anywhere, until then.
    """
    die_with_parent()
    log = Path(log)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(log / name, os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment or {})
    tell_phases(os.open(log / "phase", os.O_WRONLY))
    if max_file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_size, max_file_size))
    if obey_permissions:
        drop_capabilities()
    try:
        status = exec(code, {}) if code else sys.modules["ragen.cli"].main(words)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


def tell_phases(descriptor):
    from ragen.run.run_logger import RunLogger

    original, inside = RunLogger.phase, [BETWEEN]

    def tell():
        os.pwrite(descriptor, inside[-1].ljust(16).encode(), 0)

    @contextmanager
    def phase(self, name, total=None):
        inside.append(name)
        tell()
        try:
            with original(self, name, total):
                yield
        finally:
            inside.pop()
            tell()

    RunLogger.phase = phase
    tell()


def die_with_parent():
    """A stuck child must not outlive its test."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def drop_capabilities():
    """From now on permissions hold, also for the superuser."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    serve()
