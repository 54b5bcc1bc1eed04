"""GRPO and BRPO: numbers worked by hand, and plain loops with exact fractions as a second opinion."""

import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ragen.algo.advantage import ESTIMATORS, AdvantageSettings

BY_STD, BY_MEAN = AdvantageSettings(norm_by_std=True), AdvantageSettings(norm_by_std=False)


def advantages(name, returns, group_ids, settings=BY_STD, dtype=torch.float64):
    result = ESTIMATORS[name](torch.tensor(returns, dtype=dtype), torch.tensor(group_ids).long(), settings)
    assert result.dtype == dtype and result.shape == (len(returns),)
    return result.tolist()


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
        for settings in (BY_STD, BY_MEAN):  # the setting is about grpo
            assert advantages("brpo", [1.0, 2.0, 3.0, 6.0], group_ids, settings) == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize("name", ["grpo", "brpo"])
@pytest.mark.parametrize("value", [0.0, 0.1, 100.1, -10.9, 1e6 + 0.3])
@pytest.mark.parametrize("size", [2, 3, 16, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_returns_give_exactly_zero(name, value, size, dtype):
    # In float32 the plain formula gives 0.86 for sixteen times 100.1: rounding divided by rounding.
    assert advantages(name, [value] * size, [1] * size, dtype=dtype) == [0.0] * size


@pytest.mark.parametrize("name", ["grpo", "brpo"])
def test_no_episodes_no_advantages(name):
    assert advantages(name, [], []) == []


@pytest.mark.parametrize("name", ["grpo", "brpo"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_return_that_is_no_number_is_refused(name, bad):
    with pytest.raises(ValueError, match="finite"):
        advantages(name, [1.0, bad], [0, 0])


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
    settings = AdvantageSettings(norm_by_std)
    by_group, by_batch = naive(returns, group_ids, norm_by_std), naive(returns, [0] * len(returns), True)
    assert close(advantages("grpo", returns, group_ids, settings), by_group, norm_by_std, returns)
    assert close(advantages("brpo", returns, group_ids, settings), by_batch, True, returns)


@given(some_episodes, st.sampled_from(sorted(ESTIMATORS)), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(episodes, name, norm_by_std, random):
    order = list(range(len(episodes)))
    random.shuffle(order)
    settings = AdvantageSettings(norm_by_std)
    returns, group_ids = map(list, zip(*episodes, strict=True))
    straight = advantages(name, returns, group_ids, settings)
    shuffled = advantages(name, [returns[row] for row in order], [group_ids[row] for row in order], settings)
    assert close(shuffled, [straight[row] for row in order], norm_by_std, returns)


@given(some_episodes, st.booleans())
def test_the_names_of_groups_do_not_matter(episodes, norm_by_std):
    returns, group_ids = map(list, zip(*episodes, strict=True))
    settings = AdvantageSettings(norm_by_std)
    renamed = [{0: 11, 1: -7, 5: 0, -3: 2**50, 2**40: 3}[group] for group in group_ids]
    straight = advantages("grpo", returns, group_ids, settings)
    assert close(advantages("grpo", returns, renamed, settings), straight, norm_by_std, returns)


@given(some_episodes, st.booleans(), st.dictionaries(some_ids, st.integers(-1000, 1000)))
def test_a_constant_for_a_whole_group_changes_nothing(episodes, norm_by_std, shifts):
    sizes = defaultdict(int)
    for _, group in episodes:
        sizes[group] += 1
    returns, group_ids = map(list, zip(*episodes, strict=True))
    moved = [  # a single episode has no peers to be compared with, and does change
        value + shifts.get(group, 0) * (sizes[group] > 1) for value, group in episodes
    ]
    settings = AdvantageSettings(norm_by_std)
    straight = advantages("grpo", returns, group_ids, settings)
    assert close(advantages("grpo", moved, group_ids, settings), straight, norm_by_std, [*returns, *moved])


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
