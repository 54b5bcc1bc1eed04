"""A sweep of tiny training runs under fire: guards, schedulers and runs are killed at random moments.

The same command follows each kill. In the end the sweep is as whole as one that nobody has disturbed.
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from processes import PATIENCE
from stub_plans import SOURCE, wait_for
from without_clock import metrics_without_clock

from ragen import lifeline
from ragen.store import manifest
from ragen.store.sweep_results import latest_lines, read_record, status_of

KILLS = 20
SWEEP = """
import sys
from stub_plans import make_cell, make_plan
from ragen.experiment import scheduler
from ragen.experiment.plan import Options
SMALL = (
    "model_path=pocket", "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "trainer.save_freq=1",
    "es_manager.val.env_groups=4", "ppo_mini_batch_size=4", "trainer.test_freq=20", "trainer.logger=[console]",
    "trainer.total_training_steps=15",
)
cells = [
    make_cell(name, start=("two_armed_bandit",), overrides=(
        *SMALL, f"trainer.default_local_dir=saved/{name}", f"trainer.experiment_name={name}", f"seed.train={seed}"
    ))
    for seed, name in enumerate("abc")
]
sys.exit(scheduler.run(make_plan(cells, Options(gpus=("cpu", "cpu"), resume=True))))
"""


@pytest.fixture
def start(tmp_path):
    """Start the sweep in a folder; returns the process, and the mark of everything that it starts."""
    paths = os.pathsep.join([SOURCE, str(Path(__file__).parent)])

    def start(folder):
        mark = uuid.uuid4().hex
        environment = os.environ | {"PYTHONPATH": paths, "STORM": mark, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        (tmp_path / folder).mkdir(exist_ok=True)
        with open(tmp_path / folder / "out", "ab") as out:
            sweep = subprocess.Popen(
                [sys.executable, "-c", SWEEP], cwd=tmp_path / folder, env=environment, stdout=out, stderr=out
            )
        return sweep, f"STORM={mark}"

    return start


def processes(mark, kind):
    """The guards, the watchers or the runs of a sweep."""
    words = {"guard": b"run_guard.py", "watcher": b"ray::run_child", "run": b"\0ragen\0train\0"}
    found = []
    for pid in lifeline._marked(mark.encode()):
        try:
            if words[kind] in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def run_names(mark):
    """The cells whose runs are alive."""
    found = []
    for pid in processes(mark, "run"):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        found += [word for word in words if word.startswith("trainer.experiment_name=")]
    return found


def num_steps(root):
    return sum(path.read_bytes().count(b"\n") for path in root.glob("saved/*/metrics.jsonl"))


def comparable(root, name):
    folder = root / "saved" / name
    latest = manifest.latest(folder)
    return (
        latest.name,
        metrics_without_clock(folder),
        {path.name: path.read_bytes() for path in sorted(latest.rglob("*.safetensors"))},
    )


def next_moment(dice, root):
    """When the next kill is due: soon, while something starts, or after a further step."""
    until = time.monotonic() + (dice.uniform(0.0, 6.0) if dice.random() < 0.4 else 600.0)
    steps = num_steps(root) + dice.randint(1, 2)
    return lambda: time.monotonic() > until or num_steps(root) >= steps


def kill_one(dice, sweep, mark):
    """What was killed; None if there was nothing of that kind."""
    kind = dice.choice(["guard", "guard", "guard", "watcher", "watcher", "run", "run", "sweep"])
    found = [sweep.pid] if kind == "sweep" else processes(mark, kind)
    try:
        os.kill(dice.choice(found), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return None
    return kind


@pytest.mark.slow
def test_a_sweep_survives_random_kills_as_if_nothing_had_happened(start, tmp_path):
    assert start("calm")[0].wait(PATIENCE) == 0
    dice, kills, status = random.Random(0), [], None
    while status != 0:
        sweep, mark = start("storm")
        moment = next_moment(dice, tmp_path / "storm")
        while sweep.poll() is None:
            runs = run_names(mark)
            assert len(runs) == len(set(runs)) <= 2, "two slots, and no run twice"
            if len(kills) < KILLS and moment():
                kills += filter(None, [kill_one(dice, sweep, mark)])
                moment = next_moment(dice, tmp_path / "storm")
            time.sleep(0.1)
        status = sweep.wait()
        assert status in (0, 1, -signal.SIGKILL)
        wait_for(lambda mark=mark: not list(lifeline._marked(mark.encode())), "the end of everything")
    assert len(kills) == KILLS and set(kills) == {"guard", "watcher", "run", "sweep"}
    for name in "abc":
        assert comparable(tmp_path / "storm", name) == comparable(tmp_path / "calm", name), kills
    record = read_record(tmp_path / "storm/logs/stub.json")
    assert sorted(record.cells) == ["a", "b", "c"]
    text = (tmp_path / "storm/logs/stub.log").read_text()
    lines = latest_lines(record.cells.values(), record.fields, text)
    assert {status_of(line) for line in lines.values()} == {"success"} and sorted(lines) == ["a", "b", "c"]
    assert text.splitlines()[-1] == "Total: 3 | Success: 3 | Failed: 0"
    assert sorted(path.name for path in (tmp_path / "storm/saved").iterdir()) == ["a", "b", "c"]
