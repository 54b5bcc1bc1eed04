"""The v1 command line: values are checked under the typed names, and what follows from them is computed once."""

import pytest

from ragen.config.compose import resolve
from ragen.config.tree import leaves
from ragen.errors import ConfigError


def tree(*overrides, environ=None, **options):
    return leaves(resolve(overrides, environ=environ or {}, **options).config)


def refusal(*overrides, environ=None, **options):
    with pytest.raises(ConfigError) as caught:
        resolve(overrides, environ=environ or {}, **options)
    return caught.value


@pytest.mark.parametrize(
    ("override", "code", "way_out"),
    [
        ("training.train_batch_size=0", "range", "at least 1"),
        ("training.total_epochs=", "type", "a whole number"),
        ("training.total_epochs=0", "range", "at least 1"),
        ("training.max_start_length=abc", "type", "a whole number"),
        ("training.max_start_length=", "type", "a whole number"),
        ("training.max_start_length=[1]", "type", "a whole number"),
        ("training.max_start_length=-400", "range", "at least 1"),
        ("training.max_obs_length=None", "type", "a whole number"),
        ("training.max_obs_length=-1", "range", "at least 0"),
        ("training.no_think_rl=abc", "type", "true or false"),
        ("training.no_think_rl=-3", "type", "true or false"),
        ("training.state_masking=abc", "type", "true or false"),
        ("logging.log_images=banana", "type", "true or false"),
        ("training.binary_reward=[1,2]", "type", "true or false"),
        ("training.train_data_num=0", "range", "at least 1"),
        ("training.val_data_num=0", "range", "at least 1"),
        ("training.ppo_batch_size=-3", "range", "at least 1"),
        ("optimization.actor_lr=fast", "type", "a number"),
        ("optimization.adv_estimator=ppo", "choice", "one of gae"),
        ("logging.mode=[mlflow]", "choice", "one of console"),
        ("env.env_kwargs.dim_x=abc", "environment", "a whole number or null"),
        ("training.n_rollout=${lora.rank}", "type", "a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_error_under_its_own_name(override, code, way_out):
    error = refusal("sokoban", override)
    assert (error.code, error.key, len(error.problems)) == (code, override.partition("=")[0], 1)
    assert way_out in str(error)


@pytest.mark.parametrize(("word", "thinks"), [("no", True), ("false", True), ("0", True), ("yes", False), ("1", False)])
def test_words_for_true_and_false(word, thinks):
    assert tree("sokoban", f"training.no_think_rl={word}")["agent_proxy.enable_think"] is thinks


@pytest.mark.parametrize("word", ["False", "no", "0", "off"])
def test_every_spelling_of_false_moves_kl_into_the_reward(word):
    off = tree("sokoban", f"training.use_kl_loss={word}")
    assert off["actor_rollout_ref.actor.use_kl_loss"] is False
    assert off["algorithm.use_kl_in_reward"] is True and off["algorithm.kl_ctrl.kl_coef"] == 0.001


@pytest.mark.parametrize("null", ["", "null", "None"])
def test_null_in_any_spelling(null):
    overrides = [f"training.{key}={null}" for key in ("train_data_num", "val_data_num", "total_training_steps")]
    all_levels = tree("sokoban", *overrides, f"trainer.default_hdfs_dir={null}")
    assert all_levels["data.train_data_num"] == 10_000
    assert all_levels["es_manager.val.env_groups"] == 512
    assert all_levels["trainer.total_training_steps"] == 6250
    assert all_levels["trainer.default_hdfs_dir"] is None


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["training.micro_batch_size=4", "micro_batch_size_per_gpu=8"], ["training.micro_batch_size", "micro_batch_size_per_gpu"]),
        (["training.max_start_length=800", "actor_rollout_ref.rollout.max_model_len=2000"], ["training.max_start_length", "max_model_len"]),
        (["training.use_kl_loss=False", "optimization.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef=0.5"], ["optimization.kl_coef", "algorithm.kl_ctrl.kl_coef"]),
        (["training.use_kl_loss=False", "algorithm.use_kl_in_reward=False"], ["training.use_kl_loss", "algorithm.use_kl_in_reward"]),
    ],
)  # fmt: skip
def test_a_derived_value_against_a_typed_one_is_a_conflict(overrides, names):
    error = refusal("sokoban", *overrides)
    assert error.code == "conflict" and all(name in str(error) for name in names)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["training.micro_batch_size=4", "micro_batch_size_per_gpu=4"], "micro_batch_size_per_gpu", 4),
        (["micro_batch_size_per_gpu=8"], "micro_batch_size_per_gpu", 8),
        (["micro_batch_size_per_gpu=8", "system.n_gpus=2"], "micro_batch_size_per_gpu", 8),
        (["actor_rollout_ref.rollout.max_model_len=2000"], "actor_rollout_ref.rollout.max_model_len", 2000),
        (["training.use_kl_loss=False", "algorithm.kl_ctrl.kl_coef=0.5"], "algorithm.kl_ctrl.kl_coef", 0.5),
        (["training.total_epochs=2", "training.total_training_steps=7"], "trainer.total_training_steps", 7),
        (["training.train_data_num=4", "training.total_training_steps=7"], "trainer.total_training_steps", 7),
    ],
)
def test_a_typed_tree_key_beats_a_v1_default(overrides, key, value):
    assert tree("sokoban", *overrides)[key] == value


def test_a_micro_batch_must_divide_among_the_gpus():
    assert tree("sokoban", "system.n_gpus=2", "training.micro_batch_size=4")["micro_batch_size_per_gpu"] == 2
    error = refusal("sokoban", "system.n_gpus=2", "training.micro_batch_size=3")
    assert (error.code, error.key) == ("micro-batch", "training.micro_batch_size")


def test_groups_of_keys():
    grouped = tree("sokoban", "training={n_rollout: 8, ppo_batch_size: 64}", "env.env_kwargs={dim_x: 8, dim_y: 8}")
    assert (grouped["es_manager.train.group_size"], grouped["ppo_mini_batch_size"]) == (8, 64)
    assert grouped["custom_envs.SokobanV1.env_config.dim_x"] == 8
    error = refusal("sokoban", "training={n_rolout: 8}")
    assert error.code == "unknown-key" and "training.n_rollout?" in str(error)
    assert tree("sokoban", "training={}") == tree("sokoban")


def test_deletion_restores_the_v1_default():
    environ = {"CONFIG_TRAINING__N_ROLLOUT": "4", "CONFIG_ENV__ENV_KWARGS__NUM_BOXES": "2"}
    restored = tree("sokoban", "~training.n_rollout", "~env.env_kwargs.num_boxes", environ=environ)
    assert restored["es_manager.train.group_size"] == 16
    assert restored["custom_envs.SokobanV1.env_config.num_boxes"] == 1
    assert tree("sokoban", "~training", environ={"CONFIG_TRAINING__N_ROLLOUT": "4"}) == tree("sokoban")
    assert str(refusal("sokoban", "~training.n_rollout=8")) == "~training.n_rollout=8: its value is 16"
    error = refusal("sokoban", "~es_manager.train.group_size", "training.n_rollout=8")
    assert error.code == "conflict" and "~es_manager.train.group_size" in str(error) and "null" not in str(error)


# --- environment variables ----------------------------------------------------------------------------------------


def test_the_command_line_overrides_variables():
    environ = {"CONFIG_TRAINING__N_ROLLOUT": "4", "CONFIG_TRAINING__PPO_BATCH_SIZE": "32"}
    assert tree("sokoban", environ=environ)["es_manager.train.group_size"] == 4
    assert tree("sokoban", "training.n_rollout=8", environ=environ)["es_manager.train.group_size"] == 8
    assert tree("sokoban", "es_manager.train.group_size=16", environ=environ)["es_manager.train.group_size"] == 16
    lengths = {"CONFIG_TRAINING__MAX_START_LENGTH": "800"}
    limit = "actor_rollout_ref.rollout.max_model_len"
    assert tree("sokoban", environ=lengths)[limit] == 3800
    assert tree("sokoban", f"{limit}=2000", environ=lengths)[limit] == 2000


@pytest.mark.parametrize(
    ("name", "value", "code", "way_out"),
    [
        ("CONFIG_TRAINING__N_ROLLUT", "4", "unknown-key", "training.n_rollout?"),
        ("CONFIG_TRAINING__N_ROLLOUT", "many", "type", "a whole number"),
        ("CONFIG_TRAINING__N_ROLLOUT", "0", "range", "at least 1"),
        ("CONFIG_TRAINING__N_ROLLOUT", "[1", "unreadable", "quotes"),
        ("CONFIG_RL_OR_SFT", "both", "choice", "rl, sft"),
    ],
)
def test_a_wrong_variable_is_named(name, value, code, way_out):
    error = refusal("sokoban", environ={name: value})
    assert (error.code, error.key) == (code, f"variable {name}")
    assert str(error).startswith(f"variable {name}") and way_out in str(error)


def test_a_variable_without_a_section_and_those_of_others():
    assert tree("sokoban", environ={"CONFIG_RL_OR_SFT": "sft"})["rl_or_sft"] == "sft"
    assert tree("sokoban", environ={"CONFIG_SHELL": "x", "CONFIG_KERNEL__X": "1"}) == tree("sokoban")


def test_variables_without_an_environment_are_noted():
    resolved = resolve([], config_name="_2_sokoban", environ={"CONFIG_TRAINING__N_ROLLOUT": "4"})
    assert resolved.config.es_manager.train.group_size == 16
    assert "CONFIG_TRAINING__N_ROLLOUT" in resolved.notes[-1]


# --- supervised fine-tuning ---------------------------------------------------------------------------------------


def test_fine_tuning_validates_the_tuned_model_in_the_tuned_game():
    resolved = resolve(["frozenlake", "rl_or_sft=sft", "sft.training.base_model=tiny"], environ={})
    assert resolved.config.model_path == resolved.config.actor_rollout_ref.model.path == "tiny"
    assert resolved.origins["model_path"].startswith("derived: sft.training.base_model")
    assert tree("rl_or_sft=sft", config_name="_3_frozen_lake")["sft.env_type"] == "frozenlake"
    assert resolve(["sokoban", "rl_or_sft=sft", "actor_rollout_ref.rollout.top_p=0.9"], environ={}).notes == []


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (["sokoban", "rl_or_sft=sft", "sft.env_type=frozenlake"], "fine-tuning", "sft.env_type"),
        (["sokoban", "rl_or_sft=sft", "model.base_model=x", "sft.training.base_model=y"], "fine-tuning", "model.base_model"),
        (["rl_or_sft=sft", "es_manager.val.env_configs.tags=[Bandit,FrozenLake]"], "no-demonstrations", "rl_or_sft"),
        (["rl_or_sft=sft_then_rl", "model_path=x", "sft.training.base_model=y"], "two-models", "model_path"),
    ],
)  # fmt: skip
def test_fine_tuning_refuses_a_mismatch(overrides, code, key):
    error = refusal(*overrides)
    assert (error.code, error.key) == (code, key)
