"""Experiments on Ray, with children that are real processes, up to tiny training runs."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from processes import PATIENCE, started
from stub_plans import SOURCE, is_alive, make_cell, make_plan, python, result_lines, summary, wait_for

from ragen import lifeline
from ragen.experiment import scheduler
from ragen.experiment.cluster import SETTINGS
from ragen.experiment.plan import Options
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import status_of


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", SOURCE)


MEET = """
if name == "c":
    sys.exit("it was meant to fail")
(folder / "here").touch()
for _ in range(1200):
    if all((pathlib.Path("saved") / other / "here").exists() for other in "ab"):
        sys.exit(0)
    time.sleep(0.05)
sys.exit("the other one never came")
"""


def test_two_slots_run_two_at_once_on_this_machine(capfd):
    """Each waits for the other, and the third comes after; Ray itself says nothing."""
    assert scheduler.run(make_plan("abc", Options(gpus=("cpu", "cpu"))), python(MEET)) == 1
    assert [status_of(line) for line in result_lines()] == ["success", "success", "fail"]
    assert "error: exit status 1: run folder: saved/c / it was meant to fail" in summary()
    said = capfd.readouterr()
    assert said.err == "" and "ray" not in said.out.lower()


SWEEP = """
import sys
from stub_plans import make_plan, python
from ragen import lifeline
from ragen.experiment import scheduler
from ragen.experiment.plan import Options
code = "(folder / 'pid').write_text(str(os.getpid()))\\n"
code += "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\\n"
code += "time.sleep(0 if name == 'a' or (folder / 'before').exists() else (folder / 'before').touch() or 600)"
options = Options(gpus=("cpu", "cpu"), resume="--resume" in sys.argv)
sys.exit(scheduler.run(make_plan("abc", options), python(code)))
"""


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_resume_continues(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, str(Path(__file__).parent)]))
    with started([sys.executable, "-c", SWEEP], start_new_session=True) as sweep:
        files = [Path("saved") / name / "pid" for name in "abc"]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files), "three runs")
        wait_for(lambda: Path("saved/b/before").exists() and Path("saved/c/before").exists(), "two of them to sleep")
        os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: everyone hears it
        assert sweep.wait(PATIENCE) == 130
    assert not any(is_alive(int(file.read_text())) for file in files)
    assert [status_of(line) for line in result_lines(summary())] == ["success"]
    assert subprocess.run([sys.executable, "-c", SWEEP, "--resume"], timeout=PATIENCE).returncode == 0
    assert summary().splitlines()[-1] == "Total: 3 | Success: 3 | Failed: 0"


STOPPED = """
import os, signal, subprocess
from ragen.experiment.cluster import connected
with connected(None, 1) as cluster:
    assert cluster.is_own and not cluster.is_gone()
    raylet = subprocess.run(["pgrep", "-P", str(os.getpid()), "-x", "raylet"], capture_output=True, text=True)
    os.kill(int(raylet.stdout), signal.SIGKILL)
    while not cluster.is_gone():
        pass
    os._exit(7)
"""


def test_ray_that_is_stopped_from_outside_is_noticed():
    """In a process that may end with it. Its output is not a pipe: parts of Ray may hold that longer."""
    with open("out", "w") as out:
        ended = subprocess.run([sys.executable, "-c", STOPPED], timeout=PATIENCE, stdout=out, stderr=out)
    assert ended.returncode == 7, Path("out").read_text()


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, of which tests may take the second away."""
    from ray.cluster_utils import Cluster

    os.environ |= SETTINGS
    two = Cluster()
    try:
        _add_node(two, include_dashboard=False)
        yield two
    finally:
        two.shutdown()


def _add_node(cluster, **settings):
    """Ray gives a node half a minute to start, which on a busy machine may not be enough."""
    for _ in range(3):
        try:
            return cluster.add_node(**NODE, **settings)
        except Exception as error:  # a plain one
            problem = error
    raise problem


NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
SMALL = (
    "model_path=pocket", "es_manager.train.env_groups=2", "es_manager.train.group_size=4",
    "es_manager.val.env_groups=4", "ppo_mini_batch_size=4", "trainer.test_freq=20", "trainer.logger=[console]",
)  # fmt: skip


def training_cell(name, *words):
    given = (*SMALL, f"trainer.default_local_dir=saved/{name}", f"trainer.experiment_name={name}", *words)
    return make_cell(name, start=("two_armed_bandit",), overrides=given)


@pytest.mark.slow
def test_training_runs_succeed_fail_stop_early_and_are_killed_and_resumed(cluster, capfd):
    node = _add_node(cluster)
    no_group = ("metric=length", "selection_eps=100000", "empty_stop_steps=1")
    cells = [
        training_cell("killed", "trainer.total_training_steps=12", "trainer.save_freq=1"),
        training_cell("good", "trainer.total_training_steps=2"),
        training_cell("bad", "trainer.total_training_steps=2", "model_path=no/such/model"),
        training_cell("empty", *(f"actor_rollout_ref.rollout.rollout_filter_{word}" for word in no_group)),
    ]
    folder = RunFolder("saved/killed")

    def kill():
        wait_for(lambda: (folder.path / "global_step_2").exists() and folder.live_owner(), "the second step")
        os.kill(int(folder.live_owner().split()[1]), signal.SIGKILL)  # process 4711 on host

    threading.Thread(target=kill, daemon=True).start()
    assert scheduler.run(make_plan(cells, Options(gpus=("cpu",), ray_address=cluster.address))) == 1
    assert {line.partition(" ")[0]: status_of(line) for line in result_lines()} == {
        "value=killed": "fail",
        "value=good": "success",
        "value=bad": "fail",
        "value=empty": "early_stopped:empty_filtered_steps",
    }
    assert "error: killed by signal 9" in summary() and "no/such/model" in summary()
    good = next(line for line in result_lines() if "value=good" in line)
    assert "N/A" not in good and "gpu=cpu" in good
    assert folder.read_metrics().last_step() < 12

    capfd.readouterr()
    options = Options(gpus=("cpu",), ray_address=cluster.address, resume=True)
    assert scheduler.run(make_plan(cells, options)) == 1
    out = capfd.readouterr().out
    assert "start killed" in out and "start bad" in out and "start good" not in out and "start empty" not in out
    assert "resumes after step" in cells[0].log_path.read_text()
    assert [row["step"] for row in folder.read_metrics().rows] == list(range(13))
    assert summary().splitlines()[-1] == "Total: 4 | Success: 2 | Failed: 2"
    cluster.remove_node(node)


# A first try waits until `go` exists, a second one ends at once.
TWICE = """
if (folder / "once").exists():
    sys.exit(0)
(folder / "once").write_text(str(os.getpid()))
for _ in range(6000):
    if pathlib.Path("go").exists():
        sys.exit(0)
    time.sleep(0.1)
sys.exit("nobody was lost")
"""


def first_tries(names):
    """The processes of the first tries of these runs, once they are all there."""
    files = [Path(f"saved/{name}/once") for name in names]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), f"the runs {names}")
    return [int(file.read_text()) for file in files]


@pytest.mark.slow
def test_a_run_on_a_node_that_is_lost_runs_elsewhere(cluster, capfd):
    node = _add_node(cluster)

    def lose():
        pids = first_tries("ab")  # one on each node
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: sum(map(is_alive, pids)) == 1, "the end of what was lost")
        Path("go").touch()

    threading.Thread(target=lose, daemon=True).start()
    assert scheduler.run(make_plan("ab", Options(gpus=("cpu",), ray_address=cluster.address)), python(TWICE)) == 0
    out = capfd.readouterr().out
    assert out.count("its watcher was lost") == 1 and out.count("] start ") == 3
    assert [status_of(line) for line in result_lines()] == ["success", "success"]


@pytest.mark.slow
def test_a_run_whose_watcher_is_killed_begins_again_and_its_first_try_is_gone(cluster, capfd, monkeypatch):
    monkeypatch.setattr(scheduler, "NODE_PATIENCE", 1.0)
    raylet = cluster.head_node.all_processes["raylet"][0].process.pid

    def kill():
        first_tries("a")
        found = subprocess.run(["pgrep", "-P", str(raylet), "-f", "ray::run_child"], capture_output=True, text=True)
        os.kill(int(found.stdout), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert scheduler.run(make_plan("a", Options(gpus=("cpu",), ray_address=cluster.address)), python(TWICE)) == 0
    assert "Again: a (its watcher was lost on" in capfd.readouterr().out
    assert not is_alive(int(Path("saved/a/once").read_text()))


# --- killed and terminated ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_guard_is_killed_begins_again_when_its_first_try_is_gone(capfd):
    # A process that has ended and is still listed has no command line.
    old = "[path.read_bytes() for path in pathlib.Path('/proc', (folder / 'once').read_text()).glob('cmdline')]"
    code = TWICE.replace("sys.exit(0)", f"sys.exit(int(any({old})))", 1)

    def kill():
        (run,) = first_tries("a")
        guard = int(Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"run_guard.py" in Path(f"/proc/{guard}/cmdline").read_bytes()
        os.kill(guard, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert scheduler.run(make_plan("a"), python(code)) == 0
    assert "Again: a (its guard was killed" in capfd.readouterr().out
    assert "Again: a (its guard was killed" in summary() and len(result_lines()) == 1


TERMINATED = SWEEP.replace("signal.SIGINT, lambda *_: sys.exit(130)", "signal.SIGTERM, lambda *_: sys.exit(143)")


@pytest.mark.slow
def test_sigterm_to_a_sweep_reaches_its_runs_and_resume_continues(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, str(Path(__file__).parent)]))
    in_background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}  # as `bash script.sh &` does
    with started([sys.executable, "-c", TERMINATED], **in_background) as sweep:
        wait_for(lambda: Path("saved/b/before").exists() and Path("saved/c/before").exists(), "two of them to sleep")
        sweep.terminate()
        assert sweep.wait(PATIENCE) == 143
    files = [Path("saved") / name / "pid" for name in "abc"]
    assert not any(is_alive(int(file.read_text())) for file in files)
    assert sorted(status_of(line) for line in result_lines(summary())) == ["preempted", "preempted", "success"]
    assert subprocess.run([sys.executable, "-c", TERMINATED, "--resume"], timeout=PATIENCE).returncode == 0
    assert summary().splitlines()[-1] == "Total: 3 | Success: 3 | Failed: 0"


CONNECTED = """
import time
from ragen.experiment.cluster import connected
with connected(None, 1):
    print("connected", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_killed_sweep_leaves_nothing_of_its_ray(is_connected, monkeypatch):
    """Also while Ray starts. Its own agents would stay for half a minute."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("KILLED", mark)
    with started([sys.executable, "-c", CONNECTED], stdout=subprocess.PIPE) as sweep:
        if is_connected:
            assert sweep.stdout.readline() == b"connected\n"
        else:
            wait_for(lambda: len(list(lifeline._marked(f"KILLED={mark}".encode()))) > 2, "the first parts of Ray")
        found = list(lifeline._marked(f"KILLED={mark}".encode()))
        cleanup = [pid for pid in found if b"ray_cleanup" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(cleanup) == 1 and len(found) > 2
    wait_for(lambda: not is_alive(cleanup[0]), "the end of the cleanup")
    assert not list(lifeline._marked(f"KILLED={mark}".encode()))


@pytest.mark.slow
def test_workers_die_with_a_launcher_that_is_killed(monkeypatch):
    """Started by hand: there is no guard."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("KILLED", mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [
        *SMALL,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=500",
        "trainer.default_local_dir=saved/x",
    ]
    command = [sys.executable, "-m", "ragen", "train", "two_armed_bandit", *words]
    with started(command, stdout=subprocess.DEVNULL):
        wait_for(lambda: RunFolder("saved/x").metrics_path.exists(), "the first step")
        assert len(list(lifeline._marked(f"KILLED={mark}".encode()))) >= 3
    wait_for(lambda: not list(lifeline._marked(f"KILLED={mark}".encode())), "the end of the workers")
