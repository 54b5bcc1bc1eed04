"""Student's t and the interval of a mean. Success rates: tests/report/."""

from itertools import pairwise
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.statistics import mean_interval, student_t_975

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
