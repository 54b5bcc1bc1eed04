"""Estimators that compare returns: numbers worked by hand, and plain loops with exact fractions as a second opinion."""

import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_experience import experience, settings

from ragen.algo.advantage import ESTIMATORS

BY_STD, BY_MEAN = settings(), settings(norm_by_std=False)
WITHOUT_VALUES = sorted(set(ESTIMATORS) - {"gae"})
PER_EPISODE = ["arpo", "brpo", "grpo", "rloo"]


def advantages(name, returns, group_ids, chosen=BY_STD, dtype=torch.float64):
    """Of episodes with 1, 2 or 3 tokens, the return on the last one; all tokens of an episode must agree."""
    lengths = [1 + index % 3 for index in range(len(returns))]
    rewards = [0.0] * sum(lengths)
    for index, value in enumerate(returns):
        rewards[sum(lengths[: index + 1]) - 1] = value
    estimate = ESTIMATORS[name](experience([[n] for n in lengths], rewards, group_ids, dtype=dtype), chosen)
    assert estimate.returns_T is None and estimate.advantages_T.dtype == dtype
    parts = [part.tolist() for part in estimate.advantages_T.split(lengths)]
    assert all(len(set(part)) == 1 for part in parts)
    return [part[0] for part in parts]


# By hand -----------------------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # Group 7: 1, 2, 3 -> mean 2, squares 1 + 0 + 1 over n - 1 = 2 -> std 1.
    # Group -4: 0, 4 -> mean 2, squares 4 + 4 over 1 -> std sqrt(8).
    returns, group_ids = [1.0, 0.0, 2.0, 4.0, 3.0], [7, -4, 7, -4, 7]
    one, two = 1 / 1.000001, 2 / (math.sqrt(8) + 1e-6)
    assert advantages("grpo", returns, group_ids) == pytest.approx([-one, -two, 0.0, two, one], rel=1e-12)
    assert advantages("grpo", returns, group_ids, BY_MEAN) == [-1.0, -2.0, 0.0, 2.0, 1.0]


def test_brpo_by_hand():
    # 1, 2, 3, 6 -> mean 3, squares 4 + 1 + 0 + 9 = 14 over 3.
    std = math.sqrt(14 / 3) + 1e-6
    expected = [-2 / std, -1 / std, 0.0, 3 / std]
    for group_ids in ([0, 0, 1, 1], [3, 1, 2, 0], [5, 5, 5, 5]):
        for chosen in (BY_STD, BY_MEAN):  # the setting is about grpo
            assert advantages("brpo", [1.0, 2.0, 3.0, 6.0], group_ids, chosen) == pytest.approx(expected, rel=1e-12)


def test_the_constant_is_added_to_the_std():
    # 0 and 2e-6: mean 1e-6, std sqrt(2)e-6, so A = 1 / (sqrt(2) + 1).
    assert advantages("grpo", [0.0, 2e-6], [0, 0]) == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


def test_an_episode_without_peers_is_measured_against_mean_0_and_std_1():
    assert advantages("grpo", [5.0, 1.0, 3.0], [9, 2, 2], BY_MEAN) == [5.0, -1.0, 1.0]
    assert advantages("grpo", [5.0, 1.0, 1.0], [9, 2, 2]) == pytest.approx([5 / 1.000001, 0.0, 0.0], rel=1e-12)
    assert advantages("brpo", [-2.0], [3]) == pytest.approx([-2 / 1.000001], rel=1e-12)
    # In brpo a group of one has the batch for company.
    assert advantages("brpo", [1.0, 3.0], [0, 1]) == pytest.approx(
        [-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)]
    )


def test_arpo_is_the_return():
    assert advantages("arpo", [3.0, -1.5, 0.0], [1, 1, 2]) == [3.0, -1.5, 0.0]


def test_rloo_by_hand():
    # 1, 2, 6: the others have means 4, 3.5 and 1.5. A single one has no others.
    assert advantages("rloo", [1.0, 5.0, 2.0, 6.0], [3, 9, 3, 3]) == pytest.approx([-3.0, 5.0, -1.5, 4.5], rel=1e-12)


def test_reinforce_plus_plus_baseline_by_hand():
    # Group means 2 and 5: centred -1, 1, 0 and 0 on 1, 3, 1 and 1 tokens. Over the six tokens the mean is 1/3, the
    # squares are 16/9 + 3 * 4/9 + 2 * 1/9 = 30/9 over 5: variance 2/3.
    made = experience([[1], [2, 1], [1], [1]], [1.0, 0.0, 0.0, 3.0, 5.0, 5.0], [4, 4, 5, 5])
    got = ESTIMATORS["reinforce_plus_plus_baseline"](made, settings())
    low, high, even = (value / math.sqrt(2 / 3 + 1e-8) for value in (-4 / 3, 2 / 3, -1 / 3))
    assert got.advantages_T.tolist() == pytest.approx([low, high, high, high, even, even], rel=1e-12)
    assert got.returns_T is None


def test_the_return_is_the_sum_of_the_turns_rewards():
    by_turn = experience([[2, 1], [1, 1, 1], [2]], [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, 0.0, -4.0], [1, 1, 1])
    at_the_end = experience([[2, 1], [1, 1, 1], [2]], [0.0, 0.0, 3.0, 0.0, 0.0, 1.0, 0.0, -4.0], [1, 1, 1])
    for name in {*WITHOUT_VALUES} - {"reinforce_plus_plus"}:
        left, right = (ESTIMATORS[name](made, settings()).advantages_T.tolist() for made in (by_turn, at_the_end))
        assert left == right


@pytest.mark.parametrize("name", ["grpo", "brpo", "rloo"])
@pytest.mark.parametrize("value", [0.0, 0.1, 100.1, -10.9, 1e6 + 0.3])
@pytest.mark.parametrize("size", [2, 3, 16, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_returns_give_exactly_zero(name, value, size, dtype):
    # In float32 the plain formula gives 0.86 for sixteen times 100.1: rounding divided by rounding.
    assert advantages(name, [value] * size, [1] * size, dtype=dtype) == [0.0] * size


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_no_episodes_no_advantages(name):
    assert advantages(name, [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match=rf"reward.*finite.*{bad} at token 2"):
        advantages("grpo", [1.0, bad], [0, 0])


# A second opinion ---------------------------------------------------------------------------------------------------


def naive(returns, keys, norm_by_std):
    groups = defaultdict(list)
    for value, key in zip(returns, keys, strict=True):
        groups[key].append(value)
    result = []
    for value, key in zip(returns, keys, strict=True):
        peers = groups[key]
        std = 1.0
        if len(peers) > 1:
            exact = [Fraction(peer) for peer in peers]
            mean = sum(exact) / len(exact)
            std = math.sqrt(sum((peer - mean) ** 2 for peer in exact) / (len(exact) - 1))
        centred = float(Fraction(value) - mean) if len(peers) > 1 else value
        result.append(centred / (std + 1e-6) if norm_by_std else centred)
    return result


def naive_leave_one_out(returns, keys):
    result = []
    for row, (value, key) in enumerate(zip(returns, keys, strict=True)):
        others = [
            Fraction(other)
            for index, (other, group) in enumerate(zip(returns, keys, strict=True))
            if group == key and index != row
        ]
        result.append(float(Fraction(value) - sum(others) / len(others)) if others else value)
    return result


# Multiples of 1/64: adding an integer to them is exact.
some_return = st.one_of(
    st.integers(-640, 640).map(lambda number: number / 64),
    st.sampled_from([0.0, 1.0, -1.0]),  # ties and zeros often
    st.integers(-(2**40), 2**40).map(float),
)
some_ids = st.sampled_from([0, 1, 5, -3, 2**40])
some_episodes = st.lists(st.tuples(some_return, some_ids), min_size=1, max_size=24)


def close(left, right, norm_by_std, returns):
    # Without the division a mean has the rounding of the largest return in it.
    return left == pytest.approx(right, rel=1e-9, abs=1e-9 if norm_by_std else 1e-9 + 1e-15 * max(map(abs, returns)))


@given(some_episodes, st.booleans())
@example([(3.0, 1)], True)
@example([(0.0, 1)] * 5, True)
@example([(2.0, 1), (2.0, 0), (4.0, 1), (8.0, -3)], False)
def test_against_plain_loops(episodes, norm_by_std):
    returns, group_ids = map(list, zip(*episodes, strict=True))
    chosen = settings(norm_by_std=norm_by_std)
    by_group, by_batch = naive(returns, group_ids, norm_by_std), naive(returns, [0] * len(returns), True)
    assert close(advantages("grpo", returns, group_ids, chosen), by_group, norm_by_std, returns)
    assert close(advantages("brpo", returns, group_ids, chosen), by_batch, True, returns)


@given(some_episodes)
@example([(3.0, 1)])
def test_rloo_and_arpo_against_plain_loops(episodes):
    returns, group_ids = map(list, zip(*episodes, strict=True))
    assert close(advantages("rloo", returns, group_ids), naive_leave_one_out(returns, group_ids), False, returns)
    assert advantages("arpo", returns, group_ids) == returns


@given(st.lists(st.tuples(st.integers(-640, 640).map(lambda number: number / 64), some_ids), min_size=1, max_size=24))
@example([(3.0, 1)])
@example([(3.0, 1)] * 4)
def test_reinforce_plus_plus_baseline_against_plain_loops(episodes):
    returns, group_ids = map(list, zip(*episodes, strict=True))
    # As in `advantages`, the episodes have 1, 2, 3, 1, 2, … tokens.
    tokens = [
        Fraction(value)
        for index, value in enumerate(naive(returns, group_ids, norm_by_std=False))
        for _ in range(1 + index % 3)
    ]
    mean, variance = Fraction(0), Fraction(1)
    if len(tokens) > 1:
        mean = sum(tokens) / len(tokens)
        variance = sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
    firsts = [sum(1 + other % 3 for other in range(index)) for index in range(len(returns))]
    expected = [float(tokens[first] - mean) / math.sqrt(variance + 1e-8) for first in firsts]
    got = advantages("reinforce_plus_plus_baseline", returns, group_ids)
    assert got == pytest.approx(expected, rel=1e-7, abs=1e-7)


@given(some_episodes, st.sampled_from(PER_EPISODE), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(episodes, name, norm_by_std, random):
    order = list(range(len(episodes)))
    random.shuffle(order)
    chosen = settings(norm_by_std=norm_by_std)
    returns, group_ids = map(list, zip(*episodes, strict=True))
    straight = advantages(name, returns, group_ids, chosen)
    shuffled = advantages(name, [returns[row] for row in order], [group_ids[row] for row in order], chosen)
    assert close(shuffled, [straight[row] for row in order], norm_by_std, returns)


@given(some_episodes, st.booleans())
def test_the_names_of_groups_do_not_matter(episodes, norm_by_std):
    returns, group_ids = map(list, zip(*episodes, strict=True))
    chosen = settings(norm_by_std=norm_by_std)
    renamed = [{0: 11, 1: -7, 5: 0, -3: 2**50, 2**40: 3}[group] for group in group_ids]
    straight = advantages("grpo", returns, group_ids, chosen)
    assert close(advantages("grpo", returns, renamed, chosen), straight, norm_by_std, returns)


@given(some_episodes, st.booleans(), st.dictionaries(some_ids, st.integers(-1000, 1000)))
def test_a_constant_for_a_whole_group_changes_nothing(episodes, norm_by_std, shifts):
    sizes = defaultdict(int)
    for _, group in episodes:
        sizes[group] += 1
    returns, group_ids = map(list, zip(*episodes, strict=True))
    moved = [  # a single episode has no peers to be compared with, and does change
        value + shifts.get(group, 0) * (sizes[group] > 1) for value, group in episodes
    ]
    chosen = settings(norm_by_std=norm_by_std)
    straight = advantages("grpo", returns, group_ids, chosen)
    assert close(advantages("grpo", moved, group_ids, chosen), straight, norm_by_std, [*returns, *moved])


@given(some_episodes)
def test_one_group_does_not_feel_another(episodes):
    for chosen in {group for _, group in episodes}:
        returns, group_ids = map(list, zip(*episodes, strict=True))
        whole = advantages("grpo", returns, group_ids)
        alone = advantages(
            "grpo", [value for value, group in episodes if group == chosen], [0] * group_ids.count(chosen)
        )
        kept = [value for value, group in zip(whole, group_ids, strict=True) if group == chosen]
        assert close(alone, kept, True, returns)
