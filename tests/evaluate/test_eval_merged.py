"""Adapters of a run: merged they play as their run has, and an evaluation knows the weights below them."""

import shutil

import pytest

from ragen.checkpoint.merge import merge, plan
from ragen.checkpoint.model_folder import write_model_folder
from ragen.checkpoint.parts import part_of
from ragen.config.compose import resolve
from ragen.evaluate.models import LocalModel, local_model, with_bases
from ragen.evaluate.setting import Wanted, settings
from ragen.model.load import find_model, load_model
from ragen.model.lora import add_adapters, save_adapter
from ragen.store.manifest import Manifest, write_manifest
from ragen.store.run_folder import RunFolder

WORDS = ["model_path=pocket", "agent_proxy.max_turn=3", "es_manager.val.env_groups=7", "seed.val=77"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "mine"
    write_model_folder(folder, part_of(load_model(find_model("pocket"), "cpu")))
    return folder


@pytest.fixture
def checkpoint(base, tmp_path):
    """Of a run that has trained an adapter."""
    shutil.copytree(base, tmp_path / "base")
    RunFolder(tmp_path / "run").write_config(resolve(["sokoban", *WORDS], environ={}).config)
    model = load_model(find_model(str(base)), "cpu").model
    add_adapters(model, 2, 2)
    actor = tmp_path / "run/global_step_4/actor"
    actor.mkdir(parents=True)
    save_adapter(model, actor, str(tmp_path / "base"))
    write_manifest(actor.parent, Manifest(4, {"actor": ["model"]}))
    return actor.parent


def rules(path):
    config = settings(Wanted([local_model(str(path))]))[0].config
    return config.agent_proxy, config.es_manager.val, config.custom_envs, config.seed.val


def test_a_merged_model_plays_as_its_run_does(checkpoint, tmp_path):
    beside = merge(plan(checkpoint))
    assert local_model(str(beside)) == LocalModel(str(beside), "run/global_step_4_merged", tmp_path / "run")
    assert rules(beside) == rules(checkpoint)
    assert rules(beside)[0].max_turn == 3 and rules(beside)[0].prompt_style == "terse"
    elsewhere = merge(plan(checkpoint / "actor", tmp_path / "agent"))
    assert local_model(str(elsewhere)) == LocalModel(str(elsewhere), "agent", elsewhere / "training_run")
    assert [model.label for model in with_bases([local_model(str(elsewhere))])] == ["pocket", "agent"]
    moved = tmp_path / "moved"
    beside.rename(moved)
    shutil.rmtree(tmp_path / "run")
    assert rules(moved)[1].env_groups == 7 and rules(moved) == rules(elsewhere)


def test_a_merged_model_is_not_taken_for_one_of_the_run_beside_which_it_lies(checkpoint, tmp_path):
    merged = merge(plan(checkpoint))
    RunFolder(tmp_path / "other").write_config(resolve(["sokoban", "model_path=pocket"], environ={}).config)
    there = tmp_path / "other" / merged.name
    merged.rename(there)
    assert local_model(str(there)).run_folder == there / "training_run"
    shutil.rmtree(there / "training_run")  # as older versions have left it
    assert local_model(str(there)).run_folder == tmp_path / "other"


def test_an_adapter_of_no_run_is_merged_all_the_same(checkpoint, tmp_path):
    shutil.copytree(checkpoint / "actor", tmp_path / "alone")
    merged = merge(plan(tmp_path / "alone"))
    assert local_model(str(merged)) == LocalModel(str(merged), "alone_merged")


def test_other_weights_below_an_adapter_are_another_model(checkpoint, tmp_path):
    """So that a journal of the one is none of the other."""
    model = local_model(str(checkpoint))
    before = model.fingerprint()
    assert model.fingerprint() == before
    assert before["base"] == LocalModel(str(tmp_path / "base"), "").fingerprint()
    weights = tmp_path / "base/model.safetensors"
    weights.write_bytes(weights.read_bytes())
    after = model.fingerprint()
    assert after != before and after | {"base": before["base"]} == before


def test_the_embedded_base_of_an_adapter_is_a_name(checkpoint):
    actor = checkpoint / "actor"
    text = (actor / "adapter_config.json").read_text()
    (actor / "adapter_config.json").write_text(text.replace(str(checkpoint.parents[1] / "base"), "pocket"))
    assert local_model(str(checkpoint)).fingerprint()["base"] == {"model": "pocket", "files": []}
