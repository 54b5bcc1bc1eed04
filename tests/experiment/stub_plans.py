"""Small plans of runs that are no training, and a cluster that is no Ray. Imported by the tests of this folder."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragen.experiment import cluster
from ragen.experiment.plan import Options, Plan
from ragen.store.sweep_results import Cell

SOURCE = str(Path(cluster.__file__).parents[2])

FIELDS = ("value", "train_time", "eval_time", "total_time", "wall_time", "gpu", "status")


def make_cell(name, group="", fields=None, **changes):
    folder = Path("logs") / "stub"
    given = {
        "name": name,
        "label": name,
        "group": group,
        "start": ("sokoban",),
        "overrides": (f"x={name}",),
        "num_gpus": 1,
        "seed": None,
        "log_path": folder / f"{name}.log",
        "result_path": folder / f"{name}.result",
        "checkpoint_dir": Path("saved") / name,
        "wandb_project": "stubs",
        "fields": (("value", name),) if fields is None else fields,
    }
    return Cell(**(given | changes))


def make_plan(cells, options=None, **changes):
    cells = tuple(make_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    given = {
        "name": "stub_sweep",
        "title": "Stub sweep",
        "header": ("values: some",),
        "cells": cells,
        "batches": (tuple(range(len(cells))),),
        "summary_path": Path("logs/stub.log"),
        "summary_fields": FIELDS,
        "options": options or Options(gpus=("cpu",)),
    }
    return Plan(**(given | changes))


def python(code):
    """A command for every cell: `code` sees `name` and `folder`, the run folder, which exists."""
    start = "import json, os, pathlib, signal, sys, time\nname = sys.argv[1]\nfolder = pathlib.Path('saved') / name\n"
    start += "folder.mkdir(parents=True, exist_ok=True)\nprint(f'run folder: {folder}', flush=True)\n"
    return lambda cell, devices: [sys.executable, "-I", "-c", start + code, cell.name]


class FakeCluster:
    """Runs nothing. A run ends as `outcomes` says, in turn: an exit status, a result, or None for one that is lost.

    `started` lists (name, devices) in order; at most `most` runs were there at once.
    """

    is_own = True

    def __init__(self, outcomes=None, nodes=("here",), write=lambda job: None):
        self.outcomes = {name: list(ends) for name, ends in (outcomes or {}).items()}
        self.alive = list(nodes)
        self.started, self.jobs, self.most, self.has_gone = [], [], 0, False
        self.write = write
        self.on_wait = lambda: None
        self._open = {}

    @contextmanager
    def connected(self, address, num_devices):
        self.address = address
        yield self

    def is_gone(self):
        return self.has_gone

    def nodes(self):
        return [cluster.Node(name, name, "10.0.0.1", 0) for name in self.alive]

    def start(self, job, slot):
        name = Path(job["log"]).stem
        self.started.append((name, tuple(device.name for device in slot)))
        self.jobs.append(job)
        Path(job["log"]).write_text(f"run folder: saved/{name}\n")
        self.write(job)
        handle = object()
        self._open[handle] = name
        self.most = max(self.most, len(self._open))
        return handle

    def wait(self, handles, seconds):
        self.on_wait()
        return list(handles)[:1]

    def result(self, handle):
        name = self._open.pop(handle)
        ends = self.outcomes.get(name, [0])
        end = ends.pop(0) if len(ends) > 1 else ends[0]
        return end if end is None or isinstance(end, dict) else {"status": end, "started": 100.0, "ended": 141.7}

    def stop(self, handles, at_once=False):
        pass


# --- looking ------------------------------------------------------------------------------------------------------


def wait_for(condition, what, pause=0.1):
    """No promise about time: a machine may be slow, but not for ever."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if condition():
            return
        time.sleep(pause)
    pytest.fail(f"still waiting for {what}")


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before the file is opened, and between that and reading it
        return False
    return state != "Z"


def summary():
    return Path("logs/stub.log").read_text()


def result_lines(text=None):
    """The lines of runs, without the closing block."""
    lines = (summary() if text is None else text).partition("=== Stub sweep Completed")[0].splitlines()
    return [line for line in lines if "status=" in line and not line.startswith("Skipping")]
