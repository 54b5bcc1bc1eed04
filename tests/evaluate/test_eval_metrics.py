"""pass@k, intervals over levels, paired differences: against brute force and numbers worked by hand."""

from itertools import combinations
from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.evaluate.metrics import Outcome, by_level, difference, ks_of, mean, measure, pass_at_k, rate, ratio
from ragen.report.statistics import paired_difference, wilson


def outcome(seed, success, score=1.0, turns=2, invalid=0, tokens=10):
    return Outcome(seed, success, score, turns, invalid, tokens)


def brute_force(successes, k):
    """The share of all choices of k samples in which one succeeds."""
    choices = list(combinations(successes, k))
    return sum(any(chosen) for chosen in choices) / len(choices)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(successes, data):
    k = data.draw(st.integers(1, len(successes)))
    assert isclose(pass_at_k(len(successes), sum(successes), k), brute_force(successes, k), abs_tol=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # of 6 pairs, 3 hold the one success
    assert pass_at_k(16, 0, 16) == 0.0
    assert pass_at_k(16, 1, 16) == 1.0
    assert pass_at_k(5, 4, 2) == 1.0  # no two failures among five with four successes
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_numbers_of_two_levels():
    outcomes = [
        outcome(1, True, 2.0, turns=1, tokens=4),
        outcome(1, False, 0.0, turns=3, invalid=1, tokens=8),
        outcome(2, False, -1.0, turns=2, invalid=2, tokens=6),
        outcome(2, False, -1.0, turns=4, tokens=6),
    ]
    found = measure(outcomes)
    assert (found.num_levels, found.num_episodes) == (2, 4)
    assert found.success.value == 0.25
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert found.mean_return.value == 0.0
    # Means of the levels are 1 and -1: s = sqrt(2), so 12.706 * sqrt(2) / sqrt(2).
    assert isclose(found.mean_return.high, 12.706) and isclose(found.mean_return.low, -12.706)
    assert found.turns.value == 2.5
    assert found.tokens.value == 6.0
    assert found.invalid.value == 0.3


def test_without_counts_of_tokens_there_is_no_number():
    assert measure([outcome(1, True, tokens=None), outcome(2, True)]).tokens is None
    assert measure([]) is None


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_one_sample_a_level_is_wilson(successes):
    found = rate([float(success) for success in successes])
    assert (found.low, found.high) == pytest.approx(wilson(sum(successes), len(successes)))


def test_more_samples_tell_more_only_where_levels_agree():
    """Ten levels won in every second sample are 20 % to 80 % no more; levels always won or lost are ten trials."""
    divided = rate([1.0] * 5 + [0.0] * 5)
    agreeing = rate([0.4, 0.6] * 5)
    assert divided.high - divided.low == pytest.approx(wilson(5, 10).high - wilson(5, 10).low)
    # Variance 0.0111…, of the mean 0.00111…: 0.25 / 0.00111… is 225 trials.
    assert (agreeing.low, agreeing.high) == pytest.approx(wilson(112.5, 225))


def test_a_ratio_counts_levels_by_their_size():
    found = ratio([0, 3], [1, 3])
    assert found.value == 0.75
    # Rests -0.75 and 0.75: variance 1.125, times 2, over 16.
    assert found.low == max(0.0, 0.75 - 12.706 * sqrt(2 * 1.125 / 16))
    assert ratio([0, 0], [2, 2]).low == 0.0 < ratio([0, 0], [2, 2]).high
    assert mean([3.0]).low is None


def test_differences_are_paired_on_the_levels_that_both_played():
    before = [outcome(seed, seed % 2 == 0) for seed in range(6)]
    after = [outcome(seed, True) for seed in range(2, 8)]
    found = difference(before, after)
    assert found.num_levels == 4
    assert found == paired_difference([True, False, True, False], [True] * 4)
    assert difference(before[:1], after) is None


def test_differences_with_several_samples():
    before = [outcome(seed, False) for seed in (1, 1, 2, 2, 3, 3)]
    after = [
        outcome(1, True),
        outcome(1, False),
        outcome(2, True),
        outcome(2, True),
        outcome(3, False),
        outcome(3, False),
    ]
    found = difference(before, after)
    # Changes 0.5, 1, 0: mean 0.5, s 0.5, 4.303 * 0.5 / sqrt(3) = 1.242.
    assert found.mean == 0.5 and found.high == 1.0
    assert found.low == pytest.approx(0.5 - 4.303 * 0.5 / sqrt(3))
    assert found.is_noise


def test_equal_changes_are_neither_certainty_nor_ignorance():
    """A level is one observation, as with one sample: that every one of 30 was won is no noise."""
    lost, won = ([outcome(seed, success) for seed in range(30) for _ in range(4)] for success in (False, True))
    same = difference(lost, lost)
    assert same[:3] == pytest.approx((0.0, -1.96 / 32, 1.96 / 32), abs=1e-4) and same.is_noise
    single = paired_difference([False] * 30, [True] * 30)
    assert difference(lost, won) == pytest.approx(single) and not difference(lost, won).is_noise
    assert difference(won, lost)[:3] == pytest.approx((-1.0, -single.high, -single.low))
    # 15 levels' worth is won: (15.5 - 0.5) / 32 = 0.46875, and 1.96 sqrt(16 - 15² / 32) / 32 = 0.18343 about it.
    half = [outcome(seed, number < 2) for seed in range(30) for number in range(4)]
    assert difference(lost, half)[:3] == pytest.approx((0.5, 0.28532, 0.65218), abs=1e-4)


def test_changes_that_differ_by_rounding_alone_are_equal():
    before = [outcome(1, number < 1) for number in range(3)] + [outcome(2, number < 2) for number in range(3)]
    after = [outcome(1, number < 2) for number in range(3)] + [outcome(2, True) for _ in range(3)]
    found = difference(before, after)  # 2/3 - 1/3 and 1 - 2/3
    assert found.mean == pytest.approx(1 / 3) and found.high - found.low > 0.5


def test_one_level_says_nothing_of_others():
    before = [outcome(1, False), outcome(1, True)]
    assert difference(before, before)[:3] == (0.0, -1.0, 1.0)


def test_which_k_are_told():
    levels = by_level([outcome(1, True)] * 6 + [outcome(2, True)] * 6 + [outcome(3, True)])
    assert ks_of(levels) == [1, 2, 4, 6]
