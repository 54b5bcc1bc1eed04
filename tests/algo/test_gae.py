"""GAE, its two-level form and REINFORCE++: numbers worked by hand, and plain loops as a second opinion."""

import math
from statistics import fmean, variance

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_experience import experience, settings

from ragen.algo.advantage import ESTIMATORS


def gae(lengths, rewards, values, **changes):
    estimate = ESTIMATORS["gae"](experience(lengths, rewards, values=values), settings(**changes))
    assert estimate.advantages_T.dtype == estimate.returns_T.dtype == torch.float64
    return estimate.advantages_T.tolist(), estimate.returns_T.tolist()


def whitened(values):
    mean, spread = (fmean(values), variance(values)) if len(values) > 1 else (0.0, 1.0)
    return [(value - mean) / math.sqrt(spread + 1e-8) for value in values]


# By hand ------------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # Two episodes; the first has turns of 2 and 1 tokens. From the back, with gamma = lam = 1/2:
    #   token 2: 4 - 3 = 1               token 1: 0 + 3/2 - 1 = 1/2, + 1/4 * 1 = 3/4
    #   token 0: 1 + 1/2 - 2 = -1/2, + 1/4 * 3/4 = -5/16           the other episode: -1 - 1 = -2
    advantages, returns = gae([[2, 1], [1]], [1.0, 0.0, 4.0, -1.0], [2.0, 1.0, 3.0, 1.0], gamma=0.5, lam=0.5)
    assert returns == [2 - 5 / 16, 1.75, 4.0, -1.0]
    # Mean -9/64; the squares of -11, 57, 73, -119 (in 64ths) sum to 22860, over 3.
    std = math.sqrt(22860 / 64**2 / 3 + 1e-8)
    assert advantages == pytest.approx([number / 64 / std for number in (-11, 57, 73, -119)], rel=1e-12)


def test_with_all_discounts_1_the_return_is_what_is_to_come():
    _, returns = gae([[2, 1], [1]], [1.0, 0.0, 4.0, -1.0], [2.0, 1.0, 3.0, 1.0])
    assert returns == [5.0, 4.0, 4.0, -1.0]


def test_bi_level_gae_by_hand():
    # One episode with turns of 2, 1 and 2 tokens; gamma = lam = 1/2, between turns 0.8. The first turn earned nothing.
    # Turns earned 0, 2, 4; the values at their ends are 2, 3, 2. From the back:
    #   turn 2: 4 - 2 = 2, return 4      turn 1: 2 + 0.8 * 2 - 3 = 0.6, + 0.4 * 2 = 1.4, return 4.4
    #   turn 0: 0 + 0.8 * 3 - 2 = 0.4, + 0.4 * 1.4 = 0.96, return 2.96
    # Tokens, with these returns at the ends of turns:
    #   turn 2: 4 - 2 = 2; 0 + 2/2 - 1 = 0, + 2/4 = 0.5            turn 1: 4.4 - 3 = 1.4
    #   turn 0: 2.96 - 2 = 0.96; 0 + 2/2 - 1 = 0, + 0.96/4 = 0.24
    advantages, returns = gae(
        [[2, 1, 2]], [0.0, 0.0, 2.0, 0.0, 4.0], [1.0, 2.0, 3.0, 1.0, 2.0],
        gamma=0.5, lam=0.5, bi_level=True, high_level_gamma=0.8,
    )  # fmt: skip
    assert returns == pytest.approx([1.24, 2.96, 4.4, 1.5, 4.0], rel=1e-12)
    # 0.24 + 0.96 + 1.4 + 0.5 + 2 = 5.1, mean 1.02; squares 0.6084 + 0.0036 + 0.1444 + 0.2704 + 0.9604 = 1.9872 over 4.
    std = math.sqrt(0.4968 + 1e-8)
    assert advantages == pytest.approx([number / std for number in (-0.78, -0.06, 0.38, -0.52, 0.98)], rel=1e-12)


def test_bi_level_gae_counts_what_each_token_earned_once():
    # A turn of two tokens that earn -1 and 3, then one of one token that earns 5. Without discounts and values each
    # token's return is what is still to come.
    _, returns = gae([[2, 1]], [-1.0, 3.0, 5.0], [0.0] * 3, bi_level=True, high_level_gamma=1.0)
    assert returns == [7.0, 8.0, 5.0]
    # Between turns 1/2: the first turn ends with 3 + 5/2.
    _, returns = gae([[2, 1]], [-1.0, 3.0, 5.0], [0.0] * 3, bi_level=True, high_level_gamma=0.5)
    assert returns == [4.5, 5.5, 5.0]


def test_reinforce_plus_plus_by_hand():
    # To come, with gamma 1/2: 1, 2, 4 and 2. Mean 9/4; squares 25 + 1 + 49 + 1 sixteenths = 4.75, over 3.
    made = experience([[2, 1], [1]], [0.0, 0.0, 4.0, 2.0])
    estimate = ESTIMATORS["reinforce_plus_plus"](made, settings(gamma=0.5))
    std = math.sqrt(4.75 / 3 + 1e-8)
    assert estimate.returns_T is None
    assert estimate.advantages_T.tolist() == pytest.approx([number / 4 / std for number in (-5, -1, 7, -1)], rel=1e-12)


def test_one_token_is_measured_against_0_and_1():
    advantages, returns = gae([[1]], [3.0], [1.0])
    assert advantages == pytest.approx([2.0]) and returns == [3.0]


def test_equal_advantages_whiten_to_exactly_zero():
    made = experience([[1]] * 7, [100.1] * 7, values=[0.0] * 7, dtype=torch.float32)
    for name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        advantages_T = ESTIMATORS[name](made, settings()).advantages_T
        assert advantages_T.dtype == torch.float32 and advantages_T.tolist() == [0.0] * 7


def test_no_tokens_no_advantages():
    assert gae([], [], []) == gae([], [], [], bi_level=True) == ([], [])


def test_gae_needs_values():
    with pytest.raises(ValueError, match="values_T"):
        ESTIMATORS["gae"](experience([[1]], [1.0]), settings())


# A second opinion ---------------------------------------------------------------------------------------------------


def naive_level(rewards, values, gamma, lam):
    """One stretch, from the back."""
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.insert(0, following)
        next_value = value
    return advantages


def naive_gae(lengths, rewards, values, gamma, lam):
    advantages, start = [], 0
    for turns in lengths:
        stop = start + sum(turns)
        advantages += naive_level(rewards[start:stop], values[start:stop], gamma, lam)
        start = stop
    return advantages


def naive_bi_level(lengths, rewards, values, gamma, lam, between_turns):
    advantages, start = [], 0
    for turns in lengths:
        spans = [(start + sum(turns[:turn]), start + sum(turns[: turn + 1])) for turn in range(len(turns))]
        earned = [sum(rewards[first:last]) for first, last in spans]
        expected = [values[last - 1] for _, last in spans]
        above = naive_level(earned, expected, between_turns, lam)
        for (first, last), surplus, value in zip(spans, above, expected, strict=True):
            own = rewards[first : last - 1]
            advantages += naive_level([*own, surplus + value - sum(own)], values[first:last], gamma, lam)
        start += sum(turns)
    return advantages


some_lengths = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),  # tokens of each turn
    min_size=1,
    max_size=5,
)
some_number = st.one_of(st.sampled_from([0.0, 0.0, 1.0, -1.0]), st.floats(-10, 10))
some_factor = st.one_of(st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.floats(0, 1))


@st.composite
def some_experience(draw):
    lengths = draw(some_lengths)
    total = sum(map(sum, lengths))
    rewards, values = (draw(st.lists(some_number, min_size=total, max_size=total)) for _ in range(2))
    return lengths, rewards, values


def close(left, right):
    return left == pytest.approx(right, rel=1e-7, abs=1e-7)


@given(some_experience(), some_factor, some_factor)
@example(([[1]], [2.0], [1.0]), 1.0, 1.0)
def test_gae_against_plain_loops(made, gamma, lam):
    lengths, rewards, values = made
    advantages, returns = gae(lengths, rewards, values, gamma=gamma, lam=lam)
    expected = naive_gae(lengths, rewards, values, gamma, lam)
    assert close(returns, [advantage + value for advantage, value in zip(expected, values, strict=True)])
    assert close(advantages, whitened(expected))


@given(some_experience(), some_factor, some_factor, some_factor)
def test_bi_level_gae_against_plain_loops(made, gamma, lam, between_turns):
    lengths, rewards, values = made
    advantages, returns = gae(
        lengths, rewards, values, gamma=gamma, lam=lam, bi_level=True, high_level_gamma=between_turns
    )
    expected = naive_bi_level(lengths, rewards, values, gamma, lam, between_turns)
    assert close(returns, [advantage + value for advantage, value in zip(expected, values, strict=True)])
    assert close(advantages, whitened(expected))


@given(some_experience(), some_factor)
def test_reinforce_plus_plus_against_plain_loops(made, gamma):
    lengths, rewards, _ = made
    estimate = ESTIMATORS["reinforce_plus_plus"](experience(lengths, rewards), settings(gamma=gamma))
    expected = naive_gae(lengths, rewards, [0.0] * len(rewards), gamma, 1.0)
    assert close(estimate.advantages_T.tolist(), whitened(expected))


@given(some_experience(), some_factor, some_factor, some_factor)
def test_with_one_turn_the_levels_are_one(made, gamma, lam, between_turns):
    lengths, rewards, values = made
    single = [[sum(turns)] for turns in lengths]
    plain = gae(single, rewards, values, gamma=gamma, lam=lam)
    both = gae(single, rewards, values, gamma=gamma, lam=lam, bi_level=True, high_level_gamma=between_turns)
    assert close(both[0], plain[0]) and close(both[1], plain[1])


@given(some_experience())
def test_without_discounts_both_forms_agree(made):
    plain, both = gae(*made), gae(*made, bi_level=True, high_level_gamma=1.0)
    assert close(both[0], plain[0]) and close(both[1], plain[1])


@given(some_experience(), some_factor, some_factor, st.booleans())
def test_one_episode_does_not_feel_another(made, gamma, lam, bi_level):
    lengths, rewards, values = made
    _, returns = gae(lengths, rewards, values, gamma=gamma, lam=lam, bi_level=bi_level)
    start = 0
    for turns in lengths:
        part = slice(start, start + sum(turns))
        _, alone = gae([turns], rewards[part], values[part], gamma=gamma, lam=lam, bi_level=bi_level)
        assert close(returns[part], alone)
        start += sum(turns)


@pytest.mark.parametrize("bi_level", [False, True])
def test_long_episodes(bi_level):
    generator = torch.Generator().manual_seed(0)
    lengths = [[700, 1, 1300], [3], [1, 2500]]
    total = sum(map(sum, lengths))
    rewards, values = (torch.randn(total, generator=generator, dtype=torch.float64).tolist() for _ in range(2))
    _, returns = gae(lengths, rewards, values, gamma=0.999, lam=0.99, bi_level=bi_level, high_level_gamma=0.9)
    if bi_level:
        expected = naive_bi_level(lengths, rewards, values, 0.999, 0.99, 0.9)
    else:
        expected = naive_gae(lengths, rewards, values, 0.999, 0.99)
    assert close(returns, [advantage + value for advantage, value in zip(expected, values, strict=True)])
