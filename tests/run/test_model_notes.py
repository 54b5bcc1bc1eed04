"""A run that starts from the model of another: what that one played, and whether its checkpoint may be deleted."""

import json
import shlex
import shutil

import pytest

from ragen.cli import main
from ragen.config import model_name
from ragen.config.compose import resolve
from ragen.config.keys import FIELDS
from ragen.config.validate import LINEAR
from ragen.errors import ConfigError
from ragen.run.prepare import RULES, prepare
from ragen.store import manifest
from ragen.store.lineage import KEPT
from ragen.store.run_folder import RunFolder

TRAINED = [
    "agent_proxy.prompt_style=terse",
    "agent_proxy.action_sep=' | '",
    "custom_envs.SimpleSokoban.env_config.num_boxes=2",
]
TAGS = [f"es_manager.{split}.env_configs.tags=[SimpleSokoban]" for split in ("train", "val")]


@pytest.fixture(autouse=True)
def a_model_is_available(monkeypatch):
    monkeypatch.setattr(model_name, "choose", lambda *given: (model_name.QWEN, "for this test"))


def trained(folder, *overrides, keep=False):
    """A run with one checkpoint."""
    checkpoint = folder / "global_step_2"
    RunFolder(folder).write_config(resolve(["sokoban", *overrides], environ={}).config)
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor/config.json").write_text("{}")
    manifest.write_manifest(checkpoint, manifest.Manifest(2, {"actor": ["model"]}, keep=keep))
    return checkpoint


def notes(model, *overrides):
    return prepare(["sokoban", f"model_path={model}", *overrides], environ={}).notes


def added(note):
    return shlex.split(note.partition(" add: ")[2])


@pytest.mark.parametrize("place", ["", "actor"])
def test_the_rules_of_its_run_can_be_typed(tmp_path, place):
    model = trained(tmp_path / "run", *TRAINED, *TAGS, "trainer.max_actor_ckpt_to_keep=null") / place
    (note,) = notes(model)
    assert note.startswith(f"model_path={model} was trained with different rules; ")
    assert added(note) == [*TRAINED[:2], *TAGS, TRAINED[2]]
    assert not notes(model, *added(note)), "and then it plays by them"


def test_what_is_typed_is_meant(tmp_path):
    model = trained(tmp_path / "run", *TRAINED, *TAGS, "trainer.max_actor_ckpt_to_keep=null")
    (note,) = notes(model, "agent_proxy.prompt_style=full", *(word.replace("Simple", "Coord") for word in TAGS))
    assert added(note) == [TRAINED[1]], "another board was typed: the settings of that one are not listed"


def test_equal_rules_need_no_note(tmp_path):
    assert notes(trained(tmp_path / "run", "trainer.max_actor_ckpt_to_keep=null", "seed.train=7", "lora.rank=4")) == []
    assert set(RULES) <= set(FIELDS)


@pytest.mark.parametrize("name", ["~nobody-here/model", "x" * 5000, "no/such/folder", "Qwen/Qwen2.5-3B-Instruct"])
def test_a_name_that_is_not_a_directory_is_left_to_the_loader(name):
    assert notes(f"'{name}'", "lora.rank=8", "lora.target_modules=[q_prj]") == []


def test_several_games_bring_their_shares(tmp_path):
    games = [
        "es_manager.train.env_configs.tags=[SimpleSokoban,FrozenLake]",
        "es_manager.train.env_configs.n_groups=[3,5]",
    ]
    model = trained(tmp_path / "run", *games, "es_manager.train.env_groups=8", "trainer.max_actor_ckpt_to_keep=null")
    (note,) = [note for note in notes(model) if " add: " in note]
    assert added(note) == games
    assert not [note for note in notes(model, *added(note)) if " add: " in note]


def test_fine_tuning_trains_what_it_validates(tmp_path):
    overrides = ["rl_or_sft=sft", "sft.training.base_model=pocket", f"sft.output_dir={tmp_path}", *TRAINED[:1], TAGS[1]]
    RunFolder(tmp_path / "lora_weights").write_config(resolve(["sokoban", *overrides], environ={}).config)
    model = tmp_path / "merged_model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (note,) = notes(model)
    assert added(note) == [TRAINED[0], *TAGS]
    (note,) = prepare(["sokoban", "rl_or_sft=sft", f"sft.training.base_model={model}"], environ={}).notes
    assert note.startswith(f"sft.training.base_model={model} was trained") and TAGS[1] in added(note)


def test_a_merged_model_that_was_moved_keeps_its_rules(tmp_path):
    trained(tmp_path / "run", *TRAINED)
    shutil.copytree(tmp_path / "run/global_step_2/actor", tmp_path / "away")
    assert notes(tmp_path / "away") == []
    RunFolder(tmp_path / "away" / KEPT).write_config(resolve(["sokoban", *TRAINED], environ={}).config)
    (note,) = notes(tmp_path / "away")
    assert TRAINED[0] in added(note)


def test_a_checkpoint_that_its_run_may_delete(tmp_path, capsys):
    first = trained(tmp_path / "first")
    (note,) = notes(first, "lora.rank=4")
    assert f"{first}: if its run resumes, it may delete this checkpoint (trainer.max_actor_ckpt_to_keep=1)" in note
    assert main(["train", "sokoban", f"model_path={first}", "--dry-run"]) == 0
    assert "may delete this checkpoint" in capsys.readouterr().out.replace("\n#     ", " ")
    assert notes(trained(tmp_path / "kept", keep=True)) == []
    assert notes(trained(tmp_path / "all", "trainer.max_actor_ckpt_to_keep=null")) == []


def test_the_folder_of_a_run_names_its_checkpoint(tmp_path):
    newest = trained(tmp_path / "run")
    for key in ("model_path", "model.base_model", "critic.model.path"):
        with pytest.raises(ConfigError, match=f"name {newest}$") as caught:
            prepare(["sokoban", f"{key}={tmp_path}/run"], environ={})
        assert (caught.value.code, caught.value.key) == ("not-a-model", key)
    shutil.copytree(newest / "actor", tmp_path / "out/merged_model")
    with pytest.raises(ConfigError, match=f"name {tmp_path}/out/merged_model$"):
        notes(tmp_path / "out")


# --- the names of layers ------------------------------------------------------------------------------------------


def test_layers_of_a_local_model_are_checked(tmp_path):
    overrides = ["lora.rank=8", "lora.target_modules=[q_prj]"]
    for kind, is_known in (("qwen2", True), ("llama", True), ("gpt2", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        if is_known:
            with pytest.raises(ConfigError, match=r"did you mean q_proj\?") as caught:
                notes(tmp_path, *overrides)
            assert (caught.value.code, caught.value.key) == ("adapter-layers", "lora.target_modules")
        else:
            assert notes(tmp_path, *overrides) == []


def test_these_are_the_layers():
    from ragen.model.load import find_model, load_model
    from ragen.model.lora import add_adapters

    for names in (["all-linear"], LINEAR):
        model = load_model(find_model("pocket-blank"), "cpu").model
        add_adapters(model, 1, 1, list(names))
        assert {name.rpartition(".")[2] for name in model.adapters.pairs()} == set(LINEAR)
