"""A run that begins from the model of another: what that one played, and whether it may go away."""

import json
import shlex
import shutil

import pytest

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.config.keys import FIELDS
from ragen.config.model_notes import RULES
from ragen.config.validate import LINEAR
from ragen.errors import ConfigError
from ragen.store import manifest
from ragen.store.lineage import KEPT
from ragen.store.run_folder import RunFolder

LEARNT = [
    "agent_proxy.prompt_style=terse",
    "agent_proxy.action_sep=' | '",
    "custom_envs.SimpleSokoban.env_config.num_boxes=2",
]
TAGS = [f"es_manager.{split}.env_configs.tags=[SimpleSokoban]" for split in ("train", "val")]


def trained(folder, *words, keep=False):
    """A run with one checkpoint."""
    checkpoint = folder / "global_step_2"
    RunFolder(folder).write_config(resolve(["sokoban", *words], environ={}).config)
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor/config.json").write_text("{}")
    manifest.write_manifest(checkpoint, manifest.Manifest(2, {"actor": ["model"]}, keep=keep))
    return checkpoint


def notes(model, *words):
    return resolve(["sokoban", f"model_path={model}", *words], environ={}).notes


def added(note):
    return shlex.split(note.partition(" add: ")[2])


@pytest.mark.parametrize("place", ["", "actor"])
def test_what_it_has_learnt_can_be_typed(tmp_path, place):
    model = trained(tmp_path / "run", *LEARNT, *TAGS, "trainer.max_actor_ckpt_to_keep=null") / place
    (note,) = notes(model)
    assert note.startswith(f"model_path={model} was trained by other rules than these; ")
    assert added(note) == [*LEARNT[:2], *TAGS, LEARNT[2]]
    assert not notes(model, *added(note)), "and then it plays as it has learnt"


def test_what_is_typed_is_meant(tmp_path):
    model = trained(tmp_path / "run", *LEARNT, *TAGS, "trainer.max_actor_ckpt_to_keep=null")
    (note,) = notes(model, "agent_proxy.prompt_style=full", *(word.replace("Simple", "Coord") for word in TAGS))
    assert added(note) == [LEARNT[1]], "another board was typed: that one's settings are not learnt"


def test_equal_rules_need_no_note(tmp_path):
    assert notes(trained(tmp_path / "run", "trainer.max_actor_ckpt_to_keep=null", "seed.train=7", "lora.rank=4")) == []
    assert set(RULES) <= set(FIELDS)


@pytest.mark.parametrize("name", ["~nobody-here/model", "x" * 5000, "no/such/folder", "Qwen/Qwen2.5-3B-Instruct"])
def test_a_name_of_no_folder_is_left_to_whoever_loads_it(name):
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


def test_what_fine_tuning_has_validated_is_what_was_learnt(tmp_path):
    words = ["rl_or_sft=sft", "sft.training.base_model=pocket", f"sft.output_dir={tmp_path}", *LEARNT[:1], TAGS[1]]
    RunFolder(tmp_path / "lora_weights").write_config(resolve(["sokoban", *words], environ={}).config)
    model = tmp_path / "merged_model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (note,) = notes(model)
    assert added(note) == [LEARNT[0], *TAGS]
    (note,) = resolve(["sokoban", "rl_or_sft=sft", f"sft.training.base_model={model}"], environ={}).notes
    assert note.startswith(f"sft.training.base_model={model} was trained") and TAGS[1] in added(note)


def test_a_merged_model_that_was_moved_still_tells(tmp_path):
    trained(tmp_path / "run", *LEARNT)
    shutil.copytree(tmp_path / "run/global_step_2/actor", tmp_path / "away")
    assert notes(tmp_path / "away") == []
    RunFolder(tmp_path / "away" / KEPT).write_config(resolve(["sokoban", *LEARNT], environ={}).config)
    (note,) = notes(tmp_path / "away")
    assert LEARNT[0] in added(note)


def test_a_checkpoint_that_its_run_may_delete(tmp_path, capsys):
    first = trained(tmp_path / "first")
    (note,) = notes(first, "lora.rank=4")
    assert f"{first}: if its run goes on, that may delete this checkpoint (trainer.max_actor_ckpt_to_keep=1)" in note
    assert main(["train", "sokoban", f"model_path={first}", "--dry-run"]) == 0
    assert "may delete this checkpoint" in capsys.readouterr().out.replace("\n#     ", " ")
    assert notes(trained(tmp_path / "kept", keep=True)) == []
    assert notes(trained(tmp_path / "all", "trainer.max_actor_ckpt_to_keep=null")) == []


def test_the_folder_of_a_run_names_its_checkpoint(tmp_path):
    newest = trained(tmp_path / "run")
    for key in ("model_path", "model.base_model", "critic.model.path"):
        with pytest.raises(ConfigError, match=rf"^{key}={tmp_path}/run: this folder is no model, .* name {newest}$"):
            resolve(["sokoban", f"{key}={tmp_path}/run"], environ={})
    shutil.copytree(newest / "actor", tmp_path / "out/merged_model")
    with pytest.raises(ConfigError, match=f"name {tmp_path}/out/merged_model$"):
        notes(tmp_path / "out")


# --- the names of layers ------------------------------------------------------------------------------------------


def test_layers_of_a_local_model_are_checked(tmp_path):
    words = ["lora.rank=8", "lora.target_modules=[q_prj]"]
    for kind, is_known in (("qwen2", True), ("llama", True), ("gpt2", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        if is_known:
            with pytest.raises(ConfigError, match=r"lora.target_modules=\['q_prj'\]: .* did you mean q_proj\?"):
                notes(tmp_path, *words)
        else:
            assert notes(tmp_path, *words) == []


def test_these_are_the_layers():
    from ragen.model.load import find_model, load_model
    from ragen.model.lora import add_adapters

    for names in (["all-linear"], LINEAR):
        model = load_model(find_model("pocket-blank"), "cpu").model
        add_adapters(model, 1, 1, list(names))
        assert {name.rpartition(".")[2] for name in model.adapters.pairs()} == set(LINEAR)
