"""The queue, with runs that are none; locks; and a child with its guard."""

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import lock_holder, started
from stub_plans import FIELDS, SOURCE, FakeCluster, is_alive, make_cell, make_plan, result_lines, summary, wait_for

from ragen.errors import ConfigError, RunFailed
from ragen.experiment import run_process, scheduler
from ragen.experiment.cluster import Device
from ragen.experiment.devices import Pool, label, short_name
from ragen.experiment.plan import Options, in_batches
from ragen.store.lock import Locked
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import held, latest_lines, lock_path, read_record, recorded_cells, status_of


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", SOURCE)


# --- devices ------------------------------------------------------------------------------------------------------


def devices(names, node="n"):
    return [Device(node, place, name) for place, name in enumerate(names)]


def test_runs_of_one_size_get_the_documented_slots():
    pool = Pool(devices("01234567"))
    taken = [pool.take(4, 0.0), pool.take(4, 0.0)]
    assert [[device.name for device in slot] for slot in taken] == [list("0123"), list("4567")]
    assert pool.take(4, 0.0) is None
    pool.give_back(taken[0])
    assert pool.take(4, 0.0) == taken[0]


def test_a_large_run_waits_for_neighbours_and_a_pause_for_its_end():
    pool = Pool(devices("0123"))
    single = pool.take(1, 0.0)
    assert [device.name for device in pool.take(2, 0.0)] == ["2", "3"]
    assert pool.take(2, 0.0) is None
    pool.give_back(single, free_at=30.0)
    assert pool.take(2, 29.0) is None
    assert [device.name for device in pool.take(2, 30.0)] == ["0", "1"]


def test_devices_of_a_node_that_has_gone_are_not_handed_out():
    pool = Pool([*devices("01", "a"), *devices("01", "b")])
    slot = pool.take(2, 0.0)
    pool.remove_node("a")
    pool.give_back(slot)
    assert pool.nodes() == {"b"}
    assert [device.node for device in pool.take(2, 0.0)] == ["b", "b"]
    assert pool.take(1, 0.0) is None


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 7)), max_size=30))
def test_the_pool_agrees_with_a_list_of_flags(num, moves):
    pool, free, held_slots = Pool(devices([str(place) for place in range(num)])), [True] * num, []
    for is_take, size, which in moves:
        if is_take:
            wanted = next((s for s in range(0, num - size + 1, size) if all(free[s : s + size])), None)
            slot = pool.take(size, 0.0)
            assert (slot is None) == (wanted is None)
            if slot is not None:
                assert [device.number for device in slot] == list(range(wanted, wanted + size))
                free[wanted : wanted + size] = [False] * size
                held_slots.append(slot)
        elif held_slots:
            slot = held_slots.pop(which % len(held_slots))
            pool.give_back(slot)
            for device in slot:
                free[device.number] = True


@pytest.mark.parametrize(
    ("gpu", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
    ],
)
def test_gpu_names_are_shortened_as_documented(gpu, short):
    assert short_name(gpu) == short


def test_a_slot_is_named_by_count_and_model():
    names = {"0": "NVIDIA H100 80GB HBM3", "1": "NVIDIA H100 80GB HBM3", "2": "Tesla T4"}
    assert label(["0", "1"], names) == "2xH100"
    assert label(["1", "2"], names) == "2xmixed"
    assert label(["7"], names) == "1xGPU7"
    assert label(["cpu"], {}) == "cpu"


# --- batches ------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("1234"), min_size=1, max_size=30), st.integers(1, 8), st.data())
def test_batches_hold_all_that_is_left_in_order_and_never_span_groups(groups, size, data):
    groups = sorted(groups)
    cells = [make_cell(f"c{number}", group) for number, group in enumerate(groups)]
    planned, at = [], 0
    while at < len(cells):
        end = at
        while end < len(cells) and end - at < size and groups[end] == groups[at]:
            end += 1
        planned.append(tuple(range(at, end)))
        at = end
    plan = make_plan(cells, batches=tuple(planned))
    todo = [cell for cell in cells if data.draw(st.booleans())]
    most = max(len(batch) for batch in plan.batches)
    found = in_batches(todo, most)
    assert [cell for batch in found for cell in batch] == todo
    assert all(len({cell.group for cell in batch}) == 1 and len(batch) <= most for batch in found)
    for batch, following in pairwise(found):
        assert len(batch) == most or batch[0].group != following[0].group  # as full as they can be


# --- the queue, without Ray ---------------------------------------------------------------------------------------


def test_every_cell_has_its_turn_and_a_failure_stops_nothing(fake, capsys):
    cluster = fake({"b": [1], "c": [3]})
    assert scheduler.run(make_plan(["a", "b", "c", "d"], Options(gpus=("cpu", "cpu")))) == 1
    assert [name for name, _ in cluster.started] == ["a", "b", "c", "d"]
    assert cluster.most == 2
    assert (
        "value=b | train_time=N/A | eval_time=N/A | total_time=N/A | wall_time=41s | gpu=cpu | status=fail" in summary()
    )
    assert "  error: exit status 1: run folder: saved/b" in summary().splitlines()
    closing = summary().partition("=== Summary ===\n")[2].splitlines()
    assert [line.partition(" |")[0] for line in closing[1:5]] == ["value=a", "value=b", "value=c", "value=d"]
    assert closing[-1] == "Total: 4 | Success: 2 | Failed: 2"
    assert Path("logs/stub/a.result").read_text().startswith("value=a | train_time=N/A")
    assert "report logs/stub.log" in capsys.readouterr().out


def test_all_succeeded_is_zero_and_the_rule_of_an_early_stop_is_told(fake):
    fake()
    assert scheduler.run(make_plan(["a", "b"])) == 0
    fake({"a": [3]}, write=lambda job: RunFolder("saved/a").write_finished("early_stopped", 4, "empty_filtered_steps"))
    assert scheduler.run(make_plan(["a"])) == 1
    assert status_of(result_lines()[-1]) == "early_stopped:empty_filtered_steps"


def test_times_come_from_the_metrics_of_the_folder_that_the_run_names(fake):
    def write(job):
        Path(job["log"]).write_text("note: x\nrun folder: elsewhere/a-2\nstep:1 - timing_s/total:9.9\n")
        folder = RunFolder("elsewhere/a-2")
        folder.append_metrics(0, {"timing_s/train_total": 0.0, "timing_s/eval_total": 2.5, "timing_s/total": 2.5})
        folder.append_metrics(1, {"timing_s/train_total": 10.126, "timing_s/eval_total": 3.0, "timing_s/total": 13.126})

    fake(write=write)
    scheduler.run(make_plan(["a"]))
    assert result_lines()[0] == (
        "value=a | train_time=10.13s | eval_time=3.00s | total_time=13.13s | wall_time=41s | gpu=cpu | status=success"
    )


def test_no_more_than_max_parallel_run_at_once(fake):
    cluster = fake()
    scheduler.run(make_plan("abcdef", Options(gpus=("cpu",) * 4, max_parallel=3)))
    assert cluster.most == 3 and len(cluster.started) == 6


def test_a_cell_may_need_more_gpus_than_others(fake, monkeypatch):
    cluster = fake()
    monkeypatch.setattr(run_process, "gpu_names", lambda python, devices: ["NVIDIA H100"] * len(devices))
    cells = [make_cell("small"), make_cell("large", num_gpus=2), make_cell("last")]
    assert scheduler.run(make_plan(cells, Options(gpus=("0", "1", "2")))) == 0
    assert dict(cluster.started) == {"small": ("0",), "large": ("0", "1"), "last": ("2",)}
    assert [line.split(" | ")[5] for line in result_lines()] == ["gpu=1xH100", "gpu=2xH100", "gpu=1xH100"]
    with pytest.raises(ConfigError, match="large needs 2 GPUs, and --gpus 0 lists 1"):
        scheduler.run(make_plan(cells, Options(gpus=("0",))))


def test_what_a_child_gets(fake, monkeypatch):
    cluster = fake()
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("ragen.experiment.devices.cores", lambda: 7.0)
    plan = make_plan(
        ["a"], Options(gpus=("cpu", "cpu")), wandb_mode="offline", train_environment={"WANDB_CONSOLE": "off"}
    )
    scheduler.run(plan)
    (job,) = cluster.jobs
    got = job["environment"]
    assert got["CUDA_VISIBLE_DEVICES"] == "" and got["OMP_NUM_THREADS"] == "3"
    assert got["WANDB_MODE"] == "offline" and got["WANDB_CONSOLE"] == "off"
    assert got["PYTHONPATH"] == os.path.abspath("somewhere")
    assert job["command"][1:] == ["-m", "ragen", "train", "sokoban", "x=a", "system.CUDA_VISIBLE_DEVICES=''"]


# --- resuming -----------------------------------------------------------------------------------------------------


def test_resume_skips_what_is_done_and_runs_the_rest(fake, capsys):
    fake({"b": [1], "c": [3]})
    scheduler.run(make_plan("abc"))
    cluster = fake()
    assert scheduler.run(make_plan("abcd", Options(gpus=("cpu",), resume=True))) == 1  # c stays failed
    assert [name for name, _ in cluster.started] == ["b", "d"]
    for said in (summary(), capsys.readouterr().out):
        assert "Skipping: a (status=success)\nSkipping: c (status=early_stopped:unknown)\n" in said
    cluster = fake()
    assert scheduler.run(make_plan("abcd", Options(gpus=("cpu",), resume=True, retry=("early_stopped",)))) == 0
    assert [name for name, _ in cluster.started] == ["c"]
    assert summary().splitlines()[-1] == "Total: 4 | Success: 4 | Failed: 0"


def test_resume_without_anything_to_do_starts_nothing(fake, capsys):
    fake()
    scheduler.run(make_plan("ab"))
    before, cluster = summary(), fake()
    assert scheduler.run(make_plan("ab", Options(gpus=("0", "1"), resume=True))) == 0  # and asks for no GPU
    assert not cluster.started and summary() == before
    said = capsys.readouterr().out
    assert "Skipping: a (status=success)\nSkipping: b (status=success)\n" in said
    assert "Total: 2 | Success: 2 | Failed: 0" in said


@pytest.mark.parametrize(
    ("skipped", "started"), [((), "abc"), (("success",), "bc"), (("early_stopped", "fail"), "a"), (("fail",), "ac")]
)
def test_the_statuses_to_skip_alone_decide(fake, skipped, started):
    fake({"b": [1], "c": [3]})
    scheduler.run(make_plan("abc"))
    cluster = fake()
    scheduler.run(make_plan("abc", Options(gpus=("cpu",), resume=True, skip_statuses=skipped)))
    assert [name for name, _ in cluster.started] == list(started)


def test_without_resume_everything_runs_again_and_old_summaries_are_kept(fake):
    for _ in range(3):
        cluster = fake()
        scheduler.run(make_plan("ab"))
        assert len(cluster.started) == 2
    assert len(result_lines()) == 2
    kept = [Path(f"logs/stub.log.{number}") for number in (1, 2)]
    assert all(len(result_lines(path.read_text())) == 2 for path in kept) and not Path("logs/stub.log.3").exists()
    records = [read_record(Path(f"logs/stub.json.{number}")) for number in (1, 2)]
    assert all(sorted(record.latest_lines()) == ["a", "b"] for record in records), "with the records that explain them"


def test_what_was_done_with_other_settings_runs_again(fake, capsys):
    steps = [(f"trainer.total_training_steps={num}", "trainer.save_freq=-1") for num in (3, 400)]
    fake()
    scheduler.run(make_plan([make_cell("a", overrides=steps[0]), make_cell("b")]))
    cluster = fake()
    longer = [make_cell("a", overrides=steps[1]), make_cell("b", overrides=("x=b", "trainer.save_freq=50"))]
    scheduler.run(make_plan(longer, Options(gpus=("cpu",), resume=True)))
    assert [name for name, _ in cluster.started] == ["a"]
    assert "a is done with other settings (trainer.total_training_steps=3, now 400)" in capsys.readouterr().out
    cluster = fake()
    scheduler.run(make_plan(longer, Options(gpus=("cpu",), resume=True)))
    assert not cluster.started


def smoke_plan(names, batches, **changes):
    cells = [make_cell(name, group=name[1], fields=(("name", name), ("kl", "0.1"))) for name in names]
    fields = ("name", "kl", "train_time", "collapse_time", "wall_time", "gpu", "status")
    given = {
        "name": "smoke_test",
        "summary_fields": fields,
        "batches": batches,
        "append_summary": True,
        "wandb_mode": "offline",
        "headings": {"1": "Group 1", "2": "Group 2"},
        "options": Options(gpus=("cpu", "cpu"), resume=True, cooldown=0.0),
    }
    return make_plan(cells, **(given | changes))


def test_smoke_batches_appends_syncs_and_names_every_line(fake, monkeypatch):
    """The latest status of a name counts, also in the totals."""
    synced = []

    def sync(runs):
        synced.append(sorted(path.name for path in runs))
        return ["W&B: uploaded"]

    def write(job):
        name = Path(job["log"]).stem
        RunFolder(f"saved/{name}").path.mkdir(parents=True, exist_ok=True)
        Path(f"saved/{name}/wandb-id").write_text(f"id{name}")
        Path(f"wandb/offline-run-20260101_000000-id{name}").mkdir(parents=True)
        Path(f"wandb/offline-run-20260101_000000-other{name}").mkdir(parents=True)

    monkeypatch.setattr(scheduler.wandb_sync, "sync", sync)
    fake({"g1b": [1]}, write=write)
    assert scheduler.run(smoke_plan(["g1a", "g1b", "g1c", "g2a"], ((0, 1), (2,), (3,)))) == 1
    mine = [["g1a", "g1b"], ["g1c"], ["g2a"]]
    assert synced == [[f"offline-run-20260101_000000-id{name}" for name in batch] for batch in mine]
    text = summary()
    assert text.count("Group 1") == text.count("Group 2") == 1 and text.count("W&B: uploaded") == 3
    line = "g1a | kl=0.1 | train_time=N/A | collapse_time=N/A | wall_time=41s | gpu=cpu | status=success"
    assert line in text.splitlines()
    cluster = fake()
    assert scheduler.run(smoke_plan(["g1a", "g1b", "g1c", "g2a"], ((0, 1), (2,), (3,)))) == 0
    assert [name for name, _ in cluster.started] == ["g1b"]
    assert summary().startswith(text) and summary().splitlines()[-1] == "Total: 4 | Success: 4 | Failed: 0"


# --- lost and stopped ---------------------------------------------------------------------------------------------


def test_a_run_that_is_lost_waits_for_its_turn_again(fake):
    cluster = fake({"a": [None, 0]})
    assert scheduler.run(make_plan("ab")) == 0
    assert [name for name, _ in cluster.started] == ["a", "a", "b"]
    assert [job["append"] for job in cluster.jobs] == [False, True, False]


def test_a_run_that_is_lost_again_and_again_has_failed(fake):
    cluster = fake({"a": [None]})
    assert scheduler.run(make_plan("ab")) == 1
    assert [name for name, _ in cluster.started] == ["a", "a", "a", "b"]
    assert "its watcher was lost 3 times" in summary()


def test_a_node_that_goes_takes_its_slots_and_one_that_comes_brings_some(fake, monkeypatch):
    monkeypatch.setattr("ragen.experiment.devices.LOOK_AT_NODES", 0.0)
    monkeypatch.setattr(scheduler, "NODE_PATIENCE", 0.0)
    cluster = fake({"a": [None, 0]}, nodes=("one",))
    cluster.is_own = False

    def change():
        cluster.alive = ["two"]

    cluster.on_wait = change
    assert scheduler.run(make_plan("abc", Options(gpus=("cpu",), ray_address="auto"))) == 0
    assert cluster.address == "auto"
    assert [name for name, _ in cluster.started] == ["a", "a", "b", "c"]


def test_the_folder_of_a_lost_host_is_freed_after_a_while(fake, monkeypatch):
    def own(job):
        RunFolder("saved/a").path.mkdir(parents=True, exist_ok=True)
        if not seen:
            RunFolder("saved/a").owner_path.write_text("process 7 on far away\n")
        seen.append(job)

    seen = []
    monkeypatch.setattr(scheduler, "OWNER_PATIENCE", 0.05)
    fake({"a": [None, 0]}, nodes=("far away",), write=own)
    assert scheduler.run(make_plan("a")) == 0
    assert len(seen) == 2 and RunFolder("saved/a").live_owner() is None


def test_an_interrupted_experiment_says_how_to_go_on_and_does(fake, capsys):
    cluster = fake({"b": [130]})
    cluster.on_wait = lambda: len(cluster.started) == 2 and os.kill(os.getpid(), signal.SIGINT)
    assert scheduler.run(make_plan("abc", Options(gpus=("cpu",)))) == 130
    assert "the same command with --resume to resume" in capsys.readouterr().out
    assert [status_of(line) for line in result_lines()] == ["success"]
    cluster = fake()
    assert scheduler.run(make_plan("abc", Options(gpus=("cpu",), resume=True))) == 0
    assert [name for name, _ in cluster.started] == ["b", "c"]


def test_when_ray_is_ended_from_outside_it_is_said_at_once(fake):
    cluster = fake()
    cluster.on_wait = lambda: setattr(cluster, "has_gone", True)
    with pytest.raises(
        RunFailed, match="Ray was stopped from outside, and all runs with it; run the same command with --res"
    ):
        scheduler.run(make_plan("abc"))
    assert len(cluster.started) == 1


def test_a_disk_that_is_full_for_a_moment_stops_nothing(fake, monkeypatch, capsys):
    fake()
    append = scheduler.SummaryLog.append

    def full(self, lines):
        if any(line.startswith("value=a") for line in lines) and "Summary" not in "".join(lines):
            raise OSError(28, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(scheduler.SummaryLog, "append", full)
    assert scheduler.run(make_plan("ab")) == 1
    assert "logs/stub.log cannot be written: No space left on device" in capsys.readouterr().out
    assert summary().splitlines()[-1] == "Total: 2 | Success: 1 | Failed: 0 | Missing: 1"


# --- what cannot start --------------------------------------------------------------------------------------------


def test_gpus_that_are_not_there_are_one_message_and_nothing_is_written():
    with pytest.raises(ConfigError, match=r"--gpus 96,97: torch finds none of these 2 GPUs; list existing ones"):
        scheduler.run(make_plan("ab", Options(gpus=("96", "97"))))
    assert not Path("logs/stub.log").exists()


def test_a_log_folder_that_cannot_be_written_is_one_message(fake):
    fake()
    Path("logs").write_text("a file")
    with pytest.raises(ConfigError, match="logs/stub: cannot be written to"):
        scheduler.run(make_plan("a"))


def test_the_same_cell_is_not_run_twice_at_once(fake):
    cluster = fake()
    with lock_holder(lock_path(make_cell("b")), note="first") as first:
        with pytest.raises(Locked, match=rf"b is being run by process {first.pid} on .* \(first\): wait for it"):
            scheduler.run(make_plan("ab"))
        assert not cluster.started and not lock_path(make_cell("a")).exists()
        assert scheduler.run(make_plan("ac")) == 0  # other cells of the same experiment
    assert scheduler.run(make_plan("ab")) == 0  # a dead process holds nothing


def test_locks_let_go_one_by_one():
    a, b = make_cell("a"), make_cell("b")
    with held([a, b], "sweep") as locks:
        locks.pop("a").release()
        with held([a], "other"), pytest.raises(Locked, match="b is being run by process"), held([b], "other"):
            pass
    assert not list(Path("logs/stub").iterdir())


def test_another_terminal_adds_to_a_summary_that_is_being_written(fake):
    """Disjoint cells at once: the second neither puts the first one's lines aside nor tears them."""
    fake()
    cluster = fake()

    def second():
        if not cluster.started or len(cluster.started) > 1:
            return
        inner = FakeCluster()
        scheduler.connected = inner.connected
        assert scheduler.run(make_plan("cd")) == 0

    cluster.on_wait = second
    assert scheduler.run(make_plan("ab")) == 0
    lines = latest_lines([make_cell(name) for name in "abcd"], FIELDS, summary())
    assert sorted(lines) == list("abcd") and not Path("logs/stub.log.1").exists()
    assert "another process is writing to logs/stub.log: lines are appended" in summary()


def test_a_summary_is_put_aside_only_once_nobody_writes_to_it(fake):
    """Whether another process runs cells of it, the locks of the recorded cells tell."""
    fake()
    scheduler.run(make_plan("ab"))
    with held([make_cell("a")], "other terminal"):
        scheduler.run(make_plan("c"))
    assert not Path("logs/stub.log.1").exists() and sorted(recorded_cells(Path("logs/stub.log"))) == ["a", "b", "c"]
    scheduler.run(make_plan("c"))
    assert "value=a" in Path("logs/stub.log.1").read_text() and list(recorded_cells(Path("logs/stub.log"))) == ["c"]


def test_a_damaged_record_is_replaced_by_a_new_start_and_stops_a_resumed_one(fake):
    fake()
    scheduler.run(make_plan("ab"))
    Path("logs/stub.json").write_text("{")
    with pytest.raises(ConfigError, match=r"logs/stub\.json cannot be read"):
        scheduler.run(make_plan("ab", Options(gpus=("cpu",), resume=True)))
    assert scheduler.run(make_plan("ab")) == 0
    assert list(recorded_cells(Path("logs/stub.log"))) == ["a", "b"]


# --- a child and its guard ----------------------------------------------------------------------------------------


def a_job(code, log="run.log", **options):
    return run_process.job([sys.executable, "-I", "-c", code], Path(log), os.environ, **options)


def test_a_child_writes_its_log_and_tells_its_status():
    ended = run_process.run_child(a_job("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert ended["status"] == 3 and ended["started"] <= ended["ended"]
    assert sorted(Path("run.log").read_text().split()) == ["err", "out"]
    run_process.run_child(a_job("print('more')", append=True))
    assert Path("run.log").read_text().endswith("more\n") and "out" in Path("run.log").read_text()
    run_process.run_child(a_job("print('anew')"))
    assert Path("run.log").read_text() == "anew\n"


def test_a_child_that_cannot_start_says_why():
    assert (
        "No such file or directory"
        in run_process.run_child(run_process.job(["./nothing"], Path("run.log"), {}))["error"]
    )
    assert "No such file or directory: none/run.log" in run_process.run_child(a_job("", log="none/run.log"))["error"]


def test_a_child_that_fills_its_disk_fails_alone():
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); print('x' * 1000, flush=True)"
    assert run_process.run_child(a_job(code))["status"] > 0
    assert Path("run.log").read_text() == "x" * 100


def interrupted_child(code, grace):
    """The result of a child whose watcher is interrupted once the child has written `ready`."""

    def interrupt():
        wait_for(Path("ready").exists, "the child")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    return run_process.run_child(a_job(f"import pathlib, signal, time\n{code}", grace=grace))


def test_an_interrupt_reaches_the_child_which_may_end_in_its_own_way():
    code = "def end(*_): raise SystemExit(130)\nsignal.signal(signal.SIGINT, end)\n"
    code += "pathlib.Path('ready').touch()\ntime.sleep(600)"
    assert interrupted_child(code, grace=60.0)["status"] == 130


def test_an_interrupt_before_the_child_runs_is_not_lost(monkeypatch):
    """It comes while the job is handed to the guard."""
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value: (signal.raise_signal(signal.SIGINT), dumps(value))[1])
    ended = run_process.run_child(a_job("import time; time.sleep(600)"))
    assert "error" in ended or ended["status"] != 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_that_does_not_end_is_killed():
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\npathlib.Path('ready').touch()\ntime.sleep(600)"
    assert interrupted_child(code, grace=0.2)["status"] == -signal.SIGKILL


def test_nothing_outlives_the_watcher():
    """Killed without warning, it takes the child and the child's own children with it."""
    code = "import pathlib, subprocess, sys, time, os\n"
    code += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    code += "pathlib.Path('part').write_text(f'{os.getpid()} {p.pid}'); os.rename('part', 'pids'); time.sleep(600)"
    watcher = "import json, sys; from ragen.experiment.run_process import run_child; run_child(json.load(sys.stdin))"
    with started([sys.executable, "-c", watcher], stdin=subprocess.PIPE) as process:
        process.stdin.write(json.dumps(a_job(code)).encode())
        process.stdin.close()
        wait_for(Path("pids").exists, "the child")
        pids = [int(word) for word in Path("pids").read_text().split()]
        assert all(map(is_alive, pids))
    wait_for(lambda: not any(map(is_alive, pids)), "the end of the child")
