"""A key that the chosen kind of run does not look at says so, and names what takes its place."""

import pytest
import yaml
from test_seed_commands import commands

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.config.explain import explain
from ragen.config.keys import FIELDS, is_key
from ragen.config.unused_keys import COUNTERPARTS, FOLLOWERS, NOT_IN_SFT, ONLY_RL, ONLY_SFT, READ_ALONE, reason


def no_effect(*overrides, rl_or_sft="sft"):
    return resolve(
        ["sokoban", f"rl_or_sft={rl_or_sft}", "sft.training.base_model=pocket", *overrides], environ={}
    ).no_effect


@pytest.mark.parametrize(
    ("word", "counterpart"),
    [
        ("lora.rank=8", "lora_rank"),
        ("actor_rollout_ref.actor.optim.lr=1e-3", "learning_rate"),
        ("actor_rollout_ref.model.path=other", "base_model"),
        ("trainer.total_training_steps=1", "epochs"),
        ("training.total_training_steps=1", "epochs"),
        ("training.total_epochs=2", "epochs"),
        ("trainer.total_epochs=2", "epochs"),
        ("optimization.actor_lr=1e-3", "learning_rate"),
        ("training.micro_batch_size=2", "micro_batch_size"),
        ("training.train_batch_size=4", "train_batch_size"),
        ("training.ppo_batch_size=4", "train_batch_size"),
        ("model.gradient_checkpointing=False", "enable_gradient_checkpointing"),
        ("trainer.val_before_train=True", "validate_before_training"),
    ],
)
def test_the_counterpart_in_fine_tuning_is_named(word, counterpart):
    told = f"fine-tuning reads sft.training.{counterpart} instead"
    assert no_effect(word) == {word.partition("=")[0]: told}
    assert f"sft.training.{counterpart}" in FIELDS


@pytest.mark.parametrize(
    "word",
    ["trainer.max_actor_ckpt_to_keep=1", "algorithm.adv_estimator=gae", "optimization.kl_coef=0.1",
     "training.temperature=0.3", "trainer.gradient_analysis_every=2", "critic.optim.lr=1e-3", "output.dir=x"],
)  # fmt: skip
def test_what_only_rl_reads_is_said(word):
    assert no_effect(word) == {word.partition("=")[0]: ONLY_RL}


@pytest.mark.parametrize(
    "word",
    ["training.n_rollout=2", "training.val_data_num=5", "training.val_batch_size=2", "training.max_turns=3",
     "training.max_start_length=500", "training.no_think_rl=True", "model_path=pocket", "model.base_model=pocket",
     "trainer.validation_data_dir=x", "trainer.resume_mode=disable", "sft.training.epochs=3", "seed.val=7",
     "env.env_kwargs.cell_format=plain", "~lora.rank"],
)  # fmt: skip
def test_what_fine_tuning_reads_is_not_listed(word):
    assert no_effect(word) == {}


def test_the_reason_in_the_schema_stays():
    told = no_effect("actor_rollout_ref.actor.use_torch_compile=True")
    assert told == {"actor_rollout_ref.actor.use_torch_compile": "entropy is computed in chunks, without compilation"}


def test_the_other_way_round():
    assert no_effect("sft.training.epochs=3", rl_or_sft="rl") == {
        "sft.training.base_model": ONLY_SFT, "sft.training.epochs": ONLY_SFT,
    }  # fmt: skip
    overrides = [
        "sft.training.epochs=3",
        "lora.rank=8",
        "trainer.total_training_steps=1",
        "algorithm.adv_estimator=gae",
    ]
    assert no_effect(*overrides, rl_or_sft="sft_then_rl") == {}


def test_what_describes_an_adapter_needs_a_rank():
    told = "is 0: all weights are trained, and there is no adapter"
    overrides = ["lora.alpha=8", "lora.target_modules=[q_proj]", "critic.model.lora_alpha=4"]
    assert resolve(["sokoban", *overrides], environ={}).no_effect == {
        "lora.alpha": f"lora.rank {told}",
        "lora.target_modules": f"lora.rank {told}",
        "critic.model.lora_alpha": f"critic.model.lora_rank {told}",
    }
    assert resolve([*overrides, "lora.rank=8"], environ={}).no_effect == {}
    assert resolve([*overrides, "critic.model.lora_rank=8"], environ={}).no_effect == {}
    assert no_effect("sft.training.lora_alpha=8") == {}
    assert no_effect("sft.training.lora_alpha=8", "sft.training.lora_rank=0") == {
        "sft.training.lora_alpha": f"sft.training.lora_rank {told}"
    }


def test_boards_that_are_not_played_are_said():
    other = "custom_envs.CoordSokoban.env_config.dim_x"
    overrides = ["sft.frozenlake.size=5", "sft.sokoban.dim_x=7", f"{other}=9"]
    told = {"sft.frozenlake.size": "the game of the data is sokoban", other: "this run plays SokobanV1"}
    assert no_effect(*overrides) == told
    assert no_effect(*overrides, rl_or_sft="sft_then_rl").keys() == told.keys()
    assert no_effect("es_manager.val.env_configs.tags=[SimpleSokoban]", "env.env_kwargs.dim_x=7") == {
        "env.env_kwargs.dim_x": "this run plays SimpleSokoban"
    }
    overrides = [f"{other}=9", "custom_envs.SimpleSokoban.env_config.dim_x=9"]
    assert resolve(["es_manager.val.env_configs.tags=[SimpleSokoban]", *overrides], environ={}).no_effect == {}
    assert resolve(overrides, environ={}).no_effect == {
        "custom_envs.SimpleSokoban.env_config.dim_x": "this run plays CoordSokoban"
    }


def test_the_documented_commands_have_one_such_line_at_most():
    for overrides in commands():
        resolved = resolve(overrides, environ={})
        told = [f"optimization.adv_estimator: {ONLY_RL}"] if "rl_or_sft=sft" in overrides else []
        assert resolved.no_effect_lines() == told


def test_keys_with_one_reason_share_a_line(capsys):
    overrides = ["sokoban", "sft.training.base_model=pocket", "trainer.total_training_steps=3", "training.total_epochs=2",
             "trainer.max_actor_ckpt_to_keep=1", "algorithm.adv_estimator=gae"]  # fmt: skip
    assert main(["sft", *overrides, "--dry-run"]) == 0
    told = capsys.readouterr().out.replace("\n#     ", " ")
    instead = "fine-tuning reads sft.training.epochs instead"
    assert f"#   trainer.total_training_steps, training.total_epochs: {instead}\n" in told
    assert f"#   trainer.max_actor_ckpt_to_keep, algorithm.adv_estimator: {ONLY_RL}\n" in told


def test_the_tree_does_not_claim_them():
    resolved = resolve(["sokoban", "rl_or_sft=sft", "lora.rank=8", "trainer.total_training_steps=3"], environ={})
    text = explain(resolved)
    assert "  rank: 8  # command line, without effect\n" in text
    assert "total_training_steps: 3  # without effect: the data and sft.training.epochs decide\n" in text
    assert yaml.safe_load(text)["lora"]["rank"] == 8


def test_the_tables_name_keys():
    assert all(any(key.startswith(start) for key in FIELDS) for start in NOT_IN_SFT)
    assert all(is_key(key) for key in (*COUNTERPARTS, *FOLLOWERS, *READ_ALONE))
    assert all(f"sft.training.{name}" in FIELDS for name in COUNTERPARTS.values())
    assert all(reason(key, "sft") for key in COUNTERPARTS), "what has a counterpart is not read"
