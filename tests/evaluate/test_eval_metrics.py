"""pass@k, intervals over levels, paired differences: against brute force and numbers worked by hand."""

from itertools import combinations, product
from math import isclose, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.evaluate.metrics import Outcome, difference, ks_of, measure, pass_at_k, ratio, wins_of
from ragen.statistics import mean, paired_difference, rate, wilson


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
    # Means of the levels are 1 and -1: s = sqrt(2), so 12.7062047362 * sqrt(2) / sqrt(2).
    assert isclose(found.mean_return.high, 12.7062047362) and isclose(found.mean_return.low, -12.7062047362)
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
    assert found.low == max(0.0, 0.75 - 12.7062047362 * sqrt(2 * 1.125 / 16))
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
    # Changes 0.5, 1, 0: mean 0.5, s 0.5, 4.3026527297 * 0.5 / sqrt(3) = 1.242.
    assert found.mean == 0.5 and found.high == 1.0
    assert found.low == pytest.approx(0.5 - 4.3026527297 * 0.5 / sqrt(3))
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
    wins = wins_of([outcome(1, True)] * 6 + [outcome(2, True)] * 6 + [outcome(3, True)])
    assert ks_of(wins) == [1, 2, 4, 6]


# --- what is missing ----------------------------------------------------------------------------------------------


def test_the_long_half_is_missing():
    """Six of twelve levels are won and the others did not finish: between all lost, 6 of 12, and all won.

    Wilson's lower end of 6 of 12 is 0.2538, worked by hand: (0.5 + 0.16006 - 1.96 sqrt(0.02083 + 0.00667)) / 1.32012.
    """
    asked = dict.fromkeys(range(12), 1)
    outcomes = [outcome(seed, True) for seed in range(6)]
    found = measure(outcomes, asked)
    assert found.success == (1.0, pytest.approx(0.25378, abs=1e-5), 1.0)
    assert found.pass_at == {1: found.success}
    for estimate in (found.mean_return, found.turns, found.tokens, found.invalid):
        assert estimate.low is None and estimate.high is None
    whole = [outcome(seed, seed < 6) for seed in range(12)]
    assert measure(whole, asked) == measure(whole)


def test_pass_at_k_of_levels_that_are_half_played():
    """Two levels of two samples. The first has lost one and misses the other, the second has won and lost.

    pass@2 is 1 on the second; the first has 0 or 1. With both lost one of two levels is won: Wilson of 1 of 2.
    """
    outcomes = [outcome(1, False), outcome(2, True), outcome(2, False)]
    found = measure(outcomes, {1: 2, 2: 2})
    assert found.pass_at[2] == (1.0, pytest.approx(wilson(1, 2).low), pytest.approx(1.0))
    assert found.success.value == 0.25
    # The level that has both samples has lost them. The other one holds a win: one of two is known to be passed.
    held = measure([outcome(1, True), outcome(2, False), outcome(2, False)], {1: 2, 2: 2})
    assert held.pass_at[2] == (0.5, *map(pytest.approx, wilson(1, 2)))
    assert set(measure(outcomes[:1], {1: 2, 2: 2}).pass_at) == {1}  # no level has two samples


def test_a_difference_with_something_missing():
    """Four levels, all lost before. After: two won and two missing, so that two to four are won."""
    asked = dict.fromkeys(range(4), 1)
    before, after = [outcome(seed, False) for seed in range(4)], [outcome(seed, True) for seed in (0, 1)]
    found = difference(before, after, asked)
    assert found.mean == 1.0 and found.num_levels == 2
    assert found.low == paired_difference([False] * 4, [True, True, False, False]).low
    assert found.high == paired_difference([False] * 4, [True] * 4).high
    assert difference(before, [], asked) is None and difference([], after, asked) is None
    assert difference(before[2:], after, asked) is None  # no level that both have
    assert difference(before, before, asked) == paired_difference([False] * 4, [False] * 4)
    # The one level that both have was lost in between; on the other three, won after and missing before, nothing can be
    # lost: at worst -1/4.
    lost = difference([outcome(0, True)], [outcome(seed, seed > 0) for seed in range(4)], asked)
    assert lost.mean == -0.25 and lost.high == paired_difference([True, *[False] * 3], [False, *[True] * 3]).high


def naive_wilson(wins, num):
    z, p = 1.959963984540054, wins / num
    centre, reach = p + z * z / (2 * num), z * sqrt(p * (1 - p) / num + z * z / (4 * num * num))
    return (centre - reach) / (1 + z * z / num), (centre + reach) / (1 + z * z / num)


def fillings(levels):
    """Every way in which the missing episodes, None, could have ended."""
    places = [(seed, number) for seed, level in levels.items() for number, end in enumerate(level) if end is None]
    for ends in product((False, True), repeat=len(places)):
        filled = {seed: list(level) for seed, level in levels.items()}
        for (seed, number), end in zip(places, ends, strict=True):
            filled[seed][number] = end
        yield filled


def outcomes_of(levels):
    return [outcome(seed, end) for seed, level in levels.items() for end in level if end is not None]


def some_levels(num_samples):
    level = st.lists(st.sampled_from([True, False, None]), min_size=num_samples, max_size=num_samples)
    return st.lists(level, min_size=2, max_size=3).map(lambda levels: dict(enumerate(levels)))


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=7))
def test_the_interval_holds_that_of_every_end_which_the_missing_ones_could_have_had(ends):
    levels = {seed: [end] for seed, end in enumerate(ends)}
    found = measure(outcomes_of(levels), dict.fromkeys(levels, 1))
    assert (found is None) == all(end is None for end in ends)
    if found is None:
        return
    for filled in fillings(levels):
        low, high = naive_wilson(sum(level[0] for level in filled.values()), len(filled))
        assert found.success.low <= low + 1e-9 and high - 1e-9 <= found.success.high


@settings(max_examples=40)
@given(some_levels(2), some_levels(2))
def test_no_end_of_the_missing_ones_is_outside(before, after):
    """Success, pass@k and difference, with several samples; the value that is told lies inside too."""
    asked = dict.fromkeys(before.keys() & after.keys(), 2)
    before, after = ({seed: levels[seed] for seed in asked} for levels in (before, after))
    found = measure(outcomes_of(after), asked)
    change = difference(outcomes_of(before), outcomes_of(after), asked)
    if found is None or change is None:
        return
    rates = {False: [], True: []}
    for is_after, levels in ((False, before), (True, after)):
        for filled in fillings(levels):
            rates[is_after].append(sum(sum(level) for level in filled.values()) / (2 * len(filled)))
            for k, estimate in found.pass_at.items() if is_after else ():
                value = sum(brute_force(level, k) for level in filled.values()) / len(filled)
                assert estimate.low - 1e-9 <= value <= estimate.high + 1e-9
    assert all(estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9 for estimate in found.pass_at.values())
    assert found.success == pytest.approx(found.pass_at[1])
    for new in (min(rates[True]), max(rates[True])):
        assert found.success.low - 1e-9 <= new <= found.success.high + 1e-9
        for old in (min(rates[False]), max(rates[False])):
            assert change.low - 1e-9 <= new - old <= change.high + 1e-9
    assert change.low - 1e-9 <= change.mean <= change.high + 1e-9
