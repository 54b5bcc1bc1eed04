"""Validation: the interval of its success is of levels, not of samples, and so is the size of its batches."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.config.compose import resolve
from ragen.distributed.workers import ALONE
from ragen.evaluate.run import MAX_ROWS, max_rows
from ragen.run.run_logger import NullLogger
from ragen.statistics import wilson
from ragen.train import validation
from ragen.train.validation import Validator, _interval


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


@given(st.integers(1, 9), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=20, deadline=None)
def test_val_batch_size_counts_levels_in_validation_and_in_evaluation(num_levels, num_samples, at_once):
    """Each with all its samples. Without it all are played together, or in an evaluation as many as are allowed."""
    words = [f"es_manager.val.env_groups={num_levels}", f"es_manager.val.group_size={num_samples}"]
    size = "null" if at_once is None else at_once
    config = resolve([*words, f"data.val_batch_size={size}"], environ={}).config
    batches = []

    def collect(engine, worlds, requests, *more):
        batches.append(sum(request.size for request in requests))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "collect", collect)
        asked = SimpleNamespace(config=config, requests=validation.requests(config), workers=ALONE, worlds={})
        Validator._play_once(asked, None, None, NullLogger(), 0, asked.requests, 0)
    left, expected = num_levels, []
    while left > 0:
        expected.append(min(left, at_once or left) * num_samples)
        left -= at_once or left
    assert batches == expected
    assert max_rows(config) == (MAX_ROWS if at_once is None else at_once * num_samples)
    assert at_once is None or max(batches) <= max_rows(config)
