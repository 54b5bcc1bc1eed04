"""Exact baselines against brute force: policies and sequences enumerated one by one."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.env.bandit import Bandit, TwoArmedBandit
from ragen.env.base import Environment
from ragen.env.frozen_lake import FrozenLake
from ragen.env.sokoban import Sokoban
from ragen.env.solve import (
    Baselines,
    Budget,
    baselines,
    best_actions,
    optimal_success,
    overlap,
    random_success,
    shortest_plan,
)
from ragen.prng import uniform

ONE_BOX = Sokoban(Sokoban.Config(num_boxes=1))


def lake(drawn: str, **changes):
    env = FrozenLake(FrozenLake.Config(**changes))
    return env, env.parse_grid(drawn)


# --- brute force, straight from the definitions -------------------------------------------------------------------


def branches(env, state, action):
    return [(chance, env.step(state, action, noise)) for chance, noise in env.chances(state, action)]


def naive_random(env, state, num_actions):
    if num_actions == 0:
        return 0.0
    names = list(env.action_names(state))
    return sum(
        chance
        / len(names)
        * (1.0 if after.success else 0.0 if after.done else naive_random(env, after.state, num_actions - 1))
        for action in names
        for chance, after in branches(env, state, action)
    )


def naive_optimal(env, state, turns, per_turn, actions):
    """The best of all answers; an answer is played blindly to its end, then the agent looks again."""
    if turns == 0 or actions == 0:
        return 0.0

    def follow(state, rest, actions_left):
        if not rest:
            return naive_optimal(env, state, turns - 1, per_turn, actions_left)
        return sum(
            chance * (1.0 if after.success else 0.0 if after.done else follow(after.state, rest[1:], actions_left - 1))
            for chance, after in branches(env, state, rest[0])
        )

    names = list(env.action_names(state))
    return max(
        follow(state, sequence, actions)
        for length in range(1, min(per_turn, actions) + 1)
        for sequence in product(names, repeat=length)
    )


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 3, 5])
def test_random_success_of_sokoban_equals_enumeration(total):
    for seed in range(8):
        state = ONE_BOX.reset(seed)
        assert random_success(ONE_BOX, state, Budget(total, 1, total)) == pytest.approx(
            naive_random(ONE_BOX, state, total)
        )


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), success_rate=st.sampled_from([1.0, 0.8, 0.0]))
def test_random_success_of_frozen_lake_equals_enumeration(seed, success_rate):
    env = FrozenLake(FrozenLake.Config(size=3, success_rate=success_rate))
    state = env.reset(seed)
    assert random_success(env, state, Budget(3, 1, 3)) == pytest.approx(naive_random(env, state, 3))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    success_rate=st.sampled_from([0.8, 1 / 3, 0.0]),
    budget=st.sampled_from([Budget(3, 1, 3), Budget(2, 2, 4), Budget(2, 2, 3), Budget(3, 2, 3), Budget(1, 3, 2)]),
)
def test_optimal_success_equals_enumeration(seed, success_rate, budget):
    env = FrozenLake(FrozenLake.Config(size=3, p=0.7, success_rate=success_rate))
    state = env.reset(seed)
    expected = naive_optimal(env, state, budget.turns, budget.actions_per_turn, budget.actions)
    assert optimal_success(env, state, budget) == pytest.approx(expected)


def test_an_optimum_worked_by_hand():
    # One step to the goal; a slip leads up (the border: stay) or down into a hole.
    env, state = lake("PG\nO_", success_rate=0.8)
    assert optimal_success(env, state, Budget(1, 1, 1)) == pytest.approx(0.8)
    assert best_actions(env, state, Budget(1, 1, 1)) == (3,)
    # Staying put (0.1) gives a second try: 0.8 + 0.1 * 0.8.
    assert optimal_success(env, state, Budget(2, 1, 2)) == pytest.approx(0.88)


def test_committing_to_several_actions_costs_success():
    env = FrozenLake(FrozenLake.Config(success_rate=0.8))
    levels = [env.reset(seed, "val") for seed in range(20)]
    seeing = [optimal_success(env, state, Budget(4, 1, 4)) for state in levels]
    blind = [optimal_success(env, state, Budget(1, 4, 4)) for state in levels]
    assert all(far >= near - 1e-12 for far, near in zip(seeing, blind, strict=True)) and sum(seeing) > sum(blind) + 0.1


def test_following_best_actions_reaches_the_optimum():
    env = FrozenLake(FrozenLake.Config(p=0.8, success_rate=0.7))
    budget = Budget(3, 2, 5)
    wins = expected = 0.0
    num_episodes = 0
    for seed in range(12):
        start = env.reset(seed)
        optimum = optimal_success(env, start, budget)
        for episode in range(60):
            state, actions_left, done, success = start, budget.actions, False, False
            for turn in range(budget.turns):
                if done or actions_left == 0:
                    break
                left = Budget(budget.turns - turn, budget.actions_per_turn, actions_left)
                for action in best_actions(env, state, left):
                    after = env.step(state, action, uniform("solve", seed, episode, turn, actions_left))
                    state, done, success = after.state, after.done, after.success
                    actions_left -= 1
                    if done:
                        break
            wins += success
            expected += optimum
            num_episodes += 1
    assert wins / num_episodes == pytest.approx(expected / num_episodes, abs=0.05)


def test_deterministic_games_are_won_when_the_plan_fits():
    state = ONE_BOX.reset(123, "val")
    plan = shortest_plan(ONE_BOX, state)
    assert len(plan) == 9
    assert optimal_success(ONE_BOX, state, Budget(5, 2, 10)) == 1.0
    assert optimal_success(ONE_BOX, state, Budget(4, 2, 10)) == 0.0
    assert best_actions(ONE_BOX, state, Budget(5, 2, 10)) == plan[:2]
    assert best_actions(ONE_BOX, state, Budget(1, 2, 2)) == plan[:2]
    dead = ONE_BOX.parse_grid("#####\n#X_O#\n#_P_#\n#####")
    assert optimal_success(ONE_BOX, dead, Budget(5, 2, 10)) == 0.0
    assert len(best_actions(ONE_BOX, dead, Budget(5, 2, 10))) == 1


def test_the_general_search_agrees_with_the_game_s_own():
    class PlainSokoban(Sokoban):
        """Sokoban without its own solver."""

        shortest_plan = Environment.shortest_plan
        random_success = Environment.random_success

    plain = PlainSokoban(ONE_BOX.config)
    for seed in (1, 2, 3, 4, 5):
        state = ONE_BOX.reset(seed)
        budget = Budget(3, 2, 6)
        if len(shortest_plan(ONE_BOX, state)) > 6:
            continue
        assert len(shortest_plan(plain, state)) == len(shortest_plan(ONE_BOX, state))
        assert optimal_success(plain, state, budget) == 1.0
        assert random_success(plain, state, budget) == pytest.approx(random_success(ONE_BOX, state, budget))


def test_shortest_plan_of_dry_ice_and_none_where_there_is_no_way():
    env, state = lake("P_\nOG", is_slippery=False)
    assert shortest_plan(env, state) == (3, 2)
    env, state = lake("PO\nOG", is_slippery=False)
    assert shortest_plan(env, state) is None
    env, state = lake("P_\nOG")
    with pytest.raises(ValueError, match="game of chance"):
        shortest_plan(env, state)


@pytest.mark.parametrize("env", [Bandit(), TwoArmedBandit()])
def test_bandits(env):
    budget = Budget(1, 1, 1)
    assert baselines(env, range(30), "val", budget) == Baselines(random=0.5, optimal=1.0, num_levels=30)
    state = env.reset(0)
    (action,) = best_actions(env, state, budget)
    assert env.action_names(state)[action] == state.risky


def test_baselines_average_over_levels():
    env = FrozenLake()
    budget = Budget(2, 2, 4)
    seeds = range(6)
    result = baselines(env, seeds, "test", budget)
    states = [env.reset(seed, "test") for seed in seeds]
    assert result.num_levels == 6
    assert result.random == pytest.approx(sum(random_success(env, state, budget) for state in states) / 6)
    assert result.optimal == pytest.approx(sum(optimal_success(env, state, budget) for state in states) / 6)
    with pytest.raises(ValueError, match="no seeds"):
        baselines(env, (), "test", budget)


def test_overlap_counts_distinct_states():
    env = FrozenLake(FrozenLake.Config(map_seed=1))
    assert overlap(env, range(3), "train", range(5), "val") == 1.0
    same = FrozenLake()
    assert overlap(same, range(10), "train", range(10), "train") == 1.0


def test_budget_total_and_refusals():
    assert Budget(5, 2, 10).total == Budget(5, 2, 99).total == 10
    assert Budget(5, 2, 7).total == 7
    with pytest.raises(ValueError, match="at least 1"):
        Budget(0, 1, 1)
    env = FrozenLake()
    with pytest.raises(ValueError, match="actions_per_turn"):
        optimal_success(env, env.reset(0), Budget(1, 10, 10))
