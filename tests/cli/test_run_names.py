"""One way of naming a run for every command: its path, its name, or the end of its name."""

import json

import pytest
from made_up_runs import make_run

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.errors import ConfigError
from ragen.evaluate.models import local_model
from ragen.store import manifest
from ragen.store.find_run import named_run

NAMES = ("mine", "ragen/mine", "checkpoints/ragen/mine", "checkpoints/ragen/mine/")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(["sokoban", "model_path=pocket"], environ={}).config
    made = make_run("checkpoints/ragen/mine", config, steps=(1, 2, 3), checkpoints=(2, 3), finished="finished")
    for step in (2, 3):
        (made.path / f"global_step_{step}/actor/config.json").write_text('{"model_type": "qwen2"}')
    return made


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_it(run, name, capsys):
    assert main(["report", name]) == 0 and run.report_path.exists()
    assert main(["runs", "--compare", name, name]) == 0
    assert main(["plot", "gradients", name, "--list-steps"]) == 0
    assert "no gradient analysis" in capsys.readouterr().out
    assert main(["serve", name, "--dry-run"]) == 0
    assert "global_step_3" in capsys.readouterr().out
    assert main(["eval", name, "--with-base", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "models: pocket, mine/global_step_3" in said and "setting: the training run" in said
    assert main(["merge", name, "--dry-run"]) == 2
    assert "global_step_3" in capsys.readouterr().err, "the checkpoint was found: it has no adapter"


def test_the_best_weights_are_taken_where_they_are_kept(run):
    (run.path / "best_checkpoint.json").write_text(json.dumps({"step": 2, "success": 0.6}))
    assert manifest.best(run.path) == run.path / "global_step_2"
    assert local_model("mine").label == "mine/global_step_2"
    assert local_model("mine/global_step_3").label == "mine/global_step_3", "a checkpoint that is named"
    (run.path / "global_step_2/actor/model.safetensors").write_bytes(b"cut")
    assert local_model("mine").label == "mine/global_step_3", "the best one is damaged"


def test_a_name_that_no_run_has_or_several_have(run, capsys):
    assert main(["report", "mien"]) == 2
    said = capsys.readouterr().err
    assert "did you mean mine?" in said and "summary log" in said
    make_run("model_saving/other/mine", resolve(["sokoban", "model_path=pocket"], environ={}).config, steps=(1,))
    with pytest.raises(ConfigError, match="name one of checkpoints/ragen/mine, model_saving/other/mine"):
        named_run("mine")
    assert main(["play", "sokoban", "--agent", "mien"]) == 2
    assert "no player, run, model or directory" in capsys.readouterr().err
