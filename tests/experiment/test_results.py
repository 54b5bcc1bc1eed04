"""Lines, the summary log, the record, W&B's offline runs and the live view."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_plans import make_cell, make_plan

from ragen.errors import ConfigError
from ragen.experiment import wandb_sync
from ragen.experiment.live import LiveRow, View
from ragen.experiment.results import (
    Result,
    changed_settings,
    closing_block,
    judge,
    last_lines,
    totals_line,
    update_record,
    write_record,
)
from ragen.store import full_disk
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import (
    SummaryLog,
    latest_lines,
    read_record,
    recorded_cells,
    result_line,
    run_folder,
    status_of,
)
from ragen.terminal import Screen

KL = ("kl", "filter", "include_zero", "train_time", "eval_time", "total_time", "wall_time", "gpu", "status")
SMOKE = (
    "name", "filter", "kl", "entropy", "collapse", "train_time", "eval_time", "collapse_time", "collapse_first_time",
    "collapse_multi_time", "total_time", "wall_time", "gpu", "status",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- lines --------------------------------------------------------------------------------------------------------


def kl_cell(value, seed=None):
    more = () if seed is None else (("seed", str(seed)),)
    return make_cell(
        f"kl{value}-{seed}", fields=(("kl", value), ("filter", "nofilter"), ("include_zero", "True"), *more)
    )


RESULT = Result("success", "", 61.9, "1xH100", {"train_time": 41.2, "eval_time": 5.018, "total_time": 46.218})


def test_the_documented_line_of_a_sweep():
    assert result_line(KL, kl_cell("0.001"), RESULT.values()) == (
        "kl=0.001 | filter=nofilter | include_zero=True | train_time=41.20s | eval_time=5.02s | total_time=46.22s | "
        "wall_time=61s | gpu=1xH100 | status=success"
    )
    seeded = result_line((*KL, "seed"), kl_cell("0.001", seed=2), RESULT.values())
    assert seeded.endswith("gpu=1xH100 | status=success | seed=2") and status_of(seeded) == "success"


def test_the_documented_line_of_the_smoke_test():
    fields = (
        ("name", "g1-x"),
        ("filter", "1.0"),
        ("kl", "0.001"),
        ("entropy", "0"),
        ("collapse", "first:True,multi:True,samples:64"),
    )
    line = result_line(SMOKE, make_cell("g1-x", fields=fields), RESULT.values())
    assert line == (
        "g1-x | filter=1.0 | kl=0.001 | entropy=0 | collapse=first:True,multi:True,samples:64 | train_time=41.20s | "
        "eval_time=5.02s | collapse_time=N/A | collapse_first_time=N/A | collapse_multi_time=N/A | total_time=46.22s | "
        "wall_time=61s | gpu=1xH100 | status=success"
    )


def test_a_field_that_is_named_twice_has_both_values():
    fields = (("task", "sokoban"), ("filter", "filter"), ("filter", "top_p:0.9"))
    line = result_line(("task", "filter", "filter", "status"), make_cell("x", fields=fields), {"status": "fail"})
    assert line == "task=sokoban | filter=filter | filter=top_p:0.9 | status=fail"


def test_the_last_line_of_a_cell_counts():
    cells = [kl_cell(value) for value in ("0", "0.01", "0.1")]
    lines = [result_line(KL, cells[0], Result("fail", gpu="cpu").values()), "  error: status=success | kl=0.01"]
    lines += [result_line(KL, cells[1], RESULT.values()), result_line(KL, cells[0], RESULT.values())]
    lines += ["Skipping: kl0.1-None (status=success)", result_line(KL, cells[2], {"status": "missing"})]
    latest = latest_lines(cells, KL, "\n".join(lines))
    assert {name: status_of(line) for name, line in latest.items()} == {"kl0-None": "success", "kl0.01-None": "success"}
    with pytest.raises(ConfigError, match="kl0-None and same have the same summary line"):
        latest_lines([cells[0], make_cell("same", fields=cells[0].fields)], KL, "")


words = st.text("abc019._-", min_size=1, max_size=4)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=6, unique=True), st.data())
def test_lines_are_read_back_as_a_dictionary_would(values, data):
    """Lines of random cells in random order, among noise: the last of each stands."""
    cells = [make_cell(f"c{place}", fields=(("a", a), ("b", b))) for place, (a, b) in enumerate(values)]
    fields, told, text = ("a", "b", "wall_time", "gpu", "status"), {}, []
    for _ in range(data.draw(st.integers(0, 12))):
        cell = data.draw(st.sampled_from(cells))
        status = data.draw(st.sampled_from(["success", "fail", "early_stopped:rule"]))
        text.append(result_line(fields, cell, {"wall_time": "3s", "gpu": "cpu", "status": status}))
        text += data.draw(
            st.lists(st.sampled_from(["", "=== x ===", "  error: y", "Total: 3 | Success: 1"]), max_size=2)
        )
        told[cell.name] = status
    assert {name: status_of(line) for name, line in latest_lines(cells, fields, "\n".join(text)).items()} == told


@given(st.lists(st.sampled_from(["success", "fail", "early_stopped:x", "missing"])))
def test_totals_count_early_stops_as_failed(statuses):
    line = totals_line(statuses)
    missing = statuses.count("missing")
    failed = statuses.count("fail") + statuses.count("early_stopped:x")
    wanted = f"Total: {len(statuses)} | Success: {statuses.count('success')} | Failed: {failed}"
    assert line == wanted + (f" | Missing: {missing}" if missing else "")


def test_the_closing_block_lists_every_cell_in_order():
    plan = make_plan([kl_cell("0"), kl_cell("0.1")], summary_fields=KL, title="KL sweep: pocket")
    block = closing_block(plan, {"kl0.1-None": "kl=0.1 | status=success"}, "4xH100")
    assert block[1].startswith("=== KL sweep: pocket Completed: ") and block[2] == "=== Summary ==="
    assert block[3] == "project=stubs | gpu=4xH100"
    assert block[4:] == [
        "kl=0 | filter=nofilter | include_zero=True | status=missing",
        "kl=0.1 | status=success",
        "Total: 2 | Success: 1 | Failed: 0 | Missing: 1",
    ]


# --- one run ------------------------------------------------------------------------------------------------------


def ended(status):
    return {"status": status, "started": 10.0, "ended": 12.5}


def test_a_run_is_judged_by_its_exit_status():
    cell = make_cell("a")
    cell.log_path.parent.mkdir(parents=True)
    cell.log_path.write_text("run folder: saved/old\nrun folder: saved/a-2\nstep:1 - x:1\n\n  the   end \n")
    RunFolder("saved/a-2").write_finished("early_stopped", 3, "empty_filtered_steps")
    assert judge(cell, ended(0), "cpu") == Result("success", "", 2.5, "cpu")
    assert judge(cell, ended(3), "cpu").status == "early_stopped:empty_filtered_steps"
    assert judge(cell, ended(1), "cpu") == Result("fail", "exit status 1: step:1 - x:1 / the end", 2.5, "cpu")
    assert judge(cell, ended(-9), "cpu").error.startswith("killed by signal 9: ")
    assert judge(cell, {"error": "no such folder"}, "cpu") == Result("fail", "no such folder", gpu="cpu")


def test_only_this_trys_part_of_a_log_counts():
    log = Path("a.log")
    assert run_folder(log) is None and last_lines(log) == ""
    log.write_text("run folder: first\nfirst error\n")
    offset = log.stat().st_size
    assert run_folder(log, offset) is None and last_lines(log, offset) == ""
    with log.open("a") as file:
        file.write("run folder: sec")
    assert run_folder(log, offset) is None  # half a line
    with log.open("a") as file:
        file.write("ond\n" + "x" * 1000 + "\n")
    assert run_folder(log, offset) == Path("second") and run_folder(log) == Path("second")
    assert last_lines(log, offset) == "run folder: second / " + "x" * 299 + "…"


# --- the summary log ----------------------------------------------------------------------------------------------


def _append(name):
    log = SummaryLog(Path("sum.log"))
    for number in range(50):
        log.append([f"{name} {number} " + name * 200, "  error: second line"])


def test_lines_of_several_processes_are_whole():
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = Path("sum.log").read_text().splitlines()
    first, second = lines[::2], lines[1::2]
    assert set(second) == {"  error: second line"}
    assert sorted(first) == sorted(f"{name} {number} " + name * 200 for name in "abc" for number in range(50))


def test_a_line_that_does_not_fit_leaves_no_half(monkeypatch):
    log = SummaryLog(Path("sum.log"))
    log.append(["first"])
    write = os.write
    monkeypatch.setattr(full_disk, "PATIENCE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: _full(write, descriptor, content))
        with pytest.raises(OSError, match="No space"):
            log.append(["second line"])
    assert log.text() == "first\n"


def _full(write, descriptor, content):
    if len(content) < 8:
        raise OSError(28, "No space left on device")
    return write(descriptor, content[:-4])


# --- the record ---------------------------------------------------------------------------------------------------


def test_a_record_gives_back_its_cells():
    plan = make_plan([kl_cell("0"), kl_cell("0.1", 3)], reference="0")
    plan.summary_path.parent.mkdir()
    write_record(plan, plan.cells)
    record = read_record(Path("logs/stub.json"))
    assert list(record.cells.values()) == list(plan.cells)
    assert record.root == Path.cwd() and record.reference == "0" and record.fields == plan.summary_fields
    other = make_plan([make_cell("z")])
    write_record(other, other.cells)
    assert list(recorded_cells(plan.summary_path)) == ["z", "kl0-None", "kl0.1-3"]
    update_record(other, other.cells, {})
    assert list(recorded_cells(plan.summary_path)) == ["z"]


def test_settings_that_change_no_number_do_not_count():
    def cell(*overrides):
        return make_cell("a", overrides=overrides)

    same = ("trainer.save_freq=50", "system.CUDA_VISIBLE_DEVICES='1'", "trainer.n_gpus_per_node=4",
            "ray_kwargs.ray_init.num_cpus=4", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
            "critic.ppo_micro_batch_size_per_gpu=1", "trainer.logger=[console]")  # fmt: skip
    assert changed_settings(cell("x=1", *same), cell("x=1")) == []
    assert changed_settings(cell("x=2"), cell("x=1", "y=3")) == ["x=1, now 2", "y=3, now (unset)"]
    assert changed_settings(cell("trainer.total_training_steps=400"), cell("trainer.total_training_steps=3")) == [
        "trainer.total_training_steps=3, now 400"
    ]
    assert changed_settings(make_cell("a", start=("frozenlake",)), make_cell("a")) == ["sokoban, now frozenlake"]


# --- W&B ----------------------------------------------------------------------------------------------------------

ONLINE = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


def fake_wandb(code):
    return (sys.executable, "-c", f"import sys; {code}")


def test_new_offline_runs_are_uploaded_in_one_go(monkeypatch):
    monkeypatch.setattr(wandb_sync, "wandb_mode", lambda environ: ("online", ""))
    for name in ("offline-run-1-a", "offline-run-2-b", "run-3-c"):
        Path("wandb", name).mkdir(parents=True)
    runs = wandb_sync.offline_runs({})
    assert sorted(run.name for run in runs) == ["offline-run-1-a", "offline-run-2-b"]
    assert wandb_sync.offline_runs({"WANDB_DIR": "elsewhere"}) == set()
    said = wandb_sync.sync(runs, ONLINE, fake_wandb("print(sys.argv[1:])"))
    assert said == ["W&B: uploaded 2 offline runs", "  ['sync', 'wandb/offline-run-1-a', 'wandb/offline-run-2-b']"]
    assert wandb_sync.sync(set(), ONLINE) == ["W&B: no new offline runs"]


def test_a_failing_upload_is_logged_with_the_command_for_later(monkeypatch):
    monkeypatch.setattr(wandb_sync, "wandb_mode", lambda environ: ("online", ""))
    runs = {Path("wandb/offline-run-1-a")}
    later = "later: wandb sync wandb/offline-run-1-a"
    said = wandb_sync.sync(runs, ONLINE, fake_wandb("sys.exit('no such entity')"))
    assert said == [f"W&B: the upload of 1 offline runs failed (exit status 1); {later}", "  no such entity"]
    monkeypatch.setattr(wandb_sync, "LIMIT", 0.2)
    said = wandb_sync.sync(runs, ONLINE, fake_wandb("import time; time.sleep(600)"))
    assert said == [f"W&B: the upload of 1 offline runs timed out after 0 s; {later}"]


def test_without_a_key_nothing_is_tried():
    (said,) = wandb_sync.sync({Path("wandb/offline-run-1-a")}, {"HOME": os.getcwd()}, fake_wandb("sys.exit(1)"))
    assert said.startswith("W&B: 1 offline runs are not uploaded (no key for api.wandb.ai") and "wandb sync" in said


# --- the view -----------------------------------------------------------------------------------------------------


def test_progress_reads_what_has_come_since():
    log, folder = Path("a.log"), RunFolder("saved/a")
    progress = LiveRow(make_cell("a", log_path=log))
    progress.update()
    assert progress.step is None and progress.seconds_left is None
    log.write_text("note: x\nrun folder: saved/a\n")
    folder.path.mkdir(parents=True)
    folder.config_path.write_text("trainer: {total_training_steps: 10}\n")
    folder.append_metrics(0, {"val-env/A/success": 0.2, "val-env/B/success": 0.4, "val-env/A/success_low": 0.1})
    progress.update()
    assert (progress.step, progress.total_steps) == (0, 10) and progress.success == pytest.approx(0.3)
    folder.append_metrics(1, {"timing_s/step": 2.0})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "timing')
    progress.update()
    assert progress.step == 1 and progress.seconds_left == 18.0
    with folder.metrics_path.open("a") as file:
        file.write('_s/step": 4.0}\nnot json\n')
    progress.update()
    assert progress.step == 2 and progress.seconds_left == 8 * 3.0


def test_elsewhere_than_in_a_terminal_there_is_a_line_for_each_event(capsys):
    plan = make_plan("ab")
    with View(plan) as view:
        view.started(plan.cells[0], "cpu", 0)
        view.ended(plan.cells[0], "fail", "out of memory")
        view.refresh()
    assert capsys.readouterr().out.splitlines() == [
        "[0/2] start a on cpu: logs/stub/a.log",
        "[1/2] fail a (0:00)",
        "  error: out of memory",
    ]


class Terminal(Screen):
    """Draws into a file as if it were a terminal of this size."""

    def __init__(self, path, width, height):
        super().__init__()
        self.file = path.open("w")
        self._force_terminal = True
        self.size = (width, height)


@pytest.mark.parametrize(("height", "shown"), [(40, 12), (12, 7)])
def test_the_table_shows_cells_slots_steps_success_and_time_left(height, shown):
    plan = make_plan([f"cell{number:02d}" for number in range(12)])
    screen = Terminal(Path("screen"), 100, height)
    view = View(plan, screen)
    view.rows["cell00"].status = "success"
    view.started(plan.cells[9], "0,1", 0)
    row = view.rows["cell09"]
    row.step, row.total_steps, row.success, row.step_seconds = 4, 10, 0.256, [10.0]
    view.started(plan.cells[10], "2", 0)
    view.ended(plan.cells[10], "early_stopped:empty_filtered_steps")
    with screen.capture() as capture:
        screen.print(view.render())
    lines = capture.get().splitlines()
    assert "Stub sweep  2 of 12 done · 1 running · 1 failed" in lines[0]
    assert lines[1].split() == ["cell", "slot", "step", "success", "left", "status"]
    (running,) = [line.split() for line in lines if "running" in line and "cell09" in line]
    assert running == ["cell09", "0,1", "4/10", "25.6", "%", "1:00", "running"]
    assert sum("cell" in line for line in lines[2:]) == shown
    assert any("early_stopped:empty_filtered_steps" in line for line in lines)
    assert (f"and {12 - shown} more" in capture.get()) == (shown < 12)


def test_a_record_is_json_that_others_can_read():
    plan = make_plan([kl_cell("0")])
    plan.summary_path.parent.mkdir()
    write_record(plan, plan.cells)
    stored = json.loads(Path("logs/stub.json").read_text())
    assert stored["experiment"] == "stub_sweep" and stored["cells"][0]["log_path"] == "logs/stub/kl0-None.log"
