"""Settings for all tests."""

import os
import signal

# Before torch is loaded, here and in every process that a test starts. With several threads the matrix library does not
# promise the same bits twice, and on a busy machine they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is loaded, where it is installed: its interpreter runs GPU kernels on a CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Started in the background by a shell, a process ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# No deadline: a slow machine is not a bug. Derandomized: a red test is red again on the next run.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")


SLOW_LIMIT = 1500  # seconds: a storm of kills on a busy machine takes longer than any quick test may


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))


@pytest.fixture(scope="session")
def nursery():
    """Commands in processes that start at once: see support/nursery.py."""
    from nursery import Nursery

    with Nursery() as started:
        yield started


@pytest.fixture
def impatient(monkeypatch):
    """A full disk is not waited for."""
    from ragen.store import full_disk

    monkeypatch.setattr(full_disk, "PATIENCE", 0.0)


@pytest.fixture
def folder(tmp_path):
    from ragen.store.run_folder import RunFolder

    return RunFolder(tmp_path / "run")
