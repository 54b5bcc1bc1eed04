"""Intervals and Student's t against numbers worked by hand, the defining equations, and exact coverage."""

from itertools import pairwise, product
from math import comb, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.statistics import (
    Interval,
    Rate,
    length_bin,
    mean_interval,
    paired_difference,
    student_t_975,
    success_by_length,
    wilson,
)

Z = 1.959963984540054


def test_wilson_by_hand():
    # 81 of 263 is the worked example of Newcombe (1998), method 3: 0.2553 to 0.3662.
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    # 5 of 10: the centre is 0.5, the half width Z / 2 / sqrt(10 + Z^2).
    low, high = wilson(5, 10)
    assert low == pytest.approx(0.5 - Z / 2 / sqrt(10 + Z * Z))
    assert high == pytest.approx(0.5 + Z / 2 / sqrt(10 + Z * Z))


def test_wilson_at_the_ends():
    assert wilson(0, 20) == (0.0, pytest.approx(Z * Z / (20 + Z * Z)))
    assert wilson(20, 20) == (pytest.approx(20 / (20 + Z * Z)), 1.0)
    assert wilson(0, 0) == (0.0, 1.0)
    for successes, trials in [(-1, 5), (6, 5)]:
        with pytest.raises(ValueError, match=f"{successes} successes of {trials}"):
            wilson(successes, trials)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_wilson_limits_are_the_rates_that_are_just_not_rejected(case):
    successes, trials = case
    for limit in wilson(successes, trials):
        if 0 < limit < 1:
            score = (successes / trials - limit) / sqrt(limit * (1 - limit) / trials)
            assert abs(score) == pytest.approx(Z, rel=1e-6)


def test_paired_difference_by_hand():
    # Of 98 levels 20 were won, 6 lost again: (20.5 - 6.5) / 100 +- Z sqrt(27 - 14^2 / 100) / 100.
    before = [False] * 20 + [True] * 6 + [True] * 40 + [False] * 32
    after = [True] * 20 + [False] * 6 + [True] * 40 + [False] * 32
    change = paired_difference(before, after)
    assert change.mean == pytest.approx(14 / 98)
    assert change.low == pytest.approx(0.14 - Z * sqrt(25.04) / 100)
    assert change.high == pytest.approx(0.14 + Z * sqrt(25.04) / 100)
    assert change.num_levels == 98
    assert not change.is_noise


def test_paired_difference_of_equal_outcomes_is_noise_and_not_certain():
    change = paired_difference([True, False] * 20, [True, False] * 20)
    assert change.mean == 0.0
    assert change.low < 0 < change.high
    assert change.is_noise


def test_paired_difference_needs_pairs():
    with pytest.raises(ValueError, match="2 levels before and 1 after"):
        paired_difference([True, False], [True])
    with pytest.raises(ValueError, match="no levels"):
        paired_difference([], [])


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_paired_difference_is_antisymmetric_and_contains_its_mean(pairs):
    before, after = [old for old, _ in pairs], [new for _, new in pairs]
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    assert there.low <= there.mean <= there.high
    assert there.mean == pytest.approx(sum(after) / len(after) - sum(before) / len(before))


@pytest.mark.parametrize(("won", "lost"), [(0.0, 0.0), (0.1, 0.1), (0.3, 0.1), (0.25, 0.0), (0.05, 0.4)])
def test_paired_difference_covers_the_truth(won, lost):
    """Exact, over all outcomes of 30 levels: about 95 of 100 intervals hold the true change."""
    num, covered = 30, 0.0
    for num_won, num_lost in product(range(num + 1), repeat=2):
        same = num - num_won - num_lost
        if same < 0:
            continue
        chance = comb(num, num_won) * comb(num - num_won, num_lost)
        chance *= won**num_won * lost**num_lost * (1 - won - lost) ** same
        change = paired_difference(
            [False] * num_won + [True] * num_lost + [True] * same, [True] * num_won + [False] * num_lost + [True] * same
        )
        covered += chance * (change.low <= won - lost <= change.high)
    assert covered > 0.93


def test_intervals_overlap():
    assert Interval(0.1, 0.3).overlaps(Interval(0.3, 0.5))
    assert not Interval(0.1, 0.3).overlaps(Interval(0.31, 0.5))
    assert 0.2 in Interval(0.1, 0.3)
    assert 0.4 not in Interval(0.1, 0.3)


def test_length_bins():
    assert [length_bin(length) for length in (0, 1, 2, 3, 4, 5, 6, 7, 40, None)] == [
        "1-2", "1-2", "1-2", "3-4", "3-4", "5-6", "5-6", "7+", "7+", "none",
    ]  # fmt: skip


def test_success_by_length():
    found = success_by_length([(9, False), (1, True), (2, False), (None, False), (8, True), (1, True)])
    assert found == {"1-2": Rate(2, 3), "7+": Rate(1, 2), "none": Rate(0, 1)}
    assert list(found) == ["1-2", "7+", "none"]
    assert found["1-2"].mean == pytest.approx(2 / 3)
    assert found["1-2"].interval == wilson(2, 3)
    assert success_by_length([]) == {}


# --- the mean of several runs ---

# R: qt(0.975, df)
KNOWN = {
    1: 12.706204736, 2: 4.302652730, 3: 3.182446305, 4: 2.776445105, 5: 2.570581836, 6: 2.446911851, 7: 2.364624252,
    8: 2.306004135, 9: 2.262157163, 10: 2.228138852, 15: 2.131449546, 20: 2.085963447, 30: 2.042272456,
    40: 2.021075390, 60: 2.000297822, 100: 1.983971519, 120: 1.979930405, 200: 1.971896224, 1000: 1.962339081,
}  # fmt: skip


@pytest.mark.parametrize(("degrees", "quantile"), KNOWN.items())
def test_students_quantile(degrees, quantile):
    assert student_t_975(degrees) == pytest.approx(quantile, abs=1e-9)


def test_it_falls_towards_the_normal_quantile():
    values = [student_t_975(degrees) for degrees in range(1, 300)]
    assert all(one > other > 1.95996 for one, other in pairwise(values))
    assert student_t_975(10**9) == pytest.approx(1.959963984540054)
    with pytest.raises(ValueError, match="0 degrees"):
        student_t_975(0)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_interval_of_a_mean_is_the_textbooks(values):
    low, high = mean_interval(values)
    spread = student_t_975(len(values) - 1) * stdev(values) / len(values) ** 0.5
    assert (low, high) == pytest.approx((fmean(values) - spread, fmean(values) + spread), abs=1e-12)


def test_a_single_value_has_no_interval():
    assert mean_interval([0.5]) is None
    assert mean_interval([0.1, 0.3, 0.2]) == pytest.approx((0.2 - 0.248414, 0.2 + 0.248414), abs=1e-6)
