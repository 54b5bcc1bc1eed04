"""Processes that a test starts and that cannot make it hang.

with started([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "ready\n"
with lock_holder(path, note="first") as process: …        # another process holds the lock
"""

import subprocess
import sys
import threading
from contextlib import contextmanager

PATIENCE = 500  # seconds after which a process is taken for stuck: less than the time limit of any test

HOLDER = """
import sys
from pathlib import Path
from ragen.store.lock import locked
with locked(Path(sys.argv[1]), note=sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def started(command, **options):
    """A process that is killed when the block ends, or when it is stuck: reads of its output then end too."""
    with subprocess.Popen(command, **options) as process:
        limit = threading.Timer(PATIENCE, process.kill)
        limit.daemon = True
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


@contextmanager
def lock_holder(path, note=""):
    """A process that holds a lock until it is killed or its input ends."""
    pipe = subprocess.PIPE
    with started([sys.executable, "-c", HOLDER, str(path), note], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
