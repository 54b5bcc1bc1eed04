"""scripts/studies/seeds.py: plans that resolve, runs that are not repeated, a table sorted by the lower quartile."""

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import started

from ragen.config.schema import Config
from ragen.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/studies/seeds.py"


@pytest.fixture(scope="module")
def seeds():
    spec = importlib.util.spec_from_file_location("seeds_study", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "about: Two rates.\nenvironment: sokoban\nseeds: 3\nreference: high\n"
        "overrides: [trainer.total_training_steps=4]\n"
        "variants:\n  high: []\n  low: [actor_rollout_ref.actor.optim.lr=1e-4]\n"
    )
    return path


def options(seeds, action, plan, tmp_path, *words):
    given = [action, str(plan), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results.jsonl"), *words]
    return seeds.arguments().parse_args(given)


def study(seeds, plan, tmp_path, *words):
    chosen = options(seeds, "run", plan, tmp_path, "--at-once", "1", *words)
    return seeds.Study(chosen, "a machine").run(seeds.tasks_of(seeds.Plan.read(str(plan)), chosen))


def results(tmp_path):
    path = tmp_path / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class FakeRuns:
    """`ragen train`, as far as the script sees it: its exit statuses are given, a finished one leaves its files."""

    def __init__(self, *statuses):
        self.statuses, self.calls = list(statuses), []

    def __call__(self, study, words, threads, log):
        self.calls.append(words)
        status = self.statuses.pop(0) if self.statuses else 0
        if status in (0, 3):
            (place,) = [word.partition("=")[2] for word in words if word.startswith("trainer.default_local_dir=")]
            folder = RunFolder(place)
            folder.path.mkdir(parents=True)
            folder.write_config(Config())  # eight groups of sixteen
            folder.append_metrics(0, self.validation(0.4) | {"timing_s/testing": 30.0})
            for step in range(1, 5):
                trained = {"train/reward": 1.0, "train/format_valid": 0.96, "timing_s/step": 15.0}
                trained |= {"rollout/varied_ratio": 0.5, "rollout/resampled_episodes": 8.0}
                folder.append_metrics(step, trained | (self.validation(0.4 + step / 100) if step % 2 == 0 else {}))
            folder.write_finished("finished" if status == 0 else "early_stopped", 4, None)
        return status

    @staticmethod
    def validation(success):
        named = {"success": success, "greedy_success": success + 0.1}
        return {f"val-env/SimpleSokoban/{name}": value for name, value in named.items()} | {
            "val-env/format_valid": 0.99
        }


@pytest.fixture
def fake(seeds, monkeypatch):
    runs = FakeRuns()
    monkeypatch.setattr(seeds.Study, "_call", lambda study, *given: runs(study, *given))
    return runs


@pytest.mark.slow
def test_every_variant_of_every_plan_resolves_to_a_run_that_is_different(seeds):
    chosen = seeds.arguments().parse_args(["run", "recipes"])
    plans = [seeds.Plan.read(path.stem) for path in sorted(seeds.PLANS.glob("*.yaml"))]
    assert {plan.name for plan in plans} >= {"default", "recipes", "levels", "kl"}
    for plan in plans:
        tasks = [task for task in seeds.tasks_of(plan, chosen) if task.seed == 0]
        assert len({task.recipe for task in tasks}) == len(tasks) == len(plan.variants)


def test_a_recipe_is_what_a_run_computes_not_how_it_is_spelled(seeds):
    def recipe(*overrides):
        return seeds.Task("sokoban", "", overrides, 0, 1).recipe

    assert recipe() == recipe("actor_rollout_ref.actor.optim.lr=0.0003") == recipe("trainer.logger=[console,wandb]")
    assert len({recipe(), recipe("trainer.total_training_steps=9"), recipe("ppo_mini_batch_size=32")}) == 3


def test_a_finished_run_is_one_line_and_is_not_repeated(seeds, plan, tmp_path, fake):
    assert study(seeds, plan, tmp_path) == 0
    lines = results(tmp_path)
    assert [(line["overrides"][1:], line["seed"]) for line in lines[:3]] == [
        ([], 0), (["actor_rollout_ref.actor.optim.lr=1e-4"], 0), ([], 1),
    ]  # fmt: skip
    first = lines[0]
    assert (first["start"], first["best"], first["end"], first["greedy_end"]) == (0.4, 0.44, 0.44, pytest.approx(0.54))
    assert first["minutes"] == 1.5 and first["episodes"] == 4 * (8 * 16 + 8) and first["steps"] == 4
    assert (first["valid_end"], first["valid_lowest"], first["varied"]) == (0.99, 0.96, 0.5)
    assert first["curve"][1][:3] == [2, 272.0, pytest.approx(0.42)] and first["machine"] == "a machine"
    assert study(seeds, plan, tmp_path) == 0 and len(fake.calls) == 6 and results(tmp_path) == lines
    assert study(seeds, plan, tmp_path, "--seeds", "3", "--only", "low") == 0 and len(results(tmp_path)) == 7


def test_a_failed_run_is_reported_and_a_preempted_one_resumes(seeds, plan, tmp_path, fake, capsys):
    fake.statuses = [143, 1, 3]
    assert study(seeds, plan, tmp_path, "--seeds", "0", "1", "--only", "high") == 1
    assert "seed 1: failed with exit status 1" in capsys.readouterr().out and not results(tmp_path)
    assert study(seeds, plan, tmp_path, "--seeds", "0", "--only", "high") == 0
    assert results(tmp_path)[0]["status"] == "early_stopped"
    assert fake.calls[0] == fake.calls[2], "the same command"


def test_a_run_that_ended_without_its_line_gets_it(seeds, plan, tmp_path, fake):
    assert study(seeds, plan, tmp_path, "--seeds", "0", "--only", "high") == 0
    (tmp_path / "results.jsonl").unlink()
    assert study(seeds, plan, tmp_path, "--seeds", "0", "--only", "high") == 0
    assert len(fake.calls) == len(results(tmp_path)) == 1


def test_when_the_time_is_over_nothing_starts(seeds, plan, tmp_path, fake, capsys):
    assert study(seeds, plan, tmp_path, "--minutes", "1e-9") == 143
    assert not fake.calls and "0 finished, 0 failed, 6 left" in capsys.readouterr().out


def test_the_table_is_sorted_by_the_lower_quartile(seeds, plan, tmp_path, fake):
    study(seeds, plan, tmp_path)
    found = seeds.read_results(tmp_path / "results.jsonl")
    ends = {"high": [0.3, 0.6, 0.6], "low": [0.45, 0.46, 0.47]}
    changed = []
    for name, values in ends.items():
        of_variant = [one for one in found if (len(one.overrides) == 2) == (name == "low")]
        changed += [dataclasses.replace(one, end=end) for one, end in zip(of_variant, values, strict=True)]
    chosen = options(seeds, "table", plan, tmp_path)
    made = seeds.Plan.read(str(plan))
    text = seeds.table(made, seeds.tasks_of(made, chosen), changed)
    low, high = [line for line in text.splitlines() if line.startswith(("| low", "| high"))]
    assert low.startswith("| low | 3 | 45.0 · 45.5 · 46.0 · 47.0 |") and "-4.0 [" in low
    assert high.startswith("| high | 3 | 30.0 · 45.0 · 50.0 · 60.0 |") and high.endswith("| reference |")
    assert "a machine" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [(["recipes", "--only", "rat"], "--only rat: no such variant"), (["nothing"], "nothing: no such plan")],
)
def test_wrong_names_are_refused(seeds, monkeypatch, words, message):
    monkeypatch.setattr(sys, "argv", ["seeds.py", "table", *words])
    with pytest.raises(SystemExit, match=message):
        seeds.main()


@pytest.mark.slow
def test_real_runs_stop_and_resume(plan, tmp_path):
    few = "es_manager.val.env_groups=4 es_manager.train.env_groups=2 ppo_mini_batch_size=8 trainer.test_freq=2"
    command = [sys.executable, SCRIPT, "run", plan, "--seeds", "0", "--runs", tmp_path / "runs", "--results",
               tmp_path / "results.jsonl", "--overrides", *few.split(), "trainer.total_training_steps=14"]  # fmt: skip

    def num_steps():
        return [len(path.read_text().splitlines()) for path in (tmp_path / "runs").glob("*/metrics.jsonl")]

    with started(command, stdout=subprocess.PIPE, text=True) as study:
        while study.poll() is None and max(num_steps(), default=0) < 4:
            time.sleep(0.05)
        study.send_signal(signal.SIGTERM)
        told, _ = study.communicate()
    assert study.returncode == 143 and "0 failed" in told, told
    assert any(1 < num < 14 for num in num_steps()), "they were on their way"
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(results(tmp_path)) == 2
    logs = "".join(path.read_text() for path in (tmp_path / "runs").glob("*.log"))
    assert "resumes after step" in logs
