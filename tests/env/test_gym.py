"""The Gymnasium adapter passes Gymnasium's own checker and tells the two ways of ending apart."""

import warnings

import pytest
from gymnasium.utils.env_checker import check_env

from ragen.env.frozen_lake import FrozenLake
from ragen.env.gym import as_gym
from ragen.env.registry import catalogue, make
from ragen.env.sokoban import Sokoban

ONE_BOX = Sokoban(Sokoban.Config(num_boxes=1))


@pytest.mark.parametrize("tag", catalogue())
def test_gymnasium_accepts_every_tag(tag):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not having a spec.*")
        check_env(as_gym(make(catalogue()[tag]), render_mode="ansi"))


def test_a_seed_is_a_level_and_no_seed_is_a_random_one():
    env = as_gym(ONE_BOX, split="val")
    observation, info = env.reset(seed=123)
    assert observation == ONE_BOX.render(ONE_BOX.reset(123, "val")) and info == {"level": 123}
    levels = {env.reset()[1]["level"] for _ in range(10)}
    assert len(levels) == 10
    env.reset(seed=123)
    assert env.reset()[1]["level"] in levels


def test_winning_terminates():
    env = as_gym(ONE_BOX)
    env.reset(seed=4)
    for action in ONE_BOX.shortest_plan(ONE_BOX.reset(4)):
        observation, reward, terminated, truncated, info = env.step(action - 1)
    assert (terminated, truncated, info["success"]) == (True, False, True)
    assert reward == pytest.approx(10.9) and "√" in observation


def test_a_hole_terminates_without_success():
    lake = FrozenLake(FrozenLake.Config(p=0.6, is_slippery=False))
    env = as_gym(lake)
    for seed in range(30):
        env.reset(seed=seed)
        for action in (0, 1, 2, 3) * 5:
            _, _, terminated, truncated, info = env.step(action)
            if terminated:
                break
        if terminated and not info["success"]:
            assert not truncated
            return
    pytest.fail("no episode ended in a hole")


def test_the_game_s_own_limit_truncates():
    env = as_gym(Sokoban(Sokoban.Config(num_boxes=1, max_steps=2)))
    env.reset(seed=123)
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)


def test_the_action_limit_truncates_but_never_a_win():
    env = as_gym(ONE_BOX, max_actions=2)
    env.reset(seed=123)
    assert [env.step(0)[3] for _ in range(2)] == [False, True]
    seed = next(seed for seed in range(100) if len(ONE_BOX.shortest_plan(ONE_BOX.reset(seed))) == 2)
    env.reset(seed=seed)
    ends = [env.step(action - 1)[2:4] for action in ONE_BOX.shortest_plan(ONE_BOX.reset(seed))]
    assert ends == [(False, False), (True, False)]


def test_wrong_use_is_refused():
    env = as_gym(ONE_BOX)
    with pytest.raises(Exception, match="reset"):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="0 to 3"):
        env.step(4)
    with pytest.raises(ValueError, match="ansi"):
        as_gym(ONE_BOX, render_mode="human")
