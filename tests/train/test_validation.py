"""The interval of a validation's success: of levels, not of samples."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.report.statistics import wilson
from ragen.train.validation import _interval


def episodes(*levels):
    """One list of successes for each level."""
    return [
        SimpleNamespace(seed=seed, final=SimpleNamespace(success=success))
        for seed, successes in enumerate(levels)
        for success in successes
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_one_sample_a_level_is_wilson_to_the_last_digit(successes):
    assert _interval(episodes(*([success] for success in successes))) == wilson(sum(successes), len(successes))


def test_samples_of_one_level_are_one_observation():
    """Ten levels, half of them always won: sixteen samples of each tell what one does."""
    many = episodes(*([seed < 5] * 16 for seed in range(10)))
    assert _interval(many) == pytest.approx(wilson(5, 10))
    assert _interval(episodes(*[[True] * 16] * 10)) == pytest.approx(wilson(10, 10))


def test_levels_that_agree_tell_more_than_levels_that_do_not():
    """Rates 0.25, 0.5, 0.5, 0.75: variance 1/24 over 4 levels, so that 0.25 / (1/96) = 24 trials spread as much."""
    mixed = episodes(*([number < won for number in range(4)] for won in (1, 2, 2, 3)))
    assert _interval(mixed) == pytest.approx(wilson(12, 24))
