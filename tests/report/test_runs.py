"""`ragen runs` on folders that were made by hand: whole, running, stopped, half written and broken."""

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.cli.runs import age, compare_runs, list_lines, list_runs
from ragen.config.schema import Config
from ragen.errors import ConfigError
from ragen.report.runs import Value, difference, different_settings, read_run, status_of, values_of
from ragen.store.find_run import find_runs
from ragen.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
TAG = "CoordSokoban"


def make_run(path, successes=(), total=20, estimator="grpo", lr=1e-6):
    """A run with a validation every ten steps."""
    folder, config = RunFolder(path), Config()
    config.model_path, config.trainer.total_training_steps = "Qwen/Qwen2.5-3B", total
    config.algorithm.adv_estimator = estimator
    config.actor_rollout_ref.actor.optim.lr = lr
    config.trainer.experiment_name = Path(path).name
    folder.write_config(config)
    for index, success in enumerate(successes):
        prefix = f"val-env/{TAG}/success"
        bounds = {f"{prefix}_low": success - 0.1, f"{prefix}_high": success + 0.1}
        folder.append_metrics(10 * index, {prefix: success, "actor/entropy": 0.5 - index / 10, **bounds})
    return folder


def write_outcomes(folder, step, outcomes, board="board"):
    """Stored validation episodes: (seed, won), all on one board."""
    lines = [
        {
            "tag": TAG, "seed": seed, "success": won, "reward": 0.0, "penalty": 0.0, "sequences": [],
            "turns": [{"state_text": board, "reward": 0.0, "penalty": 0.0}],
        }
        for seed, won in outcomes
    ]  # fmt: skip
    folder.episodes_path.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder.episodes_path / f"val-{step:06d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def ragen(*words, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ragen", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "checkpoints"


# --- finding and reading ------------------------------------------------------------------------------------------


def test_runs_are_found_below_folders_and_named_by_their_path(place):
    make_run(place / "ragen/a", [0.1])
    make_run(place / "ragen/a/inner", [0.1])
    (place / "ragen/b").mkdir()
    (place / "ragen/b/config.yaml").write_text("{}")  # nobody's
    (place / "ragen/c").mkdir()
    (place / "ragen/c/.owner").touch()
    (place / "ragen/c/config.yaml").write_text("{}")
    for hidden in ("global_step_10", "episodes", ".cache"):
        make_run(place / "ragen/a" / hidden, [0.1])
    assert [name for name, _ in find_runs([place])] == ["ragen/a", "ragen/a/inner", "ragen/c"]
    assert [name for name, _ in find_runs([place / "ragen/a", place])] == ["a", "inner", "ragen/c"], "each once"


def test_values_and_their_intervals(place):
    folder = make_run(place / "a", [0.25, 0.5, 0.5])
    folder.append_metrics(30, {f"val-env/{TAG}/success": float("nan")})
    run = read_run("a", folder)
    assert run.values[0] == Value(0, 0.25, (0.15, 0.35))
    assert (run.last.step, run.best.step) == (20, 10), "the last finite one; the first of the highest"
    assert [value.value for value in values_of(run.metrics, "actor/entropy")] == pytest.approx([0.5, 0.4, 0.3])
    assert read_run("a", folder, "actor/entropy").best.step == 0
    assert (run.model, run.environments, run.total_steps) == ("Qwen2.5-3B", [TAG], 20)


def test_status(place):
    folder = make_run(place / "a", [0.1, 0.2], total=20)
    assert read_run("a", folder).status == "interrupted", "step 10 of 20 and nobody there"
    with folder.owned():
        assert read_run("a", folder).status == "running"
    folder.append_metrics(20, {"actor/entropy": 0.1})
    assert read_run("a", folder).status == "finished"
    folder.write_finished("early_stopped", 20, "low_validation_success", "so low")
    run = read_run("a", folder)
    assert (run.status, run.rule) == ("stopped early", "low_validation_success")
    with folder.owned():
        folder.owner_path.write_text("process 1 on elsewhere\n")
        assert read_run("a", folder).status == "running on elsewhere"
    short = make_run(place / "b", [0.1], total=20)
    assert status_of(short, short.read_metrics(), {"status": "finished"}, 20) == ("finished", ""), "its record says so"
    short.append_metrics(5, {"early_stopped/empty_filtered_steps": 1.0})
    assert read_run("b", short).rule == "empty_filtered_steps"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: folder.config_path.write_text("a: [b"), "config.yaml cannot be read"),
        (
            lambda folder: folder.config_path.write_text("- 1"),
            "config.yaml cannot be read (it does not hold a tree of keys)",
        ),
        (lambda folder: folder.config_path.write_bytes(b"\xff\xfe\x00"), "config.yaml cannot be read"),
        (lambda folder: folder.config_path.unlink(), "config.yaml is missing or empty"),
        (
            lambda folder: folder.metrics_path.write_bytes(b'{"step": 1}\n{"ste'),
            "the last line of metrics.jsonl is torn",
        ),
        (lambda folder: folder.metrics_path.write_bytes(b"\x00\n"), "line 1 of metrics.jsonl is not valid"),
        (lambda folder: (folder.metrics_path.unlink(), folder.metrics_path.mkdir()), "metrics.jsonl cannot be read"),
        (lambda folder: folder.finished_path.write_text("{"), "finished.json cannot be read"),
    ],
)
def test_a_broken_folder_is_listed_with_what_is_wrong(place, capsys, damage, problem):
    folder = make_run(place / "ragen/a", [0.1])
    folder.owner_path.write_text('{"pid": "x", "host": "y", "started": []}')
    damage(folder)
    folder.owner_path.write_text("{")
    assert list_runs([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ragen/a ") and "interrupted" in lines[1]
    assert lines[2].startswith("ragen/a: ") and problem in lines[2]


def test_an_owner_that_is_gone_is_nobody(place):
    folder = make_run(place / "a", [0.1])
    folder.owner_path.write_text(f"process 1 on {socket.gethostname()}\n")
    assert read_run("a", folder).status == "interrupted"
    assert folder.owner_path.read_text().startswith("process 1"), "a reader changes nothing"


def test_a_line_that_is_being_written_is_no_problem(place):
    folder = make_run(place / "a", [0.1])
    with folder.owned():
        with folder.metrics_path.open("ab") as file:
            file.write(b'{"step": 9, "x"')
        assert read_run("a", folder).problems == ()
    assert len(read_run("a", folder).problems) == 1


# --- the list -----------------------------------------------------------------------------------------------------


def test_the_list_to_the_letter(place, capsys):
    make_run(place / "ragen/first", [0.25, 0.5, 0.375], estimator="gae")
    make_run(place / "ragen/second-one", [], total=5)
    make_run(place / "ragen/third", [0.125], total=100).write_finished("early_stopped", 7, "empty_filtered_steps")
    (place / "ragen/second-one/.owner").touch()
    now, files = time.time(), {"first": "metrics.jsonl", "second-one": "config.yaml", "third": "metrics.jsonl"}
    for (name, file), seconds in zip(files.items(), (200, 7300, 90), strict=True):
        os.utime(place / "ragen" / name / file, (now - seconds, now - seconds))
    assert list_runs([], sort="name") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines() == [
        "name              env           model       estimator   step  status                               "
        "            success        best  health    age",
        "ragen/first       CoordSokoban  Qwen2.5-3B  gae        20/20  finished                             "
        "37.5 % [27.5, 47.5]  50.0 % @10  –       3 min",
        "ragen/second-one  CoordSokoban  Qwen2.5-3B  grpo         –/5  interrupted                          "
        "                  –           –  –         2 h",
        "ragen/third       CoordSokoban  Qwen2.5-3B  grpo       0/100  stopped early: empty_filtered_steps  "
        " 12.5 % [2.5, 22.5]   12.5 % @0  –       1 min",
    ]
    list_runs([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "ragen/third", "ragen/first", "ragen/second-one",
    ]  # fmt: skip
    list_runs([], sort="success")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "ragen/first", "ragen/third", "ragen/second-one",
    ]  # fmt: skip


@given(st.integers(30, 140), st.integers(1, 60), st.sampled_from(["finished", "stopped early: low_validation_success"]))
def test_lines_fit_the_terminal_and_keep_what_matters(width, name_length, status):
    row = {
        "name": "n" * name_length, "env": "CoordSokoban", "model": "Qwen2.5-3B-Instruct", "estimator": "grpo",
        "step": "100/400", "status": status, "success": "37.5 % [27.5, 47.5]", "best": "50.0 % @10", "age": "12 min",
    }  # fmt: skip
    lines = list_lines([row, row], {key: key for key in row}, width)
    room_for_all = 8 + 13 + 19 + 4
    assert max(map(len, lines)) <= max(width, room_for_all)
    for line in lines[1:]:
        assert "37.5 % [27.5, 47.5]" in line.plain
        assert status.partition(":")[0] in line.plain
        assert line.plain.startswith("n" * min(name_length, 7))
    widest = list_lines([row], {key: key for key in row}, None)[1].plain
    assert all(text in widest for text in row.values())


def test_another_metric_and_unknown_names(place, capsys):
    make_run(place / "a", [0.1, 0.2])
    assert list_runs([], metric="actor/entropy") == 0
    out = capsys.readouterr().out
    assert "actor/entropy" in out and "0.4" in out and "0.5 @0" in out
    with pytest.raises(
        ConfigError, match="--metric actor/entropie: no run has this metric; did you mean actor/entropy"
    ):
        list_runs([], metric="actor/entropie")
    with pytest.raises(ConfigError, match=r"--sort sucess: must be one of age, name.*did you mean success"):
        list_runs([], sort="sucess")
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        list_runs(["nowhere"])


def test_no_runs_is_no_error(place, capsys):
    assert list_runs([]) == 0
    place.mkdir()
    assert list_runs([str(place)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no runs below checkpoints or model_saving or models",
        f"no runs below {place}",
    ]


def tuned(path, **metrics):
    """A fine-tuning run of three steps, the last of which has the validation of its result."""
    folder, config = RunFolder(path), Config()
    config.rl_or_sft, config.trainer.total_training_steps = "sft", 3
    folder.write_config(config)
    for step in (1, 2, 3):
        folder.append_metrics(step, {"train/loss": 1.0 / step} | (metrics if step == 3 else {}))
    return folder


def test_fine_tuning_is_listed_with_the_success_of_its_model(place, tmp_path, capsys):
    """In the output folder of the config and its siblings; until the model has played it is not finished."""
    prefix = f"val-env/{TAG}/success"
    interval = {f"{prefix}_low": 0.4, f"{prefix}_high": 0.6}
    tuned(tmp_path / "models/sft/sokoban/lora_weights", **{prefix: 0.5}, **interval).write_finished("finished", 3)
    tuned(tmp_path / "models/sft-2/lora_weights")
    (tmp_path / "models/sft/sokoban/merged_model").mkdir()
    make_run(place / "ragen/rl", [0.25])
    assert list_runs([], sort="name") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["ragen/rl", "sft-2/lora_weights", "sft/sokoban/lora_weights"]
    assert [row[3] for row in rows] == ["grpo", "sft", "sft"]
    assert [row[4:6] for row in rows[1:]] == [["3/3", "interrupted"], ["3/3", "finished"]]
    assert "50.0 % [40.0, 60.0]" in " ".join(rows[2])
    list_runs([], sort="estimator", as_json=True)
    assert [row["estimator"] for row in json.loads(capsys.readouterr().out)] == ["grpo", "sft", "sft"]


def test_json(place, capsys):
    folder = make_run(place / "ragen/a", [0.25, 0.5])
    folder.append_metrics(12, {"x": float("nan")})
    list_runs([], as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["folder"], row["status"], row["rule"]) == (
        "ragen/a",
        "checkpoints/ragen/a",
        "interrupted",
        None,
    )
    assert row["last"] == {"step": 10, "value": 0.5, "interval": [0.4, 0.6]}
    assert (row["step"], row["total_steps"], row["environments"]) == (12, 20, [TAG])


def test_ages():
    assert [age(seconds) for seconds in (0, 59.4, 60, 3599, 7200, 86_400 * 3.9)] == [
        "0 s", "59 s", "1 min", "59 min", "2 h", "3 d",
    ]  # fmt: skip


# --- comparing ----------------------------------------------------------------------------------------------------


def test_settings_that_differ_are_those_that_act(place):
    runs = [read_run("a", make_run(place / "a", lr=1e-6)), read_run("b", make_run(place / "b", lr=1e-5))]
    assert different_settings(runs) == {"actor_rollout_ref.actor.optim.lr": [1e-6, 1e-5]}, "not the name"


def test_a_paired_difference_by_hand(place):
    """Of 8 shared levels 4 were won and 1 was lost. Agresti and Min: centre (4.5 - 1.5) / 10, spread as below."""
    first, second = make_run(place / "a", [0.1, 0.2]), make_run(place / "b", [0.3])
    write_outcomes(first, 0, [(99, True)])
    write_outcomes(first, 10, [(seed, seed < 3) for seed in range(8)] + [(50, True)])
    write_outcomes(second, 0, [(seed, seed in (0, 1, 3, 4, 5, 6)) for seed in range(8)] + [(60, True)])
    found, problem = difference(read_run("a", first), read_run("b", second), TAG)
    spread = 1.959964 * (6 - 9 / 10) ** 0.5 / 10
    assert problem == "" and found.num_levels == 8
    assert tuple(found)[:3] == pytest.approx((3 / 8, 0.3 - spread, 0.3 + spread), abs=1e-6)


LEVELS = st.dictionaries(st.integers(0, 6), st.tuples(st.sampled_from("xy"), st.booleans()), max_size=7)


@settings(max_examples=50)
@given(LEVELS, LEVELS)
def test_only_the_same_boards_are_pairs(tmp_path_factory, first, second):
    """Naively: walk through all pairs of episodes and count."""
    place = tmp_path_factory.mktemp("runs")
    runs = []
    for name, played in (("a", first), ("b", second)):
        folder = RunFolder(place / name)
        folder.append_metrics(0, {f"val-env/{TAG}/success": 0.5})
        folder.episodes_path.mkdir()
        with gzip.open(folder.episodes_path / "val-000000.jsonl.gz", "wt") as file:
            for seed, (board, won) in played.items():
                turns = [{"state_text": board, "reward": 0, "penalty": 0}]
                record = {"tag": TAG, "seed": seed, "success": won, "reward": 0, "penalty": 0}
                file.write(json.dumps(record | {"turns": turns, "sequences": []}) + "\n")
        runs.append(read_run(name, folder))
    gained, shared = 0, 0
    for seed, (board, won) in first.items():
        for other_seed, (other_board, other_won) in second.items():
            if (seed, board) == (other_seed, other_board):
                shared += 1
                gained += int(other_won) - int(won)
    found, problem = difference(*runs, TAG)
    if shared == 0:
        assert found is None and problem == "no level was played by both"
    else:
        assert (found.num_levels, found.mean) == (shared, pytest.approx(gained / shared))


def test_why_there_is_no_difference(place):
    first, second = make_run(place / "a", [0.1]), make_run(place / "b", [0.3])
    runs = read_run("a", first), read_run("b", second)
    assert difference(*runs, TAG) == (None, "a has no stored episodes of its last validation")
    write_outcomes(first, 0, [(1, True), (1, False)])
    write_outcomes(second, 0, [(1, True)])
    assert difference(*runs, TAG) == (None, "a played levels more than once: no pairs")
    write_outcomes(first, 0, [(1, True)], board="another")
    assert difference(*runs, TAG) == (None, "no level was played by both")
    (first.episodes_path / "val-000000.jsonl.gz").write_bytes(b"garbage")
    assert "val-000000.jsonl.gz of a cannot be read" in difference(*runs, TAG)[1]


def test_a_comparison_to_the_letter(place, capsys):
    first, second = make_run(place / "ragen/a", [0.25, 0.5]), make_run(place / "ragen/b", [0.25, 0.25, 0.75], lr=1e-5)
    write_outcomes(first, 10, [(seed, seed < 200) for seed in range(400)])
    write_outcomes(second, 20, [(seed, seed < 300) for seed in range(400)])
    assert compare_runs(["a", str(place / "ragen/b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "A  ragen/a  interrupted  step 10/20",
        f"B  {place}/ragen/b  finished  step 20/20",
        "",
        "settings that differ",
        "                                  A      B",
        "actor_rollout_ref.actor.optim.lr  1e-06  1e-05",
        "",
        f"validation, {TAG}",
        "A  50.0 % [40.0, 60.0] step 10  ▁▅",
        "B  75.0 % [65.0, 85.0] step 20  ▁▁█",
        "B - A  +25.0 [+20.6, +29.1] points on 400 shared levels: more than noise",
    ]
    assert compare_runs(["a", "ragen/b"], as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"] == {"actor_rollout_ref.actor.optim.lr": [1e-6, 1e-5]}
    assert data["validation"][TAG]["difference_from_first"][0]["mean"] == 0.25


def test_narrow_comparisons_stack_their_settings(place, capsys, monkeypatch):
    make_run(place / "a", [0.25])
    make_run(place / "b", [], lr=1e-5)
    (place / "b/.owner").touch()
    monkeypatch.setenv("COLUMNS", "40")
    compare_runs(["a", "b", "a"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[5:9] == ["actor_rollout_ref.actor.optim.lr", "  A  1e-06", "  B  1e-05", "  C  1e-06"]
    assert "B  –" in lines and not any(line.startswith("B - A") for line in lines)
    assert "C - A  a has no stored episodes of its last validation" in lines


def test_runs_that_cannot_be_told_or_found(place):
    make_run(place / "x/same", [0.1])
    make_run(place / "y/same", [0.1])
    for words, message in (
        (["same", "x/same"], "run same: several runs match; name one of checkpoints/x/same, checkpoints/y/same"),
        (["x/sam", "x/same"], "run x/sam: no such run or run directory; did you mean x/same?"),
        (["x/same"], "--compare x/same: name at least two runs"),
    ):
        with pytest.raises(ConfigError, match=message.replace("?", "[?]")):
            compare_runs(words)


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_in_a_pipe_and_from_another_folder(place, tmp_path):
    make_run(place / "ragen/a", [0.25])
    run = ragen("runs", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[1].startswith("ragen/a ") and "\x1b" not in run.stdout
    there = ragen("runs", "ragen", cwd=ROOT, RAGEN_CALLER_DIR=str(place))
    assert there.stdout.splitlines()[1].startswith("a ")
    both = ragen("runs", "--compare", "ragen/a", "ragen/a", cwd=ROOT, RAGEN_CALLER_DIR=str(place))
    assert both.returncode == 0 and "settings: no difference" in both.stdout
    bad = ragen("runs", "nowhere", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "") and "no such directory" in bad.stderr


def test_colours_are_for_terminals_that_want_them(place, tmp_path):
    make_run(place / "a", [0.25])
    shown = {}
    for name, value in (("colour", ""), ("none", "1")):
        command = f"stty cols 60; NO_COLOR={value} {sys.executable} -m ragen runs"
        run = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
        )
        shown[name] = run.stdout
    assert "\x1b[33minterrupted" in shown["colour"]
    assert "interrupted" in shown["none"] and "\x1b[33m" not in shown["none"]


def test_nothing_heavy_is_loaded(place, tmp_path):
    make_run(place / "a", [0.25])
    code = (
        "import sys; from ragen.cli import main; main(['runs'])\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'wandb') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["--help"], ["runs", "--help"], ["doctor", "--help"]])
def test_help_fits_a_terminal(words, tmp_path):
    run = ragen(*words, cwd=tmp_path, COLUMNS="80")
    assert run.returncode == 0 and max(map(len, run.stdout.splitlines())) <= 80
    assert "runs" in run.stdout or "doctor" in run.stdout
