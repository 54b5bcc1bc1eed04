"""The printed plan: readable as YAML whatever the values are, and done in seconds whatever the setting is."""

import pytest
import yaml

from ragen.config.compose import resolve, training_config
from ragen.config.explain import derived_lines, explain
from ragen.config.tree import to_dict
from ragen.env import baseline_budget
from ragen.env.baseline_budget import MAX_LEVELS, baselines_within_budget
from ragen.env.registry import catalogue, make
from ragen.env.solve import Budget, baselines
from ragen.errors import ConfigError


def plan(*overrides, **options):
    return explain(resolve(overrides, environ={}, **options))


def lines(*overrides, **options):
    return list(derived_lines(resolve(overrides, environ={}, **options).config))


@pytest.mark.parametrize("text", ["two\nlines", "bell \x07 and \x85", "# no comment", "a: b", "'", "√ 😀"])
def test_any_text_survives_as_yaml(text):
    resolved = resolve([], environ={})
    resolved.config.trainer.experiment_name = text
    resolved.config.trainer.logger = [text]
    resolved.origins["trainer.experiment_name"] = f"recipe {text}"
    resolved.config.ray_kwargs.ray_init = {"on": 1, "a\nb": 2, "null": 3}
    tree = yaml.safe_load(explain(resolved))
    assert tree["trainer"]["experiment_name"] == text
    assert tree["trainer"]["logger"] == [text]
    assert tree["ray_kwargs"]["ray_init"] == {"on": 1, "a\nb": 2, "null": 3}


def test_a_typed_text_of_two_lines():
    tree = yaml.safe_load(plan("custom_envs.CoordSokoban.env_instruction='one\ntwo'"))
    assert tree["custom_envs"]["CoordSokoban"]["env_instruction"] == "one\ntwo"


def test_the_numbers_come_first_and_the_tree_is_whole():
    text = plan(config_name="_1_bandit")
    resolved = resolve([], config_name="_1_bandit", environ={})
    tree = yaml.safe_load(text)
    assert tree == to_dict(resolved.config)
    assert list(tree)[-2:] == ["custom_envs", "sft"]
    assert list(tree["custom_envs"])[:2] == ["Bandit", "BanditTest"]
    assert text.index("# derived:") < text.index("# notes:") < text.index("\nrl_or_sft:")
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 100


def test_different_tags_in_training_and_validation_are_noted():
    notes = resolve(["es_manager.train.env_configs.tags=[SimpleSokoban]"], environ={}).notes
    assert notes == ["training on SimpleSokoban, validating on CoordSokoban"]


def test_windowed_contexts_count_their_turns():
    overrides = lines("agent_proxy.context_window_mode=single_turn")
    assert "samples per step: at most 640 (8 groups x 16 x up to 5 turns)" in overrides
    assert any(line.startswith("updates per step: at most 20 ") for line in overrides)
    with pytest.raises(ConfigError) as caught:
        resolve(["agent_proxy.context_window_mode=single_turn", "ppo_mini_batch_size=641"], environ={})
    assert caught.value.code == "mini-batch" and "640 or less" in str(caught.value)


def test_an_optimum_that_is_too_much_work_is_not_computed():
    slippery = "custom_envs.CoordFrozenLake.env_config.success_rate=0.8"
    for per_turn in (7, 10):
        overrides = lines(slippery, f"agent_proxy.max_actions_per_turn={per_turn}", config_name="_3_frozen_lake")
        assert any("random play succeeds in" in line for line in overrides)
        assert any("CoordFrozenLake: optimal play: unknown, because 4 actions" in line for line in overrides)


def test_an_endless_budget_is_not_followed():
    overrides = ["agent_proxy.max_turn=1000000000", "custom_envs.FrozenLake.max_actions_per_traj=1000000000"]
    tags = [f"es_manager.{split}.env_configs.tags=[FrozenLake]" for split in ("train", "val")]
    assert any("random play: unknown" in line for line in lines(*overrides, *tags))


def test_the_levels_of_a_plan_are_capped():
    assert any(
        f"the first {MAX_LEVELS} of 50000 validation levels" in line
        for line in lines("es_manager.val.env_groups=50000")
    )


@pytest.mark.parametrize("tag", ["FrozenLake", "SimpleSokoban", "Bandit", "TwoArmedBandit", "FrozenLakeV1"])
def test_within_the_limits_the_answer_is_the_exact_one(tag):
    env, budget, seeds = make(catalogue()[tag]), Budget(3, 2, 5), range(123, 139)
    exact, reached = baselines(env, seeds, "val", budget), baselines_within_budget(env, seeds, "val", budget)
    assert (reached.random, reached.optimal, reached.num_levels) == (exact.random, exact.optimal, 16)


def test_with_less_work_fewer_levels_are_solved(monkeypatch):
    env = make(catalogue()["FrozenLake"])
    monkeypatch.setattr(baseline_budget, "MAX_WORK", 50_000)
    assert 8 <= baselines_within_budget(env, range(512), "val", Budget(5, 2, 10)).num_levels < 512


def test_a_tag_has_the_config_it_is_trained_with():
    assert training_config("FrozenLakeV1").agent_proxy.max_actions_per_turn == 1
    assert training_config("BanditTest").agent_proxy.max_turn == 1
    assert training_config("CoordFrozenLake").custom_envs["CoordFrozenLake"].env_config["success_rate"] == 1
    assert training_config("FrozenLake").custom_envs["FrozenLake"].env_config["success_rate"] == 0.8
