"""The three rules, by hand and against a plain reading of the whole history."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.config.compose import resolve
from ragen.diagnose.early_stop import RULES, EarlyStop, StopRules

STD = "rollout/in_group_reward_std"
SUCCESS = "val-env/CoordSokoban/success"


def play(stop, *stds, kept=1):
    """The rules after each of several steps."""
    return [stop.after_rollout({STD: std}, kept) for std in stds]


# --- variance -----------------------------------------------------------------------------------------------------


def test_collapse_by_hand():
    stop = EarlyStop(StopRules())
    baseline = [1.0] * 5 + [3.0] * 5  # mean 2, so the threshold is 0.2
    assert play(stop, *baseline) == [None] * 10
    assert play(stop, *[0.19] * 9) == [None] * 9
    assert stop.metrics() == {"rollout/consecutive_empty_after_filter_steps": 0.0}
    assert stop.explain() == ""
    assert play(stop, 0.19) == ["reward_variance_collapse"]
    assert stop.metrics()["early_stopped/reward_variance_collapse"] == 1.0
    assert stop.explain() == (
        "rollout/in_group_reward_std was below 0.2 in 10 consecutive steps, 0.19 in the last; that is 10% "
        "of 2, its mean over the first 10 steps"
    )


def test_one_step_at_the_threshold_breaks_the_row():
    stop = EarlyStop(StopRules())
    play(stop, *[2.0] * 10)
    assert play(stop, *[0.1] * 9, 0.2, *[0.1] * 9) == [None] * 19
    assert play(stop, 0.1) == ["reward_variance_collapse"]


def test_a_low_baseline_does_not_count_as_its_own_collapse():
    stop = EarlyStop(StopRules())
    assert play(stop, *[1.0], *[0.0] * 18) == [None] * 19  # baseline 0.1, nine low steps after it
    assert play(stop, 0.0) == ["reward_variance_collapse"]


def test_without_variance_at_the_start_there_is_none_to_lose():
    stop = EarlyStop(StopRules())
    assert play(stop, *[0.0] * 100) == [None] * 100


@pytest.mark.parametrize("place", [3, 25])
def test_nan_stops_nothing(place):
    stop = EarlyStop(StopRules())
    stds = [1.0] * 10 + [0.0] * 9 + [1.0] + [0.0] * 19
    stds[place] = math.nan
    assert play(stop, *stds)[:30] == [None] * 30


def test_empty_steps_count_neither_for_the_baseline_nor_for_the_row():
    stop = EarlyStop(StopRules(empty_steps=0))
    play(stop, *[1.0] * 5)
    play(stop, *[0.0] * 7, kept=0)
    play(stop, *[1.0] * 5)
    play(stop, *[0.01] * 9)
    play(stop, 5.0, kept=0)  # does not break the row either
    assert play(stop, 0.01) == ["reward_variance_collapse"]


def test_the_metric_must_be_there():
    with pytest.raises(ValueError, match="rollout/in_group_reward_std"):
        EarlyStop(StopRules()).after_rollout({"rollout/in_group_std": 1.0}, 3)


# --- validation ---------------------------------------------------------------------------------------------------


def test_low_success_by_hand():
    stop = EarlyStop(StopRules())
    values = [0.0, 0.005, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0078125]
    rules = [stop.after_validation({SUCCESS: value}) for value in values]
    assert rules == [None] * 9 + ["low_validation_success"]  # 0.01 is not below it, and begins the count anew
    assert stop.explain() == (
        "val-env/CoordSokoban/success was below 1% in 5 consecutive validations, 0.78% in the last"
    )
    assert stop.metrics()["early_stopped/low_validation_success"] == 1.0


def test_each_tag_counts_for_itself_and_only_success_counts():
    stop = EarlyStop(StopRules())
    for number in range(9):
        other = {"val-env/A/greedy_success": 0.0, "val-env/A/success_low": 0.0, "val-env/A/success_len_3-4": 0.0}
        both = {"val-env/A/success": 0.5 * (number % 2), "val-env/B/success": 0.5 * (number % 2 == 0)}
        assert stop.after_validation(both | other | {"train/A/success": 0.0}) is None
    for number in range(5):
        rule = stop.after_validation({"val-env/A/success": 0.9, "val-env/B/success": 0.0})
        assert rule == ("low_validation_success" if number == 4 else None)
    assert "val-env/B/success" in stop.explain()


# --- empty steps --------------------------------------------------------------------------------------------------


def test_empty_steps_by_hand():
    stop = EarlyStop(StopRules(empty_steps=3))
    assert play(stop, 0.0, 0.0, kept=0) == [None, None]
    assert stop.metrics() == {"rollout/consecutive_empty_after_filter_steps": 2.0}
    play(stop, 1.0)
    assert stop.metrics() == {"rollout/consecutive_empty_after_filter_steps": 0.0}
    assert play(stop, 0.0, 0.0, 0.0, kept=0) == [None, None, "empty_filtered_steps"]
    assert stop.metrics() == {
        "rollout/consecutive_empty_after_filter_steps": 3.0,
        "early_stopped/empty_filtered_steps": 1.0,
    }
    assert stop.explain() == "the filter kept no group in 3 consecutive steps"


@pytest.mark.parametrize("never", [0, -1])
def test_the_rule_can_be_off(never):
    stop = EarlyStop(StopRules(empty_steps=never))
    assert play(stop, *[0.0] * 50, kept=0) == [None] * 50


def test_an_empty_step_may_still_validate_and_the_first_rule_is_told():
    stop = EarlyStop(StopRules(empty_steps=1, num_validations=1))
    assert stop.after_rollout({STD: 0.0}, 0) == "empty_filtered_steps"
    assert stop.after_validation({SUCCESS: 0.0}) == "low_validation_success"
    assert [name for name in stop.metrics() if name.startswith("early_stopped/")] == [
        "early_stopped/empty_filtered_steps"
    ]


def test_the_config_says_how_many_empty_steps():
    words = ["actor_rollout_ref.rollout.rollout_filter_empty_stop_steps=7"]
    assert StopRules.of(resolve(words, environ={}).config) == StopRules(7, 10, 10, 0.1, 5, 0.01)


# --- against the whole history ------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(st.just("kept"), st.sampled_from([0.0, 0.0, 0.03125, 0.0625, 1.0, 2.0, math.nan]))
    | st.tuples(st.just("empty"), st.just(0.0))
    | st.tuples(st.just("val"), st.sampled_from([0.0, 0.005, 0.01, 0.5])),
    max_size=80,
)
SMALL = StopRules(
    empty_steps=3, num_baseline=2, num_collapsed=3, collapsed_share=0.1, num_validations=2, least_success=0.01
)


def naive(events, rules):
    """The rule that holds at the last event, read off everything that has happened."""
    kind, _ = events[-1]
    if kind == "val":
        values = [value for kind, value in events if kind == "val"][-rules.num_validations :]
        low = [value < rules.least_success for value in values]
        return "low_validation_success" if len(low) == rules.num_validations and all(low) else None
    steps = [event for event in events if event[0] != "val"]
    if kind == "empty":
        tail = steps[-rules.empty_steps :]
        full = len(tail) == rules.empty_steps and all(kind == "empty" for kind, _ in tail)
        return "empty_filtered_steps" if full else None
    stds = [value for kind, value in steps if kind == "kept"]
    first, rest = stds[: rules.num_baseline], stds[rules.num_baseline :]
    tail = rest[-rules.num_collapsed :]
    limit = rules.collapsed_share * (sum(first) / len(first))
    full = len(tail) == rules.num_collapsed and all(value < limit for value in tail)
    return "reward_variance_collapse" if full else None


def feed(stop, event):
    kind, value = event
    if kind == "val":
        return stop.after_validation({SUCCESS: value})
    return stop.after_rollout({STD: value}, 2 if kind == "kept" else 0)


@given(EVENTS)
def test_every_event_is_judged_as_by_the_whole_history(events):
    stop = EarlyStop(SMALL)
    first = None
    for end in range(1, len(events) + 1):
        wanted = naive(events[:end], SMALL)
        assert feed(stop, events[end - 1]) == wanted
        first = first or wanted
        assert stop.rule == first and bool(stop.explain()) == (first is not None)
        assert first is None or first in RULES


@given(EVENTS, st.integers(0, 80))
def test_a_stored_state_goes_on_alike(events, cut):
    whole, before = EarlyStop(SMALL), EarlyStop(SMALL)
    for event in events[:cut]:
        feed(whole, event)
        feed(before, event)
    after = EarlyStop(SMALL)
    after.restore(json.loads(json.dumps(before.state())))
    assert [feed(after, event) for event in events[cut:]] == [feed(whole, event) for event in events[cut:]]


def test_a_stored_state_is_a_copy():
    stop = EarlyStop(StopRules())
    state = stop.state()
    play(stop, 1.0)
    stop.after_validation({SUCCESS: 0.0})
    assert state == {"num_empty": 0, "first_stds": [], "last_stds": [], "num_low": {}}


@pytest.mark.parametrize("state", [{}, {"num_empty": 0, "other": 1}])
def test_another_state_is_refused(state):
    with pytest.raises(ValueError, match="num_empty, first_stds, last_stds, num_low"):
        EarlyStop(StopRules()).restore(state)
