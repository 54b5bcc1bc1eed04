"""The example in `docs/add-an-environment.md` is followed as it stands: the file, the recipe, the registry line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ragen.env
from ragen.cli import main
from ragen.config.compose import resolve
from ragen.env import registry
from ragen.env.base import Tag
from ragen.env.check import check_environment
from ragen.env.registry import catalogue, environment_class, make
from ragen.env.solve import Budget, optimal_success

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "add-an-environment.md").read_text()
PATH = "number_line:NumberLine"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The first block, saved under the name that the guide tells."""
    path = tmp_path_factory.mktemp("guide")
    (path / "number_line.py").write_text(blocks("python")[0])
    return path


@pytest.fixture(scope="module", autouse=True)
def _on_the_path(folder):
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("number_line", None)


@pytest.fixture
def registered(folder, monkeypatch):
    """The file lies in `ragen/env`, and the guide's line is in the registry."""
    monkeypatch.setattr(ragen.env, "__path__", [*ragen.env.__path__, str(folder)])
    line = blocks("text")[0]
    name, path = re.fullmatch(r'"(\w+)": "([\w.:]+)",\n', line).groups()
    monkeypatch.setitem(registry.ENVIRONMENTS, name, path)
    yield name
    sys.modules.pop("ragen.env.number_line", None)


def test_it_keeps_the_contract_in_several_settings():
    cls = environment_class(PATH)
    for settings in ({}, {"wind": 0.0}, {"goal": 1, "wind": 0.9}):
        check_environment(cls(cls.Config(**settings)))


def test_the_other_blocks_run(capsys):
    names = {"NumberLine": environment_class(PATH)}
    for block in blocks("python")[1:]:
        exec(block, names)
    assert "Baselines(random=0." in capsys.readouterr().out


def test_a_tag_of_one_s_own():
    windy = make(Tag(env_type=PATH, env_config={"goal": 7, "wind": 0.4}))
    assert "7" in windy.render(windy.reset(0))
    with pytest.raises(ValueError, match="did you mean wind"):
        make(Tag(env_type=PATH, env_config={"winde": 0.4}))


def test_its_optimum_is_the_one_worked_by_hand():
    cls = environment_class(PATH)
    env = cls(cls.Config(goal=2, wind=0.25))
    state = env.reset(0)._replace(position=0)
    # A jump arrives with 0.75; blown back to 1, the second jump arrives for certain.
    assert optimal_success(env, state, Budget(1, 1, 1)) == pytest.approx(0.75)
    assert optimal_success(env, state, Budget(2, 1, 2)) == pytest.approx(1.0)


def test_the_recipe_resolves_and_its_plan_is_printed(tmp_path, capsys):
    (tmp_path / "windy.yaml").write_text(blocks("yaml")[0])
    config = resolve([], config_name="windy", config_dir=str(tmp_path), environ={}).config
    assert config.es_manager.train.env_configs.tags == config.es_manager.val.env_configs.tags == ["WindyLine"]
    assert main(["train", "--config-dir", str(tmp_path), "--config-name", "windy", "--dry-run"]) == 0
    assert "WindyLine: random play succeeds in" in capsys.readouterr().out


def test_it_is_played_without_being_registered(capsys):
    assert main(["play", PATH, "--agent", "optimal", "--prompt"]) == 0
    out = capsys.readouterr().out
    assert "You stand at" in out and "Forward, Back, Jump" in out and "optimal play starts with" in out


def test_the_registry_line_brings_its_tag(registered):
    assert catalogue()["NumberLine"].env_type == registered
    assert make(catalogue()["NumberLine"]).config.goal == 5
    words = ["es_manager.train.env_configs.tags=[NumberLine]", "es_manager.val.env_configs.tags=[NumberLine]"]
    assert resolve(words, environ={}).config.custom_envs["NumberLine"].env_type == registered
    assert resolve(["sokoban"], environ={}).config.custom_envs["NumberLine"].max_actions_per_traj == 10


def test_the_example_passes_the_project_s_linter(folder):
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    run = subprocess.run([*ruff, str(folder / "number_line.py")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_its_check_is_silent_when_it_is_run_from_its_folder(folder):
    (folder / "check_line.py").write_text(blocks("python")[1])
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "check_line.py"], cwd=folder, env=environ, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_every_command_works_with_it_registered(registered, capsys):
    assert main(["play", "NumberLine", "--agent", "random"]) == 0
    assert main(["play", registered, "--agent", "random"]) == 0
    assert main(["envs", "--levels", "1"]) == 0
    assert "NumberLine" in capsys.readouterr().out
