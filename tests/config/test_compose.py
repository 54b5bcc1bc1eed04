"""Override forms, precedence, origins, and v1 keys beside tree keys in one command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.config.compose import resolve
from ragen.config.derive import in_proportion
from ragen.config.schema import Config
from ragen.config.tree import build, leaves, to_dict
from ragen.errors import ConfigError


def tree(*overrides, **options):
    return leaves(resolve(overrides, environ={}, **options).config)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["es_manager.train.env_groups=4", "es_manager.train.env_configs.n_groups=[4]"], "es_manager.train.env_configs.n_groups", [4]),
        (["es_manager.train.env_groups=4"], "es_manager.train.env_configs.n_groups", [4]),
        (["system.CUDA_VISIBLE_DEVICES='0,1'", "trainer.n_gpus_per_node=2"], "system.CUDA_VISIBLE_DEVICES", "0,1"),
        (["system.CUDA_VISIBLE_DEVICES=0,1", "trainer.n_gpus_per_node=2"], "system.CUDA_VISIBLE_DEVICES", "0,1"),
        (["system.CUDA_VISIBLE_DEVICES=[0,1]", "trainer.n_gpus_per_node=2"], "system.CUDA_VISIBLE_DEVICES", "0,1"),
        (["+trainer.test_freq=3"], "trainer.test_freq", 3),
        (["++trainer.test_freq=3"], "trainer.test_freq", 3),
        (["trainer.max_actor_ckpt_to_keep=null"], "trainer.max_actor_ckpt_to_keep", None),
        (["trainer.max_actor_ckpt_to_keep="], "trainer.max_actor_ckpt_to_keep", None),
        (["trainer.experiment_name='${model_path}-x'"], "trainer.experiment_name", "Qwen/Qwen2.5-3B-Instruct-x"),
        (["lora={rank: 8}"], "lora.rank", 8),
        (["lora={rank: 8}"], "lora.alpha", 64),
        (["actor_rollout_ref.actor.optim.lr=5e-7"], "actor_rollout_ref.actor.optim.lr", 5e-7),
        (["trainer.logger=['console']"], "trainer.logger", ["console"]),
        (["trainer.logger=console"], "trainer.logger", ["console"]),
        (["collapse_detection.num_samples=all"], "collapse_detection.num_samples", "all"),
        (["trainer.test_freq=3", "trainer.test_freq=7"], "trainer.test_freq", 7),
        (["ray_kwargs.ray_init.num_cpus=16"], "ray_kwargs.ray_init.num_cpus", 16),
        (["+ray_kwargs.ray_init.dashboard=False"], "ray_kwargs.ray_init.dashboard", False),
        (["custom_envs.CoordSokoban.env_config.num_boxes=2"], "custom_envs.CoordSokoban.env_config.num_boxes", 2),
        (["+custom_envs.Mine.env_type=frozen_lake"], "custom_envs.Mine.max_actions_per_traj", 10),
        (["+custom_envs.Mine.env_type=sokoban", "+custom_envs.Mine.env_config={num_boxes: 2}"], "custom_envs.Mine.env_config.num_boxes", 2),
        (["ppo_mini_batch_size=64"], "critic.ppo_mini_batch_size", 64),
        (["ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=16"], "critic.ppo_mini_batch_size", 16),
        (["lora={rank: 8}", "lora.rank=4"], "lora.rank", 4),
        (["trainer.experiment_name=1e-3"], "trainer.experiment_name", "1e-3"),
        (["trainer.experiment_name=1_000"], "trainer.experiment_name", "1_000"),
        (["trainer.experiment_name=true"], "trainer.experiment_name", "true"),
        (["custom_envs.CoordSokoban.env_instruction=007"], "custom_envs.CoordSokoban.env_instruction", "007"),
        (["custom_envs.FrozenLake.env_config.is_slippery=no"], "custom_envs.FrozenLake.env_config.is_slippery", "no"),
        (["actor_rollout_ref.rollout.rollout_filter_include_zero=false"], "actor_rollout_ref.rollout.rollout_filter_include_zero", False),
    ],
)  # fmt: skip
def test_override_forms(overrides, key, value):
    assert tree(*overrides)[key] == value


def test_delete_takes_back_what_the_recipe_set():
    assert tree(config_name="_1_bandit")["agent_proxy.max_turn"] == 1
    assert tree("~agent_proxy.max_turn", config_name="_1_bandit")["agent_proxy.max_turn"] == 5
    assert tree("~es_manager.val.env_configs", config_name="_1_bandit")["es_manager.val.env_configs.n_groups"] == [512]
    gone = tree("~custom_envs.FrozenLake.env_config.success_rate")
    assert "custom_envs.FrozenLake.env_config.success_rate" not in gone


def test_own_recipes(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [_2_sokoban, _self_]\nagent_proxy: {max_turn: 3}\n")
    mine = tree(config_name="mine", config_dir=str(tmp_path))
    assert mine["agent_proxy.max_turn"] == 3
    assert mine["trainer.experiment_name"] == "sokoban-main"


def test_a_recipe_needs_no_defaults_list(tmp_path):
    (tmp_path / "plain.yaml").write_text("agent_proxy: {max_turn: 3}\ntrainer: {}\n")
    (tmp_path / "empty.yaml").write_text("")
    assert tree(config_name="plain", config_dir=str(tmp_path))["agent_proxy.max_turn"] == 3
    assert tree(config_name="empty", config_dir=str(tmp_path)) == tree()


def test_built_in_recipes_are_found_beside_one_s_own(tmp_path):
    folder = tmp_path / "it's, odd"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [_1_bandit, _self_]\n")
    assert tree(config_name="_2_sokoban", config_dir=str(folder))["trainer.experiment_name"] == "sokoban-main"
    assert tree(config_name="mine", config_dir=str(folder))["agent_proxy.max_turn"] == 1


@pytest.mark.parametrize(
    ("text", "code", "key", "way_out"),
    [
        ("trainer: [1", "bad-recipe", "mine", "mine.yaml"),
        ("- a", "bad-recipe", "mine", "mine.yaml"),
        ("5", "bad-recipe", "mine", "mine.yaml"),
        ("defaults: [nowhere]", "bad-recipe", "mine", "nowhere"),
        ("trainer:", "group", "trainer", "a group of keys"),
        ("trainer: {test_frq: 3}", "unknown-key", "trainer.test_frq", "did you mean trainer.test_freq?"),
        ("training: {n_rollout: 8}", "unknown-key", "training.n_rollout", "es_manager.train.group_size"),
        (
            "actor_rollout_ref: {actor: {use_ref: false, use_kl_loss: true, kl_loss_coef: 0.1}}",
            "reference-model",
            "actor_rollout_ref.actor.use_ref",
            "coefficient 0.1",
        ),
    ],
)
def test_a_broken_recipe_is_one_error(tmp_path, text, code, key, way_out):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve([], config_name="mine", config_dir=str(tmp_path), environ={})
    assert (caught.value.code, caught.value.key) == (code, key)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    "group", ["actor_rollout_ref.model", "trainer", "critic", "es_manager.val", "custom_envs", "lora", "training", "custom_envs.CoordSokoban.env_config"],
)  # fmt: skip
def test_an_empty_group_changes_nothing(group):
    assert tree(f"{group}={{}}") == tree()


def test_origins():
    resolved = resolve(["sokoban", "training.n_rollout=8", "training.ppo_batch_size=64", "lora.rank=4"], environ={})
    origins = resolved.origins
    assert origins["es_manager.train.group_size"] == "command line: training.n_rollout=8"
    assert origins["lora.rank"] == "command line"
    assert origins["actor_rollout_ref.model.lora_rank"] == "follows lora.rank"
    assert origins["trainer.default_local_dir"] == "follows trainer.project_name, trainer.experiment_name"
    assert origins["agent_proxy.max_actions_per_turn"] == "v1 default (sokoban)"
    assert "10000 levels / 8 groups x 5 epochs" in origins["trainer.total_training_steps"]
    assert "agent_proxy.max_turn" not in origins  # set by the v1 defaults, to the value it has anyway
    assert resolve([], config_name="_1_bandit", environ={}).origins["agent_proxy.max_turn"] == "recipe _1_bandit"


def test_v1_keys_and_tree_keys_mix():
    mixed = tree("sokoban", "training.train_batch_size=4", "es_manager.train.group_size=8", "ppo_mini_batch_size=32")
    assert (mixed["es_manager.train.env_groups"], mixed["es_manager.train.group_size"]) == (4, 8)
    assert mixed["trainer.total_training_steps"] == 12_500
    recipe = tree("training.n_rollout=4", config_name="_2_sokoban")
    assert recipe["es_manager.train.group_size"] == 4
    assert recipe["trainer.total_training_steps"] == 200  # a recipe's budget is its own
    assert tree("sokoban", "es_manager.train.env_groups=16")["trainer.total_training_steps"] == 3125
    assert tree("sokoban", "trainer.total_training_steps=7")["trainer.total_training_steps"] == 7
    assert tree("sokoban", "training.total_training_steps=7")["trainer.total_training_steps"] == 7
    assert tree("training.total_epochs=1", config_name="_2_sokoban")["trainer.total_training_steps"] == 1250


def test_v1_environment_settings():
    assert tree("sokoban", "env.env_kwargs.num_boxes=2")["custom_envs.SokobanV1.env_config.num_boxes"] == 2
    resolved = resolve(["frozenlake"], environ={"CONFIG_TRAINING__MAX_TURNS": "3"})
    assert resolved.config.agent_proxy.max_turn == 3
    assert resolved.origins["agent_proxy.max_turn"].startswith("variable CONFIG_TRAINING__MAX_TURNS")


def test_kl_moves_into_the_reward():
    off = tree("sokoban", "training.use_kl_loss=False")
    assert off["algorithm.use_kl_in_reward"] is True and off["algorithm.kl_ctrl.kl_coef"] == 0.001
    none = tree("sokoban", "training.use_kl_loss=False", "optimization.kl_coef=0")
    assert none["algorithm.use_kl_in_reward"] is False
    assert tree("sokoban", "actor_rollout_ref.actor.use_kl_loss=False")["algorithm.use_kl_in_reward"] is False


@pytest.mark.parametrize(
    ("visible", "overrides", "devices"),
    [
        (None, [], "0"),
        (None, ["trainer.n_gpus_per_node=4"], "0,1,2,3"),
        ("5,6", ["trainer.n_gpus_per_node=2"], "5,6"),
        ("5,6,7", [], "5"),
        ("5,6", ["system.CUDA_VISIBLE_DEVICES='3'"], "3"),
        ("", [], ""),
        ("-1", [], ""),
        ("0,", [], "0"),
        (" 5 , 6 ", ["trainer.n_gpus_per_node=2"], "5,6"),
        ("NoDevFiles", [], ""),
        ("GPU-8932f937-d72c", [], "GPU-8932f937-d72c"),
        ("5", ["system.CUDA_VISIBLE_DEVICES="], ""),
        ("5", ["system.CUDA_VISIBLE_DEVICES=null"], ""),
        ("5", ["system.CUDA_VISIBLE_DEVICES=-1"], ""),
        ("5", ["system={CUDA_VISIBLE_DEVICES: '0,1', n_gpus: 2}"], "0,1"),
        ("5", ["~system.CUDA_VISIBLE_DEVICES"], "5"),
        (None, ["system.CUDA_VISIBLE_DEVICES= 0 , 1 ", "trainer.n_gpus_per_node=2"], "0,1"),
        (None, ["system.CUDA_VISIBLE_DEVICES=[MIG-a,MIG-b]", "trainer.n_gpus_per_node=2"], "MIG-a,MIG-b"),
    ],
)
def test_device_list(visible, overrides, devices):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices == resolve(overrides, environ=environ).config.system.CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["actor_rollout_ref.actor.use_ref=True"], False),
        (["actor_rollout_ref.actor.use_kl_loss=True"], False),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.00"], False),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001"], True),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"], True),
        (["sokoban"], True),
        (["sokoban", "optimization.kl_coef=0"], False),
    ],
)
def test_a_reference_model_exists_only_for_a_kl_term(overrides, needed):
    assert tree(*overrides)["actor_rollout_ref.actor.use_ref"] is needed


def test_no_effect_keys_are_listed_only_when_typed():
    assert resolve(["sokoban"], environ={}).no_effect == {}
    typed = resolve(["training.binary_reward=True", "actor_rollout_ref.actor.use_ref=False"], environ={})
    assert set(typed.no_effect) == {"training.binary_reward", "actor_rollout_ref.actor.use_ref"}


@pytest.mark.parametrize(
    ("overrides", "listed"),
    [
        (["sokoban", "training.total_epochs=3", "training.max_start_length=500", "training.max_obs_length=100"], set()),
        (["sokoban", "training.total_epochs=3", "trainer.total_training_steps=7"], {"training.total_epochs"}),
        (["training.rollout_tp_size=2"], {"training.rollout_tp_size"}),
        (["custom_envs.CoordSokoban.max_workers=4"], {"custom_envs.CoordSokoban.max_workers"}),
        (["custom_envs={CoordSokoban: {parallel_friendly: True}}"], {"custom_envs.CoordSokoban.parallel_friendly"}),
        (["actor_rollout_ref.rollout={enforce_eager: False, top_k: -1}"], {"actor_rollout_ref.rollout.enforce_eager"}),
        (["~actor_rollout_ref.rollout.enforce_eager"], set()),
    ],
)
def test_exactly_the_keys_without_effect_are_listed(overrides, listed):
    assert set(resolve(overrides, environ={}).no_effect) == listed


def test_keys_without_effect_in_a_recipe_are_listed(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "actor_rollout_ref: {rollout: {enforce_eager: true}}\ncustom_envs: {CoordSokoban: {max_workers: 3}}\n"
    )
    resolved = resolve([], config_name="mine", config_dir=str(tmp_path), environ={})
    assert set(resolved.no_effect) == {
        "actor_rollout_ref.rollout.enforce_eager",
        "custom_envs.CoordSokoban.max_workers",
    }


def test_a_config_rebuilds_from_its_own_dict():
    config = resolve(["frozenlake", "lora.rank=8"], environ={}).config
    assert build(Config, to_dict(config)) == config


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["es_manager.val.env_groups=4"], [2, 2]),
        (["es_manager.val.env_groups=5"], [3, 2]),
        (["es_manager.val.env_groups=4", "es_manager.val.env_configs.n_groups=[1,3]"], [1, 3]),
    ],
)
def test_the_groups_of_each_tag_follow_their_number(overrides, sizes):
    assert tree(*overrides, config_name="_1_bandit")["es_manager.val.env_configs.n_groups"] == sizes


def test_fewer_groups_than_tags_are_refused():
    with pytest.raises(ConfigError) as caught:
        resolve(["es_manager.val.env_groups=1"], config_name="_1_bandit", environ={})
    assert (caught.value.code, caught.value.key) == ("group-counts", "es_manager.val.env_configs.n_groups")


def test_remainders_decide_who_gets_more():
    assert in_proportion(128, [8]) == [128]
    assert in_proportion(16, [4, 3, 1]) == [8, 6, 2]
    assert in_proportion(5, [1, 1, 1]) == [2, 2, 1]
    assert in_proportion(5, [6, 1, 1]) == [3, 1, 1]  # 3.75, 0.625, 0.625, and nobody is left out


@given(st.integers(1, 1000), st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_a_total_is_divided_in_proportion(total, sizes):
    parts = in_proportion(total, sizes)
    assert sum(parts) == total
    assert min(parts) >= (total >= len(sizes))
    if min(parts) > 1:  # nobody had to give up anything for a part that would have been empty
        assert all(abs(part - total * size / sum(sizes)) < 1 for part, size in zip(parts, sizes, strict=True))
