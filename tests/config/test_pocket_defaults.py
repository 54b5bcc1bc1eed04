"""The settings of the embedded model: over defaults, under whatever a recipe states or a user types."""

import pytest

from ragen.config import model_name
from ragen.config.compose import resolve
from ragen.config.tree import leaves

pytestmark = pytest.mark.no_gpu


def resolved(monkeypatch, *overrides, gpu=False, **options):
    monkeypatch.setattr(model_name, "num_gpus", lambda: int(gpu))
    return resolve(overrides, environ=options.pop("environ", {}), **options)


@pytest.mark.parametrize(
    ("environment", "tag", "turns"),
    [("sokoban", "SimpleSokoban", 5), ("frozenlake", "FrozenLake", 5), ("two_armed_bandit", "TwoArmedBandit", 1)],
)
def test_without_a_gpu_an_environment_is_played_by_pocket(monkeypatch, environment, tag, turns):
    plan = resolved(monkeypatch, environment)
    tree = leaves(plan.config)
    assert tree["model_path"] == "pocket" and "no GPU" in plan.origins["model_path"]
    assert tree["es_manager.train.env_configs.tags"] == tree["es_manager.val.env_configs.tags"] == [tag]
    assert tree["es_manager.val.env_configs.n_groups"] == [512]
    assert tree["agent_proxy.max_turn"] == turns
    assert tree["agent_proxy.prompt_style"] == "terse"
    assert plan.origins["actor_rollout_ref.actor.optim.lr"] == "comes with pocket"


def test_what_is_typed_wins_in_both_dialects(monkeypatch):
    tree = leaves(resolved(monkeypatch, "sokoban", "training.n_rollout=4", "trainer.test_freq=7", "optimization.actor_lr=3e-5", "training.ppo_batch_size=32").config)  # fmt: skip
    assert tree["es_manager.train.group_size"] == 4
    assert tree["trainer.test_freq"] == 7
    assert tree["actor_rollout_ref.actor.optim.lr"] == 3e-5
    assert tree["es_manager.train.env_groups"] == 16


def test_a_typed_board_and_typed_tags_stay(monkeypatch):
    board = resolved(monkeypatch, "sokoban", "env.env_kwargs.num_boxes=2").config
    assert board.es_manager.train.env_configs.tags == ["SokobanV1"]
    tags = resolved(monkeypatch, "sokoban", "es_manager.train.env_configs.tags=[LargerSokoban]").config
    assert tags.es_manager.train.env_configs.tags == ["LargerSokoban"]


RECIPE = """
agent_proxy: {max_turn: 3, max_actions_per_turn: 5}
actor_rollout_ref:
  actor: {optim: {lr: 1.0e-5}}
es_manager:
  train: {env_groups: 4, group_size: 8, env_configs: {tags: [CoordSokoban]}}
  val: {env_configs: {tags: [CoordSokoban], n_groups: [32]}, env_groups: 32}
trainer: {total_training_steps: 7, test_freq: 10, experiment_name: mine}
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return {"config_name": "mine", "config_dir": str(tmp_path)}


def test_a_recipe_of_the_user_wins_key_by_key(monkeypatch, mine):
    plan = resolved(monkeypatch, "model_path=pocket", **mine)
    tree = leaves(plan.config)
    stated = {
        "agent_proxy.max_turn": 3,
        "agent_proxy.max_actions_per_turn": 5,
        "actor_rollout_ref.actor.optim.lr": 1e-5,
        "es_manager.train.env_groups": 4,
        "es_manager.train.group_size": 8,
        "es_manager.train.env_configs.tags": ["CoordSokoban"],
        "es_manager.val.env_groups": 32,
        "trainer.total_training_steps": 7,
        "trainer.test_freq": 10,  # also the default
        "trainer.experiment_name": "mine",
    }
    assert {key: tree[key] for key in stated} == stated
    assert {plan.origins[key] for key in stated} == {"recipe mine"}
    assert tree["agent_proxy.prompt_style"] == "terse", "the recipe does not state it"
    assert plan.origins["agent_proxy.prompt_style"] == "comes with pocket"
    assert tree["ppo_mini_batch_size"] == 32, "no more than the batch of the recipe"
    assert any("never seen CoordSokoban" in note and "[SimpleSokoban]" in note for note in plan.notes)
    typed = resolved(monkeypatch, "model_path=pocket", "agent_proxy.max_turn=4", **mine)
    assert typed.config.agent_proxy.max_turn == 4
    assert typed.origins["agent_proxy.max_turn"] == "command line"


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ("algorithm: {bi_level_gae: true}\nagent_proxy: {use_turn_scores: true}", "algorithm.adv_estimator", "gae"),
        ("es_manager: {train: {env_configs: {n_groups: [8]}}}", "es_manager.train.env_groups", 8),
        ("model_path: pocket-blank\ntrainer: {save_freq: 5}", "trainer.save_freq", 5),
    ],
)
def test_a_setting_gives_way_to_what_it_would_contradict(monkeypatch, tmp_path, recipe, key, value):
    (tmp_path / "mine.yaml").write_text(recipe)
    model = [] if "model_path" in recipe else ["model_path=pocket"]
    plan = resolved(monkeypatch, *model, config_name="mine", config_dir=str(tmp_path))
    assert leaves(plan.config)[key] == value


def test_packaged_recipes_keep_what_they_state(monkeypatch):
    plan = resolved(monkeypatch, "model_path=pocket", config_name="_1_bandit")
    assert plan.config.actor_rollout_ref.rollout.response_length == 500
    assert plan.config.trainer.experiment_name == "bandit-base"
    assert plan.config.es_manager.val.env_configs.tags == ["Bandit", "BanditTest"]
    assert plan.config.trainer.total_training_steps == 150, "the recipe does not state it"
    sokoban = resolved(monkeypatch, "model_path=pocket", config_name="_2_sokoban")
    assert sokoban.config.es_manager.train.env_configs.tags == ["SimpleSokoban"], "a default"
    assert not any("instead of" in note for note in sokoban.notes)


def test_a_board_of_a_packaged_recipe_that_pocket_cannot_read_is_replaced_and_named(monkeypatch):
    plan = resolved(monkeypatch, "model_path=pocket", config_name="_3_frozen_lake")
    key = "es_manager.train.env_configs.tags"
    assert plan.config.es_manager.train.env_configs.tags == ["FrozenLake"]
    assert plan.config.custom_envs["FrozenLake"].env_config["success_rate"] == 1.0
    why = "instead of [CoordFrozenLake] of recipe _3_frozen_lake"
    assert why in plan.origins[key] and any(why in note for note in plan.notes)
    typed = resolved(monkeypatch, "model_path=pocket", f"{key}=[CoordFrozenLake]", config_name="_3_frozen_lake")
    assert typed.config.es_manager.train.env_configs.tags == ["CoordFrozenLake"]
    named = resolved(monkeypatch, "sokoban", "model.base_model=pocket", gpu=True).config
    assert named.es_manager.train.env_configs.tags == ["SimpleSokoban"]


def test_without_a_recipe_and_without_a_gpu_pocket_is_trained(monkeypatch):
    plan = resolved(monkeypatch, "trainer.total_training_steps=3")
    assert plan.config.model_path == "pocket" and "no GPU" in plan.origins["model_path"]
    assert plan.config.es_manager.train.env_configs.tags == ["SimpleSokoban"]
    assert resolved(monkeypatch, gpu=True).config.model_path == "Qwen/Qwen2.5-3B-Instruct"
    assert resolved(monkeypatch, config_name="base").config.model_path == "Qwen/Qwen2.5-3B-Instruct"
    assert resolved(monkeypatch, "model_path=other/model").config.model_path == "other/model"


def test_kl_in_the_loss_is_not_switched_off(monkeypatch):
    config = resolved(monkeypatch, "sokoban", "training.use_kl_loss=True").config
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.001
    config = resolved(monkeypatch, "sokoban", "training.use_kl_loss=False").config
    assert not config.algorithm.use_kl_in_reward


def test_recipes_keep_their_own_model(monkeypatch):
    assert resolved(monkeypatch, config_name="_2_sokoban").config.model_path == "Qwen/Qwen2.5-3B-Instruct"


def test_a_typed_kl_coefficient_means_kl(monkeypatch):
    config = resolved(monkeypatch, "sokoban", "optimization.kl_coef=0.01").config
    assert config.actor_rollout_ref.actor.use_kl_loss and config.actor_rollout_ref.actor.use_ref


def test_with_a_gpu_the_weights_decide(monkeypatch, tmp_path):
    assert resolved(monkeypatch, "sokoban", gpu=True).config.model_path == model_name.QWEN
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert resolved(monkeypatch, "sokoban", gpu=True, environ=offline).config.model_path == "pocket"
    snapshot = tmp_path / "hub/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    assert resolved(monkeypatch, "sokoban", gpu=True, environ=offline).config.model_path == model_name.QWEN
