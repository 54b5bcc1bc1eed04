"""A documented script as a user starts it, up to its report. All of them: scripts/studies/every_experiment.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragen.store.sweep_results import status_of

ROOT = Path(__file__).parents[2]
OPTIONS = ("--kl-values", "0,0.01", "--model", "pocket", "--gpus=cpu,cpu", "--steps", "3", "--cooldown=0")
FEW = (
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=4",
    "ppo_mini_batch_size=8", "trainer.logger=[console]",
)  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Start an entry script of a copy of this checkout, whose outputs then lie there."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy2(ROOT / "ragen", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    environment = os.environ | {"RAGEN_PYTHON": sys.executable}
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        environment.pop(name, None)

    def start(*words):
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return start


@pytest.mark.slow
def test_a_sweep_from_the_script_to_the_report(start, tmp_path):
    script = ("bash", "scripts/runs/run_kl_sweep.sh", *OPTIONS)
    planned = [json.loads(line) for line in start(*script, "--dry-run", "--", *FEW).stdout.splitlines()]
    assert len(planned) == 2
    ended = start(*script, "--", *FEW)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = (tmp_path / "logs/kl_sweep_pocket.log").read_text()
    for run in planned:
        result = (tmp_path / run["log"]).with_suffix(".result").read_text().strip()
        assert status_of(result) == "success" and "N/A" not in result and result in summary
        assert len((tmp_path / run["checkpoints"] / "metrics.jsonl").read_text().splitlines()) == 4
    assert "reference model" not in (tmp_path / planned[0]["log"]).read_text()

    again = start(*script, "--resume", "--", *FEW)
    assert again.returncode == 0 and "start " not in again.stdout
    assert (tmp_path / "logs/kl_sweep_pocket.log").read_text() == summary
    report = start("./ragen", "report", "logs/kl_sweep_pocket.log")
    assert report.returncode == 0, report.stderr
    written = [Path(line.partition(": ")[2]) for line in report.stdout.splitlines() if line.startswith("report: ")]
    assert [path.suffix for path in written] == [".html", ".md"] and all(path.is_file() for path in written)


@pytest.mark.slow
def test_model_scaling_is_evaluated_when_its_runs_have_ended(start, tmp_path):
    tiny = ("es_manager.train.env_groups=2", "es_manager.train.group_size=2", "es_manager.val.env_groups=2")
    tiny += ("ppo_mini_batch_size=4", "trainer.logger=[console]")
    script = ("bash", "scripts/runs/run_model_scaling.sh", "--models", "pocket", "--gpus", "cpu", "--steps", "1")
    script += ("--evaluate-turns", "2,4")
    ended = start(*script, "--", *tiny)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = tmp_path / "log/terminal"
    written = [folder / f"sokoban_model_scaling_eval.{kind}" for kind in ("jsonl", "md", "html")]
    trained = "sokoban_pocket_ragen_main/global_step_1"
    rows = [
        line.split(" | ") for line in written[1].read_text().splitlines() if line.startswith(("| pocket", "| soko"))
    ]
    assert [row[:2] for row in rows] == [[f"| {model}", turns] for model in ("pocket", trained) for turns in "24"]
    assert all(row[3].endswith(" vs pocket") and row[-1].startswith("2 levels") for row in rows[2:])
    assert all(" | ".join(row) in ended.stdout for row in rows)
    assert (
        "evaluation: log/terminal/sokoban_model_scaling_eval.html\n"
        in (folder / "sokoban_model_scaling.log").read_text()
    )

    before = [path.read_bytes() for path in written]
    for path in written:
        path.unlink()
    (lost,) = [
        path for path in folder.glob(".journal-*") if trained in (text := path.read_text()) and '"max_turn": 4' in text
    ]
    lost.unlink()
    again = start(*script, "--resume", "--", *tiny)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "start sokoban" not in again.stdout and "loading pocket" not in again.stdout
    assert (
        f"{trained}, 4 turns: 2 of 2" in again.stdout
        and "pocket: 2 episodes are already in the journal" in again.stdout
    )
    assert [path.read_bytes() for path in written] == before
