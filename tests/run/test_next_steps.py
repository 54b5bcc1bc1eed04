"""The last lines of a run are commands that work as printed."""

import subprocess
import sys
from pathlib import Path

import pytest
from made_up_runs import make_run

from ragen.config.compose import resolve
from ragen.run.next_steps import last_lines, next_steps

ROOT = Path(__file__).parents[2]


def made(path, environment="sokoban", *overrides, **options):
    config = resolve([environment, "model_path=pocket", *overrides], environ={}).config
    return config, make_run(path, config, steps=(1, 2), **options)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.setenv("RAGEN_COMMAND", "./ragen")


@pytest.mark.parametrize(
    ("environment", "game"),
    [("sokoban", "sokoban"), ("frozenlake", "frozenlake"), ("two_armed_bandit", "two_armed_bandit")],
)
def test_three_commands_where_weights_were_kept(tmp_path, monkeypatch, environment, game):
    monkeypatch.chdir(tmp_path)
    config, run = made("runs/my run", environment, checkpoints=(2,))
    assert last_lines(config, run.path, run.report_path)[-3:] == [
        "./ragen report 'runs/my run' --open",
        f"./ragen play {game} --agent 'runs/my run'",
        "./ragen eval 'runs/my run' --with-base",
    ]


def test_without_weights_it_names_the_key_that_keeps_them(tmp_path):
    config, run = made(tmp_path / "run", "sokoban", "trainer.save_freq=-1")
    assert next_steps(config, run.path) == [f"./ragen report {run} --open"]
    lines = last_lines(config, run.path, run.report_path)
    assert lines[0] == f"report: {run.report_path}" and lines[-1] == f"./ragen report {run} --open"
    assert "no weights were kept (trainer.save_freq=-1)" in lines[1] and "trainer.save_freq=N" in lines[1]


def test_a_run_that_trains_nothing_has_only_its_report(tmp_path):
    config, run = made(tmp_path / "run", "sokoban", "trainer.val_only=True")
    assert len(last_lines(config, run.path, run.report_path)) == 2


@pytest.mark.slow
def test_the_last_three_lines_of_a_run_work_as_printed(tmp_path):
    small = "es_manager.train.env_groups=2 es_manager.train.group_size=2 es_manager.val.env_groups=2"
    kept = f"trainer.total_training_steps=2 trainer.save_freq=1 trainer.default_local_dir='{tmp_path}/a run'"
    command = f"{sys.executable} -m ragen train sokoban model_path=pocket {small} {kept}"
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(command):
        ran = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    report, play, evaluate = run(command).splitlines()[-3:]
    assert "report.html" in run(report)
    assert "played by a run/global_step_2" in run(play)
    table = run(evaluate)
    assert "pocket" in table and "a run/global_step_2" in table
