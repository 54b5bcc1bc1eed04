"""Runs that a rule ends, and runs that their user ends: exit status, files, and what is said about resuming."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE
from safetensors.torch import load_file
from tiny import ACTOR, ROLLOUT, TINY
from without_clock import metrics_without_clock

from ragen.config.compose import resolve
from ragen.model.load import find_model
from ragen.run.interrupt import Interrupt
from ragen.store.run_folder import RunFolder
from ragen.train import trainer

SOURCES = Path(__file__).parents[2] / "src"
WORDS = ["train", *TINY]
# No total of scores reaches this.
KEEPS_NOTHING = [f"{ROLLOUT}.rollout_filter_selection_eps=1000", f"{ROLLOUT}.rollout_filter_value=0.9"]
MANY = ["es_manager.train.env_groups=64", "trainer.total_training_steps=50"]


def steps_with(folder, name):
    return [row["step"] for row in folder.read_metrics().rows if name in row]


# --- the end ------------------------------------------------------------------------------------------------------


def test_a_run_that_dies_in_its_last_act_goes_on_to_it(tmp_path, monkeypatch):
    """The record of the end comes after the report: without it the run is not over."""
    words = ["trainer.total_training_steps=1", "trainer.save_freq=1", f"trainer.default_local_dir={tmp_path / 'run'}"]
    config = resolve([*TINY, *words], environ={}).config
    with monkeypatch.context() as dying:
        dying.setattr(RunFolder, "write_finished", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(config)
    folder = RunFolder(tmp_path / "run")
    assert folder.report_path.exists() and not folder.finished_path.exists()
    folder.report_path.unlink()
    ended = trainer.train(config)
    assert (ended.folder, ended.status) == (folder.path, "finished")
    assert folder.report_path.exists() and folder.read_finished()["status"] == "finished"


# --- rules --------------------------------------------------------------------------------------------------------


def test_a_filter_that_keeps_nothing_ends_the_run_after_five_steps(tmp_path):
    folder = RunFolder(tmp_path / "run")
    words = [*WORDS, *KEEPS_NOTHING, "trainer.total_training_steps=9", "trainer.test_freq=2", "trainer.save_freq=3"]
    words += [
        "trainer.max_actor_ckpt_to_keep=9",
        "trainer.val_before_train=True",
        f"trainer.default_local_dir={folder}",
    ]
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ragen", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr
    explained = "the filter kept no group in 5 consecutive steps"
    assert f"stopped early by the rule empty_filtered_steps: {explained}" in ended.stdout.splitlines()
    assert json.loads(folder.finished_path.read_text()) == {
        "status": "early_stopped", "step": 5, "rule": "empty_filtered_steps", "explanation": explained
    }  # fmt: skip
    report = folder.report_path.read_text()
    assert "<h2>Stopped early</h2>" in report and "empty_filtered_steps" in report
    rows = folder.read_metrics().rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["rollout/consecutive_empty_after_filter_steps"] for row in rows[1:]] == [1, 2, 3, 4, 5]
    # Validated and saved when due, and saved where it ended.
    assert steps_with(folder, "val-env/SimpleSokoban/success") == [0, 2, 4]
    assert sorted(path.name for path in folder.path.glob("global_step_*")) == ["global_step_3", "global_step_5"]
    begun, saved = (
        load_file(path / "model.safetensors")
        for path in (find_model("pocket").folder, folder.path / "global_step_5" / "actor")
    )
    assert all(begun[name].equal(saved[name]) for name in saved)


def test_a_run_without_success_ends_after_five_validations(nursery, tmp_path):
    """Replies of two tokens are no answers."""
    folder = RunFolder(tmp_path / "run")
    hopeless = [f"{ROLLOUT}.response_length=2", "trainer.total_training_steps=9", "trainer.test_freq=1"]
    hopeless.append(f"{ROLLOUT}.rollout_filter_empty_stop_steps=0")
    ended = nursery.run(*WORDS, *hopeless, f"trainer.default_local_dir={folder}")
    assert ended.status == 3, ended.err
    assert "stopped early by the rule low_validation_success: val-env/SimpleSokoban/success was below 1%" in ended.out
    finished = json.loads(folder.finished_path.read_text())
    assert (finished["status"], finished["step"], finished["rule"]) == ("early_stopped", 5, "low_validation_success")
    last = folder.read_metrics().rows[-1]
    assert last["early_stopped/low_validation_success"] == 1 and last["train/cut_replies"] == 1
    assert not list(folder.path.glob("global_step_*"))


def test_a_stopped_run_is_left_as_it_is(nursery, tmp_path):
    folder = tmp_path / "run"
    words = [*WORDS, *KEEPS_NOTHING, "trainer.total_training_steps=9"]
    words += [f"{ROLLOUT}.rollout_filter_empty_stop_steps=1", f"trainer.default_local_dir={folder}"]
    assert nursery.run(*words).status == 3
    before = (folder / "metrics.jsonl").read_bytes()
    again = nursery.run(*words)
    assert again.status == 3 and f"{folder} was stopped early (empty_filtered_steps)" in again.out
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run-2" / "finished.json").exists()


# --- interrupts ---------------------------------------------------------------------------------------------------


def interrupted(nursery, words):
    """A run that was told to stop within its second rollout."""
    child = nursery.start(*words)
    assert child.wait_for("rollout", times=2)
    child.send(signal.SIGINT)
    return child.end()


def test_an_interrupted_run_saves_and_goes_on(nursery, tmp_path):
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    words = [*WORDS, "trainer.total_training_steps=4", "trainer.save_freq=100"]
    ended = interrupted(nursery, [*words, f"trainer.default_local_dir={two}"])
    assert ended.status == 130, ended.err
    assert "Traceback" not in ended.err
    assert "interrupted: finishing this step first; press Ctrl-C again to stop at once" in ended.out
    steps = re.search(r"interrupted after step (\d); saved in (.*): run the same command to resume", ended.out)
    assert steps[2] == f"{two}/global_step_{steps[1]}" and int(steps[1]) in (2, 3)
    assert two.read_metrics().last_step() == int(steps[1])
    assert not two.finished_path.exists() and two.report_path.exists()
    again = nursery.run(*words, f"trainer.default_local_dir={two}")
    assert again.status == 0 and f"{two} resumes after step {steps[1]}" in again.out
    assert nursery.run(*words, f"trainer.default_local_dir={one}").status == 0
    assert metrics_without_clock(one.path) == metrics_without_clock(two.path)


def test_an_interrupted_run_that_saves_nothing_says_so(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    words = [*WORDS, "trainer.total_training_steps=50", f"trainer.default_local_dir={folder}"]
    ended = interrupted(nursery, words)
    assert ended.status == 130
    assert re.search(
        r"interrupted after step \d+; nothing was saved \(trainer.save_freq=-1\): the same command starts again",
        ended.out,
    )
    assert not list(folder.path.glob("global_step_*"))


def test_an_interrupted_run_that_saves_the_model_only_says_so(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    words = [*WORDS, "trainer.total_training_steps=50", "trainer.save_freq=100"]
    words += [f"{ACTOR}.checkpoint.save_contents=[model]", f"trainer.default_local_dir={folder}"]
    ended = interrupted(nursery, words)
    assert ended.status == 130
    assert "without the optimizer: the same command starts again in another directory" in ended.out


def test_a_second_interrupt_ends_at_once(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    child = nursery.start(*WORDS, *MANY, "trainer.save_freq=1", f"trainer.default_local_dir={folder}")
    assert child.wait_for("rollout")
    child.send(signal.SIGINT)
    assert child.wait_until(lambda: "again to stop at once" in child.out)
    child.send(signal.SIGINT)
    ended = child.end()
    assert (ended.status, ended.err.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in ended.err
    assert not folder.read_metrics().rows  # not even the first step came to its end


def test_an_interrupt_in_the_last_step_is_too_late(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    words = [*WORDS, "trainer.total_training_steps=1"]
    child = nursery.start(*words, f"trainer.default_local_dir={folder}")
    assert child.wait_for("rollout")
    child.send(signal.SIGINT)
    assert child.end().status == 0
    assert json.loads(folder.finished_path.read_text())["status"] == "finished"


def test_a_signal_in_the_middle_of_a_print_counts_all_the_same():
    def note(text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    before = signal.getsignal(signal.SIGINT)
    with Interrupt(note) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_set
        signal.raise_signal(signal.SIGUSR1)  # from a launcher, which has told everyone: no second one
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
