"""The command as a user runs it: in its own process, by exit status and output."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ragen.cli import VERBS, verb_module
from ragen.play.person import ONE_ANSWER_PER_LINE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HEAVY = ("torch", "transformers", "ray", "wandb")


def ragen(*words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run `ragen …` and report, on the last line of stderr, which heavy modules it loaded."""
    code = (
        "import atexit, sys; from ragen.cli import main\n"
        f"loaded = lambda: [name for name in {HEAVY} if name in sys.modules]\n"
        "atexit.register(lambda: print('loaded', loaded(), file=sys.stderr))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        input=stdin,
        env=kept | {"PYTHONPATH": str(ROOT / "src")} | environment,
        timeout=120,
    )


def test_dry_run_prints_yaml_with_origins_and_derived_numbers():
    named = "model.base_model=Qwen/Qwen2.5-0.5B-Instruct"
    run = ragen("train", "sokoban", named, "training.n_rollout=8", "training.ppo_batch_size=64", "--dry-run")
    assert run.returncode == 0, run.stderr
    tree = yaml.safe_load(run.stdout)
    assert tree["es_manager"]["train"]["group_size"] == 8
    assert "group_size: 8  # command line: training.n_rollout=8" in run.stdout
    assert "# v1 default (sokoban)" in run.stdout
    for line in (
        "episodes per step: 64 (8 groups x 8)",
        "updates per step: 1",
        "reference model: yes, KL loss with coefficient 0.001",
        "critic: no, adv_estimator grpo needs no values",
    ):
        assert line in run.stdout
    assert "random play succeeds in" in run.stdout
    assert "loaded []" in run.stderr


def test_options_and_keys_in_any_order():
    run = ragen("train", "--dry-run", "trainer.test_freq=3", "--config-name=_2_sokoban", "lora.rank=4")
    tree = yaml.safe_load(run.stdout)
    assert (tree["trainer"]["test_freq"], tree["lora"]["rank"]) == (3, 4)
    assert tree["trainer"]["experiment_name"] == "sokoban-main"


def test_no_effect_keys_are_listed():
    run = ragen("train", "sokoban", "training.binary_reward=True", "--dry-run")
    assert "#   training.binary_reward: " in run.stdout


def test_a_model_that_cannot_be_had_is_said_before_anything_is_built(tmp_path):
    words = ("model_path=no/such-model", "algorithm.adv_estimator=grpo", "trainer.save_freq=-1")
    run = ragen("train", *words, f"trainer.default_local_dir={tmp_path / 'run'}", HF_HUB_OFFLINE="1")
    assert run.returncode == 2
    keys = ("model_path=pocket", "sft.training.base_model=pocket")
    for part in ("model no/such-model not found", "local Hugging Face cache", *keys):
        assert part in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()


def test_training_and_its_report_from_the_command_line(tmp_path):
    small = ["es_manager.train.env_groups=2", "es_manager.train.group_size=2", "es_manager.val.env_groups=2"]
    words = ["model.base_model=pocket", *small, "ppo_mini_batch_size=4", "trainer.total_training_steps=1"]
    run = ragen("train", "two_armed_bandit", *words, f"trainer.default_local_dir={tmp_path / 'run'}")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == f"run folder: {tmp_path / 'run'}"
    assert lines[-5] == f"report: {tmp_path / 'run' / 'report.html'}"
    commands = ["report {} --open", "play two_armed_bandit --agent {}", "eval {} --with-base"]
    for line, command in zip(lines[-3:], commands, strict=True):
        assert line.endswith(f"ragen {command.format(tmp_path / 'run')}")
    assert max(len(line) for line in lines if line.startswith("step:")) <= 200
    assert [line.split(" - ")[0] for line in lines if line.startswith("step:")] == ["step:0", "step:1"]
    assert "model: pocket (command line: model.base_model=pocket)" in run.stderr
    again = ragen("report", str(tmp_path / "run"))
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == lines[-5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "sokoban", "training.n_rolout=8"], "did you mean training.n_rollout?"),
        (["train", "trainer.test_freq=often"], "takes a whole number"),
        (["train", "algorithm.adv_estimator=ppo", "--dry-run"], "must be one of gae"),
        (["train", "--config-name", "nowhere"], "no such recipe. Known: "),
        (["train", "--config-name", ""], "no such recipe. Known: "),
        (["train", "sokoban", "env.env_kwargs.dim_x=4", "env.env_kwargs.dim_y=4"], "no Sokoban level"),
        (["train", "--config-dir", "/nowhere/at/all"], "not a directory"),
        (["train", "--multirun", "trainer.test_freq=1"], "ragen sweep"),
        (["train", "--dryrun"], "--dryrun; did you mean --dry-run?"),
        (["train", "bandit"], "did you mean two_armed_bandit or --config-name _1_bandit?"),
        (["play", "sokoban", "--seed", "-1"], "--seed -1: must not be negative"),
        (["play", "chess"], "unknown environment 'chess'"),
        (["play", "sokoban", "--agent", "best"], "human, random, optimal"),
        (["play", "sokoban", "--split", "dev"], "unknown split 'dev'"),
        (["envs", "--levels", "0"], "at least 1"),
        (["report", "no/such/run"], "no such run or run directory"),
        (["pocket", "build", "--steps", "0"], "at least 1"),
        (["envs", "--level", "1", "--lvels", "2"], "did you mean --levels?"),
        (["completion", "fish"], "invalid choice"),
        (["dance"], "invalid choice"),
    ],
)
def test_bad_input_is_one_message_and_status_2(words, message):
    run = ragen(*words)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert "loaded []" in run.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], *([verb, "--help"] for verb in VERBS)])
def test_help(words):
    run = ragen(*words, COLUMNS="80")
    assert run.returncode == 0
    assert run.stdout.strip()
    if not {"eval", "sweep"} & set(words):  # their help has wider examples
        assert max(map(len, run.stdout.splitlines())) <= 80
    assert "loaded []" in run.stderr


def test_help_lists_every_verb_and_each_verb_has_examples():
    listed = re.findall(r"^    ([a-z]+)(?:  |$)", ragen("--help").stdout, re.MULTILINE)
    assert listed == list(VERBS) == list(dict.fromkeys(listed))
    files = {path.stem for path in (ROOT / "src/ragen/cli").glob("*.py")}
    assert files - set(VERBS) == {"__init__", "estimates"}, "one module for each verb, and what they share"
    for verb in VERBS:
        module = verb_module(verb)
        assert verb == "sweep" or "ragen " in module.parser().epilog, verb


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_names_the_verbs_and_their_options(shell):
    run = ragen("completion", shell)
    assert run.returncode == 0 and "loaded []" in run.stderr
    options = ["--config-name", "--max-turns"] if shell != "tcsh" else []  # shtab knows no options of verbs in tcsh
    for word in (*VERBS, "kl_sweep", *options):
        assert word in run.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=run.stdout, text=True).returncode == 0
        ask = 'COMP_WORDS=(ragen do); COMP_CWORD=1; _shtab_ragen; echo "${COMPREPLY[@]}"'
        answer = subprocess.run(["bash", "-c", f"{run.stdout}\n{ask}"], capture_output=True, text=True)
        assert answer.stdout.split() == ["doctor"], answer.stderr


def test_completion_without_its_package_is_one_message():
    code = "import sys; sys.modules['shtab'] = None; from ragen.cli import main; sys.exit(main(['completion', 'bash']))"
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert (run.returncode, run.stdout) == (2, "")
    assert "shtab" in run.stderr and len(run.stderr.splitlines()) == 1


def test_help_names_the_choices():
    shown = ragen("play", "--help").stdout
    for words in ("{train,val,test,sft}", "{human,random,optimal}", "module:Class", "u undo"):
        assert words in shown
    assert "List every tag" in ragen("envs", "--help").stdout


@pytest.mark.parametrize("environment", ["sokoban", "frozenlake", "bandit", "two_armed_bandit", "LargerSokoban"])
@pytest.mark.parametrize("agent", ["random", "optimal"])
def test_agents_play(environment, agent):
    run = ragen("play", environment, "--agent", agent, "--seed", "3")
    assert run.returncode == 0, run.stderr
    assert "optimal" in run.stdout
    if agent == "optimal" and environment == "sokoban":
        assert "not solved" not in run.stdout
    assert "\x1b[" not in run.stdout  # no colours where there is no terminal


def test_a_person_plays_by_lines_and_sees_prompt_hint_and_result():
    run = ragen(
        "play",
        "SimpleSokoban",
        "--seed",
        "0",
        stdin="p\nh\nfly\nUp\nu\nUp\nDown\nUp\nDown\nUp\nDown\nUp\nDown\nUp\nDown\n",
    )
    assert run.returncode == 0, run.stderr
    assert "── system" in run.stdout and "<think>" in run.stdout
    assert "hint: " in run.stdout
    assert "'fly' is not an action here: Up, Down, Left, Right" in run.stdout
    assert "total" in run.stdout and "optimal: " in run.stdout


def test_the_optimal_plan_that_is_shown_solves_the_level():
    first = ragen("play", "sokoban", "--seed", "11", "--agent", "random").stdout
    plan = first.rsplit("optimal: ", 1)[1].split(" (")[0].split(", ")
    run = ragen("play", "sokoban", "--seed", "11", stdin="\n".join(plan) + "\n")
    assert "solved after" in run.stdout and "not solved" not in run.stdout


def test_envs_lists_every_tag():
    run = ragen("envs", "--levels", "2", COLUMNS="200")
    for tag in ("CoordSokoban", "LargerSokoban", "FrozenLakeV1", "BanditTest", "TwoArmedBandit"):
        assert tag in run.stdout


def test_a_full_disk_is_one_message_and_status_1():
    code = "import sys; from ragen.cli import main; sys.exit(main(['train', '--dry-run']))"
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
    assert run.returncode == 1
    assert run.stderr == "ragen train: No space left on device: the output\n"


@pytest.mark.parametrize("words", ["play sokoban --prompt", "envs --levels 1", "train sokoban --dry-run"])
def test_a_reader_that_goes_away_is_no_error(words):
    command = f"{sys.executable} -m ragen {words} </dev/null | true; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    assert run.stdout == "0\n"
    assert run.stderr in ("", f"{ONE_ANSWER_PER_LINE}\n")


def test_a_closed_input_ends_the_game():
    run = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ragen play sokoban <&-"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_input_that_ends_in_mid_game_is_said():
    run = ragen("play", "sokoban", stdin="Up\n")
    assert run.stdout.endswith("\nend of input: the game stops here\n")
    assert run.stderr.startswith(ONE_ANSWER_PER_LINE)
    assert "end of input" not in ragen("play", "sokoban", stdin="Up\nq\n").stdout


def test_a_terminal_without_unicode_shows_what_it_can():
    run = ragen("play", "sokoban", "--agent", "optimal", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert run.returncode == 0, run.stderr
    assert "solved" in run.stdout


@pytest.mark.parametrize("script", ["train.py", "ragen"])
def test_a_relative_folder_is_meant_from_where_the_user_is(tmp_path, script):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("trainer: {experiment_name: from-here}\n")
    words = ["--config-dir", "recipes", "--config-name", "mine", "--dry-run"]
    start = [sys.executable, str(ROOT / "train.py")] if script == "train.py" else ["bash", str(ROOT / "ragen"), "train"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RAGEN_PYTHON": sys.executable}
    run = subprocess.run([*start, *words], cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert run.returncode == 0, run.stderr
    assert "from-here" in run.stdout


def test_the_readme_shows_what_the_command_prints():
    rows = dict(re.findall(r"^\| (Sokoban|FrozenLake) .* \| ([\d.]+ % \| [\d.]+ %) \|$", README, re.MULTILINE))
    printed = ragen("envs", COLUMNS="200").stdout
    for game, tag in {"Sokoban": "CoordSokoban", "FrozenLake": "FrozenLake"}.items():
        line = next(line for line in printed.splitlines() if line.split()[:1] == [tag])
        assert [float(number) for number in re.findall(r"([\d.]+)%", line)] == [
            float(number) for number in re.findall(r"([\d.]+) %", rows[game])
        ]
