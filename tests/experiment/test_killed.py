"""Whatever is killed or terminated, nothing of a run is left behind, and its cell runs again."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import started
from stub_plans import SOURCE, is_alive, make_plan, result_lines, summary, wait_for

from ragen import lifeline
from ragen.experiment import run_process, scheduler
from ragen.experiment.live import View
from ragen.experiment.plan import Options
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import status_of


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", SOURCE)


def a_job(code, **options):
    return run_process.job([sys.executable, "-c", code], Path("run.log"), os.environ, **options)


def watched(job):
    """A watcher in a thread; returns a function that waits for what it returns."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run_process.run_child(job)), daemon=True)
    thread.start()

    def result():
        thread.join(120)
        return results[0]

    return result


def processes(mark):
    return list(lifeline._marked(mark.encode()))


def guards():
    """The guards of this folder's runs."""
    here = Path.cwd()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"run_guard.py" in (path / "cmdline").read_bytes() and (path / "cwd").readlink() == here:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def kill_guards():
    for guard in guards():
        with suppress(ProcessLookupError):  # a run that has not started its program yet looks like its guard
            os.kill(guard, signal.SIGKILL)


# --- a run and its guard ------------------------------------------------------------------------------------------

# A run with a child in its group, and one that has left it.
FAMILY = """
import os, pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
pathlib.Path("part").write_text(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
os.rename("part", "pids")
time.sleep(600)
"""


def family():
    wait_for(Path("pids").exists, "the run")
    return [int(word) for word in Path("pids").read_text().split()]


def test_a_run_dies_with_its_guard_and_its_watcher_waits_for_that():
    job = a_job(FAMILY)
    result = watched(job)
    run, child, _ = family()
    kill_guards()
    assert result() == {"error": "the guard of the run was killed, and the run with it", "lost": True}
    assert not is_alive(run)
    wait_for(lambda: not is_alive(child), "the end of its child")
    lifeline.kill_marked(job["mark"])  # what a scheduler does on its own machine
    assert not processes(job["mark"])


@pytest.mark.parametrize("code", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "pass"])
def test_an_ended_run_leaves_no_child_not_even_one_with_a_session(code):
    job = a_job(FAMILY.replace("time.sleep(600)\n", f"{code}\n"))
    assert run_process.run_child(job)["status"] in (0, -signal.SIGKILL)
    assert not processes(job["mark"]) and not Path(job["lock"]).exists()


def test_a_run_that_hangs_in_c_dies_with_its_guard():
    """It holds the interpreter: none of its threads could notice."""
    code = "import pathlib, re; pathlib.Path('ready').touch(); re.match('(a+)+b', 'a' * 64)"
    job = a_job(code)
    result = watched(job)
    wait_for(Path("ready").exists, "the run")
    kill_guards()
    assert result()["lost"] and not processes(job["mark"])


def test_a_guard_that_is_killed_while_it_starts_a_run_leaves_none():
    for pause in (0.0, 0.001, 0.003, 0.01, 0.03):
        job = a_job("import time; time.sleep(600)")
        Path(job["lock"]).unlink(missing_ok=True)
        result = watched(job)
        wait_for(Path(job["lock"]).exists, "the guard", pause=0.001)  # it takes the lock just before the run starts
        time.sleep(pause)
        kill_guards()
        assert result()["lost"]
        wait_for(lambda job=job: not processes(job["mark"]), "the end of the run")


def test_no_second_run_starts_while_an_earlier_one_is_alive():
    job = a_job("print('second')")
    with open(job["lock"], "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        result = watched(job)
        wait_for(guards, "its guard")
        assert not processes(job["mark"])
    assert result()["status"] == 0 and Path("run.log").read_text() == "second\n"


HOLDER = """
import os, subprocess, sys, time
end, rope = os.pipe()
code = "import sys; sys.platform = PLATFORM; from ragen import lifeline; lifeline.hold(); print(1, flush=True)\\n"
code += "import time; time.sleep(600)"
env = os.environ | {"RAGEN_LIFELINE": str(end)}
child = subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=[end], stdout=subprocess.PIPE)
child.stdout.read(2)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_child_that_holds_a_lifeline_dies_with_its_parent(platform):
    code = HOLDER.replace("PLATFORM", repr(platform))
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
    wait_for(lambda: not is_alive(child), "the end of the child")


def test_a_lifeline_that_was_closed_on_the_way_is_ignored(monkeypatch):
    with open("file", "w") as file:
        for number in (file.fileno(), 999):
            monkeypatch.setenv(lifeline.VARIABLE, str(number))
            lifeline.hold()
            assert lifeline.VARIABLE not in os.environ


# --- the queue ----------------------------------------------------------------------------------------------------


def test_a_preempted_run_returns_to_the_queue(fake, capsys):
    cluster = fake({"a": [143, -signal.SIGTERM, 0]}, write=lambda job: advance(job, cluster))
    assert scheduler.run(make_plan("ab")) == 0
    assert [name for name, _ in cluster.started] == ["a", "b", "a", "a"]
    assert [job["append"] for job in cluster.jobs] == [False, False, True, True]
    assert [status_of(line) for line in result_lines()] == ["success", "success"]
    again = [line for line in summary().splitlines() if line.startswith("Again: ")]
    assert again == [
        f"Again: a (it was preempted after step {step} on here): it waits for its turn again" for step in (1, 3)
    ]
    assert again[0] in capsys.readouterr().out


def advance(job, cluster):
    """Each start is one step further."""
    RunFolder(f"saved/{Path(job['log']).stem}").path.mkdir(parents=True, exist_ok=True)
    RunFolder(f"saved/{Path(job['log']).stem}").append_metrics(len(cluster.started), {"x": 1.0})


def test_the_live_table_says_that_a_run_was_preempted_and_waits():
    plan = make_plan("ab")
    view = View(plan)
    view.started(plan.cells[0], "cpu", 0)
    view.waiting(plan.cells[0], "preempted")
    with view._screen.capture() as capture:
        view._screen.print(view.render())
    assert "0 of 2 done · 0 running" in capture.get() and "preempted, waiting" in capture.get()


def test_a_run_that_is_preempted_without_getting_further_has_failed(fake):
    cluster = fake({"a": [143]})
    assert scheduler.run(make_plan("ab")) == 1
    assert [name for name, _ in cluster.started] == ["a", "b", "a", "a"]
    assert "error: it was preempted 3 times in a row without a further step, the last time on here" in summary()


def test_a_run_that_is_preempted_often_but_gets_further_succeeds(fake):
    cluster = fake({"a": [143] * 9 + [0]}, write=lambda job: advance(job, cluster))
    assert scheduler.run(make_plan("a")) == 0
    assert len(cluster.started) == 10


def test_a_run_whose_guard_is_killed_runs_again(fake):
    cluster = fake({"a": [{"error": "the guard of the run was killed", "lost": True}, 0]})
    assert scheduler.run(make_plan("ab")) == 0
    assert [name for name, _ in cluster.started] == ["a", "a", "b"]
    assert "Again: a (its guard was killed on here)" in summary()


def test_a_slot_is_free_once_nothing_of_its_lost_run_is_alive(fake):
    """Another cell does not start on it either."""
    alive = []

    def hold(job):
        if len(cluster.started) == 1:
            lock = os.open(job["lock"], os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX)
            threading.Timer(0.5, lambda: (alive.append(len(cluster.started)), os.close(lock))).start()

    cluster = fake({"a": [None, 0]}, write=hold)
    assert scheduler.run(make_plan("ab")) == 0
    assert alive == [1] and [name for name, _ in cluster.started] == ["a", "a", "b"]


def test_a_sweep_that_is_terminated_passes_it_on_and_can_be_resumed(fake, capsys):
    cluster = fake({"b": [143]})
    requests, wait = [], cluster.wait

    def terminated(handles, seconds):
        """SIGTERM while the second run works, which ends when it is asked to."""
        if len(cluster.started) == 2 and not requests:
            os.kill(os.getpid(), signal.SIGTERM)
            return []
        return wait(handles, seconds)

    cluster.wait = terminated
    cluster.stop = lambda handles, at_once=False: requests.append(Path(cluster.jobs[1]["terminate"]).exists())
    assert scheduler.run(make_plan("abc")) == 143
    assert requests[0] and not Path(cluster.jobs[1]["terminate"]).exists()
    out = capsys.readouterr().out
    assert "preempted: Total: 3 | Success: 1 | Failed: 0 | Preempted: 1 | Missing: 1; run the same command with" in out
    assert [status_of(line) for line in result_lines()] == ["success", "preempted"]
    cluster = fake()
    assert scheduler.run(make_plan("abc", Options(gpus=("cpu",), resume=True))) == 0
    assert [name for name, _ in cluster.started] == ["b", "c"]
    assert summary().splitlines()[-1] == "Total: 3 | Success: 3 | Failed: 0"


def test_sigterm_reaches_the_run_and_its_status_comes_back():
    code = "import pathlib, signal, sys, time\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\npathlib.Path('ready').touch()\ntime.sleep(600)"
    job = a_job(code)

    def terminate():
        wait_for(Path("ready").exists, "the run")
        Path(job["terminate"]).touch()
        os.kill(os.getpid(), signal.SIGINT)  # what Ray does to cancel a task

    threading.Thread(target=terminate, daemon=True).start()
    assert run_process.run_child(job)["status"] == 143


def test_a_job_that_a_signal_cuts_off_arrives_whole():
    """A write to a full pipe ends early when a signal comes, and says how much it has written."""

    class Pipe(list):
        def write(self, content):
            self.append(bytes(content[:7]))
            return len(self[-1])

    pipe = Pipe()
    run_process._tell(pipe, "x" * 30)
    assert b"".join(pipe) == b"x" * 30 + b"\n"
