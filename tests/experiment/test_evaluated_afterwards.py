"""What follows the runs of an experiment that is evaluated. For real, with a model: test_for_real.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from dry_runs import dry_run
from stub_plans import FakeCluster, make_cell, make_plan

from ragen.errors import ConfigError
from ragen.experiment import command, evaluation, run_process, scheduler, spec
from ragen.experiment.expand import expand
from ragen.experiment.plan import Options
from ragen.store.manifest import Manifest, write_manifest

PLAN = """
start: [sokoban]
title: Mine
name: mine-{model:name}
project: mine
model: pocket
summary: logs/mine.log
log: logs/{name}.log
checkpoints: saved/{name}
"""


# --- what is asked for --------------------------------------------------------------------------------------------


def loaded(tmp_path, entry):
    path = tmp_path / "mine.yaml"
    path.write_text(PLAN + entry)
    return str(path)


@pytest.mark.parametrize(("entry", "turns"), [
    ("", ()), ("evaluate: {}", ()), ("evaluate: {max_turns: [5, 25]}", (5, 25)), ("evaluate: {max_turns: [7]}", (7,)),
])  # fmt: skip
def test_a_plan_says_what_is_evaluated(tmp_path, entry, turns):
    name = loaded(tmp_path, entry)
    assert expand(name, Options()).options.evaluate_turns == turns
    assert expand(name, Options(evaluate_turns=(3,))).options.evaluate_turns == (3,)
    assert expand(name, Options(evaluate_turns=())).options.evaluate_turns == ()


@pytest.mark.parametrize(("entry", "says"), [
    ("evaluate: 5", "evaluate=5: input should be a valid dictionary"),
    ("evaluate: {max_turn: [5]}", "evaluate: unknown entry max_turn; did you mean max_turns?"),
    ("evaluate: {max_turns: 5}", "evaluate.max_turns=5: input should be a valid tuple"),
    ("evaluate: {max_turns: []}", "evaluate.max_turns=[]: tuple should have at least 1 item"),
    ("evaluate: {max_turns: [[5]]}", "evaluate.max_turns.0=['5']: input should be a valid integer"),
    ("evaluate: {max_turns: [0]}", "evaluate.max_turns.0=0: input should be greater than 0"),
    ("evaluate: {max_turns: [many]}", "evaluate.max_turns.0=many: input should be a valid integer"),
    ("evaluate: {max_turns: [5, 05]}", "evaluate.max_turns=[5, 5]: a number is listed twice"),
    ("evalaute: {max_turns: [5]}", "unknown entry evalaute; did you mean evaluate?"),
])  # fmt: skip
def test_a_wrong_entry_is_refused_by_name(tmp_path, entry, says):
    with pytest.raises(ConfigError) as refused:
        spec.load(loaded(tmp_path, entry))
    assert says in str(refused.value) and "mine.yaml" in str(refused.value)


@pytest.mark.parametrize(("words", "turns"), [
    ([], None), (["--evaluate-turns", "5,25"], (5, 25)), (["--evaluate_turns=none"], ()),
])  # fmt: skip
def test_the_option(words, turns):
    assert command.read_options(spec.load("kl_sweep"), words).evaluate_turns == turns


@pytest.mark.parametrize(("value", "says"), [
    ("5,x", "--evaluate-turns x: takes a whole number"), ("0", "--evaluate-turns 0: must be at least 1"),
    ("5,5", "--evaluate-turns 5,5: a number is listed twice"), (",", "--evaluate-turns ',': the list is empty"),
])  # fmt: skip
def test_a_wrong_option(value, says):
    with pytest.raises(ConfigError, match=says):
        command.read_options(spec.load("kl_sweep"), ["--evaluate-turns", value])


def test_help_tells_the_default():
    for name, default in (("model_scaling", "5,25"), ("kl_sweep", "none")):
        shown = " ".join(command.make_parser(spec.load(name)).format_help().split())
        assert "--evaluate-turns LIST evaluate the trained models" in shown and f"or none (default {default})" in shown


def test_a_dry_run_shows_what_follows():
    done = dry_run("bash scripts/runs/run_model_scaling.sh --models pocket,pocket-blank --gpus cpu")
    assert done.errors == (
        "then: ./ragen eval checkpoints/RAGEN/sokoban_pocket_ragen_main "
        "checkpoints/RAGEN/sokoban_pocket_blank_ragen_main --max-turns=5,25 --with-base --keep-journal --replace "
        "--output=log/terminal 'output.filename=\"sokoban_model_scaling_eval\"' output.append_timestamp=False "
        "output.format=jsonl trainer.n_gpus_per_node=1 system.CUDA_VISIBLE_DEVICES=-1\n"
    )
    gpus = dry_run("bash scripts/runs/run_model_scaling.sh --models pocket --gpus 3,1 --evaluate-turns 9")
    assert "--max-turns=9 " in gpus.errors and gpus.errors.endswith("CUDA_VISIBLE_DEVICES=3\n")
    none = dry_run("bash scripts/runs/run_model_scaling.sh --models pocket --gpus cpu --evaluate-turns none")
    assert none.errors == "" and len(none.runs) == 1


def test_what_saves_nothing_is_refused_before_it_is_trained():
    done = dry_run("./ragen sweep kl_sweep --kl-values 0 --gpus 0 --evaluate-turns 5")
    assert done.status == 2 and "saves no checkpoint that could be evaluated (trainer.save_freq=-1)" in done.errors
    assert dry_run("./ragen sweep kl_sweep --kl-values 0 --gpus 0 --evaluate-turns 5 --save-freq 9").status == 0
    assert dry_run("./ragen sweep kl_sweep --kl-values 0 --gpus 0").errors == ""


def test_different_games_are_told():
    words = "--slipper-rate 0,50 --filter-modes filter --gpus 0 --evaluate-turns 5 -- trainer.save_freq=9"
    done = dry_run(f"./ragen sweep frozen_lake_slipper_rate_sweep {words}")
    assert done.status == 0 and done.errors.count(" are validated in different games: ") == 1


# --- what is done -------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name):
    folder = Path("saved") / name / "global_step_2"
    (folder / "actor").mkdir(parents=True)
    write_manifest(folder, Manifest(2, {"actor": ["model"]}, False, False, True, {}))


def ran(monkeypatch, outcomes, saved, **options):
    """A plan whose runs have ended so, and what the scheduler returned."""
    monkeypatch.setattr(scheduler, "connected", FakeCluster(outcomes).connected)
    plan = make_plan([make_cell(name) for name in outcomes], Options(gpus=("cpu",), evaluate_turns=(5, 25), **options))
    for name in saved:
        save(name)
    return plan, scheduler.run(plan)


@pytest.fixture
def played(monkeypatch):
    """In place of `ragen eval`: the jobs that were started, and what becomes of them."""
    jobs, ends = [], [{"status": 0}]

    def run_child(job, on_pause):
        jobs.append(job)
        with open(job["log"], "a") as log:
            log.write("| a table – |\nepisodes: logs/stub_eval.jsonl\nreport: logs/stub_eval.html\n")
        return ends[0]

    monkeypatch.setattr(run_process, "run_child", run_child)
    return jobs, ends


def test_what_succeeded_is_evaluated(here, monkeypatch, played, capsys):
    plan, status = ran(monkeypatch, {"a": [0], "b": [1], "c": [3], "d": [0], "e": [0]}, saved="abcd")
    assert status == 1 and evaluation.evaluate(plan) == 0
    (job,), _ = played
    assert job["command"][1:6] == ["-m", "ragen", "eval", "saved/a", "saved/d"]
    assert "--output=logs" in job["command"] and 'output.filename="stub_eval"' in job["command"]
    assert job["log"] == "logs/stub_eval.log" and job["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    out = capsys.readouterr().out
    left_out = "b (fail), c (early_stopped:unknown), e (no checkpoint in saved/e)"
    assert f"not evaluated: {left_out}\n| a table – |\nepisodes: " in out
    assert Path("logs/stub.log").read_text().splitlines()[-1] == "evaluation: logs/stub_eval.html"


def test_resumed_it_is_named_once(here, monkeypatch, played):
    plan, _ = ran(monkeypatch, {"a": [0]}, saved="a")
    resumed = replace(plan, options=replace(plan.options, resume=True))
    assert [evaluation.evaluate(one) for one in (plan, resumed)] == [0, 0]
    assert Path("logs/stub.log").read_text().count("evaluation: ") == 1
    assert Path("logs/stub_eval.log").read_text().count("a table") == 2
    assert evaluation.evaluate(plan) == 0 and Path("logs/stub_eval.log").read_text().count("a table") == 1


def test_an_experiment_that_starts_anew_keeps_the_older_evaluation(here, monkeypatch, played):
    """As it does with the summary; resumed, the files are left to `ragen eval --replace`."""
    plan, _ = ran(monkeypatch, {"a": [0]}, saved="a")
    files = [Path(f"logs/stub_eval{ending}") for ending in (".jsonl", ".md", ".html")]
    for number, resume in enumerate((True, False, False)):
        for path in files:
            path.write_text(f"{number}")
        evaluation.evaluate(replace(plan, options=replace(plan.options, resume=resume)))
        assert [path.exists() for path in files] == [resume] * 3
    kept = [[path.with_name(f"{path.name}.{number}").read_text() for path in files] for number in (1, 2)]
    assert kept == [["2"] * 3, ["1"] * 3]


def test_where_nothing_was_trained_nothing_is_evaluated(here, monkeypatch, played, capsys):
    plan, status = ran(monkeypatch, {"a": [1], "b": [3]}, saved="a")
    assert status == 1 and evaluation.evaluate(plan) == 1
    assert played[0] == [] and not Path("logs/stub_eval.log").exists()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "no evaluation: nothing was trained: a (fail), b (early_stopped:unknown)"


@pytest.mark.parametrize(("end", "status", "says"), [
    ({"status": 2}, 2, ""), ({"status": 1}, 1, ""),
    ({"status": 130}, 130, "the evaluation was interrupted: run the same command with --resume to resume"),
    ({"status": -2}, 130, "the evaluation was interrupted"),
    ({"status": -9}, 1, "the evaluation failed: killed by signal 9"),
    ({"error": "No space left: the log"}, 1, "the evaluation failed: No space left: the log"),
])  # fmt: skip
def test_an_evaluation_that_fails(here, monkeypatch, played, capsys, end, status, says):
    plan, _ = ran(monkeypatch, {"a": [0]}, saved="a")
    played[1][0] = end
    assert evaluation.evaluate(plan) == status
    assert says in capsys.readouterr().out and "evaluation: " not in Path("logs/stub.log").read_text()


@pytest.mark.parametrize(("ends", "evaluated", "turns", "status", "num"), [
    ([0], [0], (5,), 0, 1), ([1], [0], (5,), 1, 1), ([0], [3], (5,), 3, 1), ([1], [3], (5,), 1, 1),
    ([130], [], (5,), 130, 0), ([0], [], (), 0, 0), ([0, 0], [2, 0], (5,), 2, 2), ([0], [130], (5,), 130, 1),
])  # fmt: skip
def test_exit_status(monkeypatch, ends, evaluated, turns, status, num):
    """That of the sweep, or else that of the evaluation; an interruption starts nothing more."""
    monkeypatch.setattr(scheduler, "run", lambda plan, ends=list(ends): ends.pop(0))
    left = list(evaluated)
    monkeypatch.setattr(evaluation, "evaluate", lambda plan: left.pop(0))
    plan = make_plan(["a"], Options(gpus=("cpu",), evaluate_turns=turns), source="kl_sweep")
    assert command.start([plan] * len(ends)) == status
    assert len(evaluated) - len(left) == num


def test_an_interrupted_evaluation_stops_a_series(monkeypatch):
    monkeypatch.setattr(scheduler, "run", lambda plan, ends=[0]: ends.pop(0))
    monkeypatch.setattr(evaluation, "evaluate", lambda plan: evaluation.INTERRUPTED)
    plan = make_plan(["a"], Options(gpus=("cpu",), evaluate_turns=(5,)), source="kl_sweep")
    assert command.start([plan, plan]) == 130
