"""The embedded model's own settings: over dialect and recipe, under what is typed."""

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


def test_recipes_take_it_when_asked(monkeypatch):
    config = resolved(monkeypatch, "model_path=pocket", config_name="_3_frozen_lake").config
    assert config.es_manager.train.env_configs.tags == ["FrozenLake"]
    assert config.custom_envs["FrozenLake"].env_config["success_rate"] == 1.0
    assert config.algorithm.adv_estimator == "grpo"
    named = resolved(monkeypatch, "sokoban", "model.base_model=pocket", gpu=True).config
    assert named.es_manager.train.env_configs.tags == ["SimpleSokoban"]


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
