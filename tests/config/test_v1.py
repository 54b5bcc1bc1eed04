"""The older dialect: its values are checked under their own names, and what follows from them is worked out once."""

import pytest

from ragen.config.compose import resolve
from ragen.config.tree import ConfigError, leaves


def tree(*words, environ=None, **options):
    return leaves(resolve(words, environ=environ or {}, **options).config)


def message(*words, environ=None, **options):
    with pytest.raises(ConfigError) as caught:
        resolve(words, environ=environ or {}, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("training.train_batch_size=0", "training.train_batch_size=0: must be at least 1"),
        ("training.total_epochs=", "training.total_epochs=null: takes a whole number"),
        ("training.total_epochs=0", "training.total_epochs=0: must be at least 1"),
        ("training.max_start_length=abc", "training.max_start_length=abc: takes a whole number"),
        ("training.max_start_length=", "training.max_start_length=null: takes a whole number"),
        ("training.max_start_length=[1]", "training.max_start_length=[1]: takes a whole number"),
        ("training.max_start_length=-400", "training.max_start_length=-400: must be at least 1"),
        ("training.max_obs_length=None", "training.max_obs_length=None: takes a whole number"),
        ("training.max_obs_length=-1", "training.max_obs_length=-1: must be at least 0"),
        ("training.no_think_rl=abc", "training.no_think_rl=abc: takes true or false"),
        ("training.no_think_rl=-3", "training.no_think_rl=-3: takes true or false"),
        ("training.state_masking=abc", "training.state_masking=abc: takes true or false"),
        ("logging.log_images=banana", "logging.log_images=banana: takes true or false"),
        ("training.binary_reward=[1,2]", "training.binary_reward=[1, 2]: takes true or false"),
        ("training.train_data_num=0", "training.train_data_num=0: must be at least 1"),
        ("training.val_data_num=0", "training.val_data_num=0: must be at least 1"),
        ("training.ppo_batch_size=-3", "training.ppo_batch_size=-3: must be at least 1"),
        ("optimization.actor_lr=fast", "optimization.actor_lr=fast: takes a number"),
        ("optimization.adv_estimator=ppo", "optimization.adv_estimator=ppo: must be one of gae"),
        ("logging.mode=[mlflow]", "logging.mode=mlflow: must be one of console"),
        ("env.env_kwargs.dim_x=abc", "env.env_kwargs.dim_x=abc: takes a whole number or null"),
        ("training.n_rollout=${lora.rank}", "training.n_rollout=${lora.rank}: takes a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_message_under_its_own_name(word, says):
    assert message("sokoban", word).startswith(says)
    assert "problems" not in message("sokoban", word)


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
    words = [f"training.{key}={null}" for key in ("train_data_num", "val_data_num", "total_training_steps")]
    all_levels = tree("sokoban", *words, f"trainer.default_hdfs_dir={null}")
    assert all_levels["data.train_data_num"] == 10_000
    assert all_levels["es_manager.val.env_groups"] == 512
    assert all_levels["trainer.total_training_steps"] == 6250
    assert all_levels["trainer.default_hdfs_dir"] is None


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["training.micro_batch_size=4", "micro_batch_size_per_gpu=8"], ["training.micro_batch_size", "micro_batch_size_per_gpu"]),
        (["training.max_start_length=800", "actor_rollout_ref.rollout.max_model_len=2000"], ["training.max_start_length", "max_model_len"]),
        (["training.use_kl_loss=False", "optimization.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef=0.5"], ["optimization.kl_coef", "algorithm.kl_ctrl.kl_coef"]),
        (["training.use_kl_loss=False", "algorithm.use_kl_in_reward=False"], ["training.use_kl_loss", "algorithm.use_kl_in_reward"]),
    ],
)  # fmt: skip
def test_a_derived_value_against_a_typed_one_is_a_conflict(words, names):
    said = message("sokoban", *words)
    assert "both set" in said and all(name in said for name in names)


@pytest.mark.parametrize(
    ("words", "key", "value"),
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
def test_a_typed_key_of_the_tree_beats_a_default_of_the_dialect(words, key, value):
    assert tree("sokoban", *words)[key] == value


def test_a_micro_batch_must_divide_among_the_gpus():
    assert tree("sokoban", "system.n_gpus=2", "training.micro_batch_size=4")["micro_batch_size_per_gpu"] == 2
    assert "divide evenly among the 2 GPUs" in message("sokoban", "system.n_gpus=2", "training.micro_batch_size=3")


def test_groups_of_keys():
    grouped = tree("sokoban", "training={n_rollout: 8, ppo_batch_size: 64}", "env.env_kwargs={dim_x: 8, dim_y: 8}")
    assert (grouped["es_manager.train.group_size"], grouped["ppo_mini_batch_size"]) == (8, 64)
    assert grouped["custom_envs.SokobanV1.env_config.dim_x"] == 8
    assert "did you mean training.n_rollout?" in message("sokoban", "training={n_rolout: 8}")
    assert tree("sokoban", "training={}") == tree("sokoban")


def test_deletion_goes_back_to_the_dialect_s_default():
    environ = {"CONFIG_TRAINING__N_ROLLOUT": "4", "CONFIG_ENV__ENV_KWARGS__NUM_BOXES": "2"}
    restored = tree("sokoban", "~training.n_rollout", "~env.env_kwargs.num_boxes", environ=environ)
    assert restored["es_manager.train.group_size"] == 16
    assert restored["custom_envs.SokobanV1.env_config.num_boxes"] == 1
    assert tree("sokoban", "~training", environ={"CONFIG_TRAINING__N_ROLLOUT": "4"}) == tree("sokoban")
    assert message("sokoban", "~training.n_rollout=8") == "~training.n_rollout=8: its value is 16"
    said = message("sokoban", "~es_manager.train.group_size", "training.n_rollout=8")
    assert "~es_manager.train.group_size takes back" in said and "null" not in said


# --- environment variables ----------------------------------------------------------------------------------------


def test_variables_are_a_layer_below_the_command_line():
    environ = {"CONFIG_TRAINING__N_ROLLOUT": "4", "CONFIG_TRAINING__PPO_BATCH_SIZE": "32"}
    assert tree("sokoban", environ=environ)["es_manager.train.group_size"] == 4
    assert tree("sokoban", "training.n_rollout=8", environ=environ)["es_manager.train.group_size"] == 8
    assert tree("sokoban", "es_manager.train.group_size=16", environ=environ)["es_manager.train.group_size"] == 16
    lengths = {"CONFIG_TRAINING__MAX_START_LENGTH": "800"}
    limit = "actor_rollout_ref.rollout.max_model_len"
    assert tree("sokoban", environ=lengths)[limit] == 3800
    assert tree("sokoban", f"{limit}=2000", environ=lengths)[limit] == 2000


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"CONFIG_TRAINING__N_ROLLUT": "4"}, "variable CONFIG_TRAINING__N_ROLLUT: unknown key training.n_rollut; did you mean training.n_rollout?"),
        ({"CONFIG_TRAINING__N_ROLLOUT": "many"}, "variable CONFIG_TRAINING__N_ROLLOUT=many: takes a whole number"),
        ({"CONFIG_TRAINING__N_ROLLOUT": "0"}, "variable CONFIG_TRAINING__N_ROLLOUT=0: must be at least 1"),
        ({"CONFIG_TRAINING__N_ROLLOUT": "[1"}, "variable CONFIG_TRAINING__N_ROLLOUT: cannot read"),
        ({"CONFIG_RL_OR_SFT": "both"}, "variable CONFIG_RL_OR_SFT=both: must be one of rl, sft"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(environ, says):
    assert message("sokoban", environ=environ).startswith(says)


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
    ("words", "says"),
    [
        (["sokoban", "rl_or_sft=sft", "sft.env_type=frozenlake"], "sft.env_type=frozenlake, but"),
        (["sokoban", "rl_or_sft=sft", "model.base_model=x", "sft.training.base_model=y"], "model.base_model=x, but"),
        (["rl_or_sft=sft", "es_manager.val.env_configs.tags=[Bandit,FrozenLake]"], "no fine-tuning data for bandit, f"),
    ],
)
def test_fine_tuning_refuses_a_mismatch(words, says):
    assert says in message(*words)
