"""What fine-tuning leaves, by any of its names: the merged model, in the game and with the rules of its run."""

import re
import shutil

import pytest

from ragen.api import run_config
from ragen.config.compose import resolve
from ragen.evaluate.models import LocalModel, local_model, newest_checkpoint, with_bases
from ragen.evaluate.run import EvaluationPlan, evaluate
from ragen.evaluate.setting import Wanted, settings


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The output folder of a small fine-tuning run, and what its validation says."""
    output = tmp_path_factory.mktemp("tuned") / "out"
    words = [
        "rl_or_sft=sft", f"sft.output_dir={output}", "sft.training.base_model=pocket", "sft.training.lora_rank=4",
        "sft.data_generation.train_size=8", "sft.data_generation.test_size=3", "sft.training.train_batch_size=8",
        "sft.training.epochs=2", "sft.training.learning_rate=3e-3", "sft.training.logger=[console]",
        "training.val_data_num=8", "agent_proxy.prompt_style=terse", "env.env_kwargs.cell_format=plain",
        "actor_rollout_ref.rollout.response_length=40",
    ]  # fmt: skip
    run_config(resolve(["sokoban", *words], environ={}).config)
    found = re.search(r"val-env/(\w+)/success:([\d.]+)", (output / "merged_model/validate.log").read_text())
    return output, found[1], float(found[2])


def test_what_fine_tuning_has_made_plays_as_its_run_has_validated(tuned, tmp_path):
    """By any of its names: the run folder, the output folder, the merged model, which is the best epoch."""
    output, tag, success = tuned
    named = [local_model(str(path)) for path in (output, output / "lora_weights", output / "merged_model")]
    assert named[0] == named[1] == named[2]
    assert named[0] == LocalModel(str(output / "merged_model"), "out/merged_model", output / "lora_weights")
    wanted = Wanted(named[:1])
    result = evaluate(EvaluationPlan(wanted, settings(wanted, [f"output.dir={tmp_path}"])), lambda text: None)
    row = result.rows[0]
    assert (row.tag, row.num_asked, 0 < success < 1) == (tag, 8, True)
    assert row.measured.success.value == pytest.approx(success, abs=1e-3)
    assert [model.label for model in with_bases(named[:1])] == ["pocket", "out/merged_model"]
    assert settings(Wanted(with_bases(named[:1])))[0].config.es_manager.val.env_groups == 8


def test_unfinished_fine_tuning_is_its_newest_checkpoint(tuned, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(tuned[0], output)
    (output / "lora_weights/finished.json").unlink()
    newest = newest_checkpoint(output / "lora_weights").name
    assert local_model(str(output / "lora_weights")).label == f"lora_weights/{newest}"
    assert local_model(str(output)).label == "out/merged_model"
    shutil.rmtree(output / "lora_weights")
    kept = output / "merged_model/training_run"
    assert local_model(str(output)) == LocalModel(str(output / "merged_model"), "merged_model", kept)


def test_a_merged_model_that_was_moved_plays_as_its_run_has(tuned, tmp_path):
    merged = tmp_path / "agent"
    shutil.copytree(tuned[0] / "merged_model", merged)
    before, moved = (settings(Wanted([local_model(str(path))]))[0].config for path in (tuned[0], merged))
    assert moved.agent_proxy.prompt_style == "terse" and moved.custom_envs == before.custom_envs
    assert (moved.agent_proxy, moved.es_manager) == (before.agent_proxy, before.es_manager)


def test_one_of_an_older_version_is_found_beside_its_run(tuned, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(tuned[0], output)
    shutil.rmtree(output / "merged_model/training_run")
    assert local_model(str(output)).run_folder == output / "lora_weights"
