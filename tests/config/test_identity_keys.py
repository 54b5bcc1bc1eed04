"""What makes two runs the same: every key of the schema changes the result, or says what else it changes."""

import pytest

from ragen.config import v1
from ragen.config.compose import resolve
from ragen.config.identity_keys import ALL, NOTHING, UNUSED, WHERE, changes_only, different_keys, identity_values
from ragen.config.keys import FIELDS, no_effect
from ragen.config.schema import BUDGET, MEMORY, Config
from ragen.config.tree import leaves, to_dict
from ragen.config.unused_keys import NOT_IN_SFT

STEPS = "trainer.total_training_steps"


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_changes_the_result_or_says_what_it_changes(key):
    reason = changes_only(key)
    assert reason in ("", *ALL)
    assert not no_effect(key) or reason, "a key without effect is never part of the identity"
    assert (reason == NOTHING) == (bool(no_effect(key)) and "changes_only" not in FIELDS[key][0].metadata)


@pytest.mark.parametrize(
    ("start", "only"),
    [
        ("system.", "devices"),
        ("ray_kwargs.", "devices"),
        ("trainer.n_gpus_per_node", "devices"),
        ("trainer.nnodes", "devices"),
        ("trainer.default_local_dir", "location"),
        ("trainer.resume_", "resuming"),
        ("trainer.logger", "logging"),
        ("trainer.save_freq", "files"),
        ("output.", "files"),
        ("es_manager.env_", "failures"),
        ("es_manager.max_failed_share", "failures"),
        (STEPS, "budget"),
    ],
)
def test_keys_that_do_not_start_another_run(start, only):
    found = [key for key in FIELDS if key.startswith(start)]
    assert found and all(changes_only(key) == only for key in found)


def test_micro_batches_change_only_memory():
    found = [key for key in FIELDS if "micro_batch_size" in key]
    assert len(found) == 8 and all(changes_only(key) == MEMORY for key in found)


@pytest.mark.parametrize(
    "start",
    [
        "seed.",
        "lora.",
        "agent_proxy.",
        "es_manager.train.",
        "es_manager.val.",
        "es_manager.format_penalty",
        "custom_envs",
        "algorithm.",
        "trainer.test_freq",
        "model_path",
    ],
)
def test_keys_that_start_another_run(start):
    assert not any(changes_only(key) for key in FIELDS if key.startswith(start))


def test_the_same_run_with_other_values_for_memory_places_and_names():
    stored = to_dict(resolve(["sokoban", "model_path=pocket"], environ={}).config)
    overrides = ["trainer.experiment_name=other", "trainer.logger=[wandb]", "micro_batch_size_per_gpu=2", f"{STEPS}=7"]
    overrides += ["ray_kwargs.ray_init.num_cpus=3", "custom_envs.SimpleSokoban.max_workers=2", "trainer.save_freq=1"]
    config = resolve(["sokoban", "model_path=pocket", *overrides], environ={}).config
    assert different_keys(config, stored) == []
    assert different_keys(config, stored, ignore=[reason for reason in ALL if reason != BUDGET]) == [STEPS]
    assert "micro_batch_size_per_gpu" in different_keys(config, stored, ignore=WHERE)
    assert "trainer.logger" not in different_keys(config, stored, ignore=WHERE)


def test_another_run():
    config = resolve(["sokoban", "model_path=pocket"], environ={}).config
    other = resolve(["sokoban", "model_path=pocket", "seed.train=7", "lora.rank=4"], environ={}).config
    rank = "actor_rollout_ref.model.lora_rank"
    assert different_keys(config, leaves(other)) == ["seed.train", "lora.rank", rank, "critic.model.lora_rank"]


def test_a_key_of_another_version_is_a_difference():
    stored = leaves(Config())
    del stored["seed.train"]
    assert different_keys(Config(), stored | {"seed.old": 1}) == ["seed.train", "seed.old"]


def test_fine_tuning_leaves_aside_what_it_does_not_read():
    config = resolve(["sokoban", "rl_or_sft=sft", "sft.training.base_model=pocket"], environ={}).config
    values = identity_values(config, "sft")
    assert not [key for key in values if key.startswith(NOT_IN_SFT)]
    assert {"sft.training.epochs", "sft.training.learning_rate", "seed.val", "agent_proxy.max_turn"} <= set(values)
    assert changes_only("algorithm.gamma", "sft") == UNUSED and not changes_only("algorithm.gamma")
    assert changes_only("sft.training.num_gpus", "sft") and changes_only("sft.data_generation.num_processes", "sft")


def test_keys_of_the_v1_command_line():
    assert changes_only("training.micro_batch_size") == MEMORY
    assert changes_only("model.experiment_name") == "names"
    assert changes_only("training.total_epochs") == BUDGET
    assert not changes_only("training.n_rollout") and not changes_only("env.env_kwargs.dim_x")
    assert all(changes_only(key) == NOTHING for key, spec in v1.KEYS.items() if spec.no_effect)
