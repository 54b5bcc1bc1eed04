"""Run health: every check on histories made by hand, against a naive second implementation, and as a whole."""

import math
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.diagnose.checks import CHECKS
from ragen.diagnose.health import Health
from ragen.diagnose.history import series_of

FIRST = "collapse_first_turn_sample/"
HEALTHY = {
    "train/CoordSokoban/success": 0.4,
    "train/response_length": 60.0,
    "train/num_turns": 4.0,
    "train/format_valid": 0.98,
    "train/cut_replies": 0.01,
    "train/reply_distinct": 0.6,
    "train/reply_repeats": 0.02,
    "rollout/in_group_reward_std": 2.0,
    "rollout/empty_after_filter": 0.0,
    "rollout/chosen_blown_up_ratio": 0.05,
    "rollout/sampler_learner_kl": 1e-9,
    "actor/entropy": 0.2,
    "actor/pg_clipfrac": 0.002,
    "actor/ppo_kl": 0.001,
    "actor/grad_norm": 1.0,
    "actor/nonfinite_samples": 0.0,
}
MEASURED = {
    f"{FIRST}mi_seq_estimate": 2.0,
    f"{FIRST}mi_seq_stderr": 0.05,
    f"{FIRST}mi_upper_bound": math.log(16),
    f"{FIRST}conditional_entropy_est": 0.4,
    "collapse/valid_thinking_rate": 1.0,
}
LOST = {f"{FIRST}mi_seq_estimate": 0.1}


def rows_of(*parts):
    """(number of steps, what differs from the healthy ones) one after the other, from step 1 on."""
    rows = []
    for num, changes in parts:
        rows += [{"step": len(rows) + 1 + index, **HEALTHY, **changes} for index in range(num)]
    return rows


def begun(rows, name):
    """First and last step of each time that a warning held."""
    return [(warning.first_step, warning.step) for warning in Health.of(rows).warnings if warning.name == name]


SUCCESS, SPREAD, ENTROPY = "train/CoordSokoban/success", "rollout/in_group_reward_std", "actor/entropy"
# What goes wrong after ten healthy steps, and the step at which the check sees it.
# A mean of five steps falls below a share s of the start when k of them are at zero and 1 - k/5 < s: the third of five
# for 0.5 and for 0.45 (2/5 are left), the third for 0.6 (2/5 < 0.6; with two 3/5 is not below).
CASES = {
    "success_falls": ({SUCCESS: 0.0}, 13),
    "rewards_alike": ({SPREAD: 0.0}, 13),
    "entropy_cliff": ({ENTROPY: 0.0}, 13),
    "replies_alike": ({"train/reply_distinct": 0.0}, 13),
    "entropy_explosion": ({ENTROPY: 0.45}, 12),  # (0.2 + 0.45) / 2 < 1.5 * 0.2 + 0.05 < 0.45
    "format_lost": ({"train/format_valid": 0.5}, 11),
    "replies_cut": ({"train/cut_replies": 0.9}, 11),
    "replies_repeat_themselves": ({"train/reply_repeats": 0.9}, 11),
    "replies_longer": ({"train/response_length": 160.0}, 12),  # 40 a turn: (15 + 40) / 2 < 30 < 40
    "replies_shorter": ({"train/response_length": 20.0}, 12),  # 5 a turn: (15 + 5) / 2 > 7.5 > 5
    "many_clipped": ({"actor/pg_clipfrac": 0.3}, 11),
    "policy_jumps": ({"actor/ppo_kl": 0.3}, 11),
    "sampler_differs": ({"rollout/sampler_learner_kl": 0.02}, 11),
    "noise_blown_up": ({"rollout/chosen_blown_up_ratio": 0.4}, 12),  # 0.05 + 0.35 k/3 > 0.2
    "gradient_spike": ({"actor/grad_norm": 15.5}, 11),
    "not_finite": ({"actor/pg_loss": math.nan}, 11),
    "empty_filter": ({"rollout/empty_after_filter": 1.0}, 12),  # two of five
    "thinking_lost": ({"collapse/valid_thinking_rate": 0.3}, 11),
    "template_collapse": (MEASURED | LOST, 11),
    "low_entropy_collapse": (MEASURED | LOST | {f"{FIRST}conditional_entropy_est": 0.05}, 11),
}


def test_there_is_a_case_for_every_check():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_each_check_warns_at_the_right_step_and_alone(name):
    changes, step = CASES[name]
    rows = rows_of((1, MEASURED), (9, {}), (8, changes))
    health = Health.of(rows)
    assert {warning.name for warning in health.warnings} == {name}
    (warning, *_) = health.warnings
    assert warning.first_step == step
    assert warning.title == CHECKS[name].title and warning.title in str(warning) and warning.advice


@pytest.mark.parametrize("name", CASES)
def test_a_warning_ends(name):
    changes, step = CASES[name]
    calm = {"collapse/valid_thinking_rate": 1.0} if name == "thinking_lost" else {}
    calm |= MEASURED if "collapse" in name else {}
    ((first, last),) = begun(rows_of((1, MEASURED), (9, {}), (8, changes), (30, calm)), name)
    assert first == step and last < 30


def test_the_numbers_of_a_warning_are_those_of_its_worst_step():
    rows = rows_of((10, {}), (5, {SPREAD: 0.5}), (5, {SPREAD: 1.0}))
    (warning,) = Health.of(rows).warnings
    assert (warning.name, warning.first_step, warning.step) == ("rewards_alike", 14, 20)
    assert (warning.value, warning.threshold) == (0.5, pytest.approx(0.9))
    assert str(warning) == (
        "rewards alike since step 14: the spread of rewards in a group fell to 0.5 (threshold 0.9, start 2)"
    )


def test_a_warning_holds_until_half_of_the_way_back():
    """Threshold 0.9 and start 2.0: it ends above 1.45."""
    assert begun(rows_of((10, {}), (10, {SPREAD: 0.5}), (20, {SPREAD: 1.44})), "rewards_alike") == [(14, 40)]
    ((_, last),) = begun(rows_of((10, {}), (10, {SPREAD: 0.5}), (20, {SPREAD: 1.46})), "rewards_alike")
    assert last == 24  # at 25 all five are 1.46


def test_one_that_returns_at_once_has_never_gone_and_a_later_one_is_new():
    jump = {"actor/ppo_kl": 0.5}
    assert begun(rows_of((3, {}), (1, jump), (4, {}), (1, jump)), "policy_jumps") == [(4, 9)]
    assert begun(rows_of((3, {}), (1, jump), (5, {}), (1, jump)), "policy_jumps") == [(4, 4), (10, 10)]


@pytest.mark.parametrize("name", ["rewards_alike", "entropy_cliff", "replies_alike", "replies_shorter"])
def test_learning_explains_less_spread_and_less_entropy(name):
    changes, _ = CASES[name]
    assert begun(rows_of((10, {}), (10, changes | {SUCCESS: 0.7})), name) == []
    assert begun(rows_of((10, {SUCCESS: 0.95}), (10, changes | {SUCCESS: 0.95})), name) == []
    assert begun(rows_of((10, {}), (10, changes | {SUCCESS: 0.45})), name)


def test_what_was_learned_and_lost_again_explains_nothing():
    rows = rows_of((5, {}), (10, {SUCCESS: 0.9}), (10, {SUCCESS: 0.55, SPREAD: 0.1}))
    assert begun(rows, "rewards_alike")  # 0.55 is above 0.4 + 0.1, but not near the best


def test_success_is_the_mean_over_environments():
    rows = rows_of((10, {"train/Bandit/success": 0.6}), (10, {"train/Bandit/success": 0.0}))
    points = series_of(rows, "success")
    assert [points[0], points[-1]] == [(1, 0.5), (20, 0.2)]
    assert begun(rows, "success_falls") == [(15, 20)]  # 0.26 at step 14 is not below 0.25


def test_information_that_was_never_there_cannot_be_lost():
    """Prompts that are all alike, as in a bandit, leave nothing to tell them apart by."""
    low = {f"{FIRST}conditional_entropy_est": 0.01}
    assert Health.of(rows_of((20, MEASURED | LOST), (5, MEASURED | LOST | low))).warnings == []


def test_information_within_its_noise_is_no_warning():
    noisy = MEASURED | {f"{FIRST}mi_seq_estimate": 0.4, f"{FIRST}mi_seq_stderr": 0.3}
    assert Health.of(rows_of((1, MEASURED), (5, noisy))).warnings == []
    assert begun(rows_of((1, MEASURED), (5, noisy | {f"{FIRST}mi_seq_stderr": 0.01})), "template_collapse")


def test_replies_that_were_alike_from_the_start_are_no_warning():
    few, fewer = {"train/reply_distinct": 0.2}, {"train/reply_distinct": 0.05}
    assert begun(rows_of((10, few), (10, fewer)), "replies_alike") == []
    assert begun(rows_of((10, {"train/reply_distinct": 0.3}), (10, fewer)), "replies_alike")


def test_a_zero_start_is_no_baseline():
    rows = rows_of((20, {SUCCESS: 0.0, SPREAD: 0.0, ENTROPY: 0.0, "actor/grad_norm": 0.0}))
    assert Health.of(rows).warnings == []


def test_an_update_that_was_left_out_is_told():
    (warning,) = Health.of(rows_of((3, {}), (1, {"actor/nonfinite_samples": 12.0}))).warnings
    assert "12 samples was skipped" in warning.text


# --- against a second implementation -----------------------------------------------------------------------------


def naive_first_step(values, share, num=5):
    """When the mean of the last five is below a share of the mean of the first five, for the first time."""
    for count in range(2 * num, len(values) + 1):
        if mean(values[count - num : count]) < share * mean(values[:num]):
            return count
    return None


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=40))
def test_the_spread_check_against_a_naive_one(values):
    rows = [{"step": step, **HEALTHY, SPREAD: value} for step, value in enumerate(values, start=1)]
    found = begun(rows, "rewards_alike")
    assert (found[0][0] if found else None) == naive_first_step(values, 0.45)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=25))
def test_the_format_check_against_a_naive_one(valid):
    rows = [{"step": step, **HEALTHY, "train/format_valid": value} for step, value in enumerate(valid, start=1)]
    failures = [1 - value for value in valid]
    expected = next((n for n in range(3, len(valid) + 1) if mean(failures[n - 2 : n]) > failures[0] + 0.2), None)
    found = begun(rows, "format_lost")
    assert (found[0][0] if found else None) == expected


@st.composite
def constant_rows(draw):
    """A run that stands still, at any level of everything that may be at any level."""
    share, positive = st.floats(0.0, 1.0), st.floats(0.0, 1e3)
    level = {
        SUCCESS: draw(share), SPREAD: draw(positive), ENTROPY: draw(positive), "actor/grad_norm": draw(positive),
        "train/format_valid": draw(share), "train/cut_replies": draw(share), "train/reply_distinct": draw(share),
        "train/reply_repeats": draw(share), "train/response_length": draw(positive), "train/num_turns": draw(positive),
        "actor/pg_clipfrac": draw(st.floats(0.0, 0.1)), "actor/ppo_kl": draw(st.floats(-1.0, 0.1)),
    }  # fmt: skip
    return rows_of((draw(st.integers(1, 30)), level | draw(st.sampled_from([{}, MEASURED]))))


@given(constant_rows())
def test_a_run_that_stands_still_has_no_warning(rows):
    health = Health.of(rows)
    assert health.warnings == [] and health.metrics() == {"health/num_warnings": 0.0}
    assert health.verdict().word == "healthy"


@given(st.integers(0, 40), st.sampled_from(sorted(CASES)))
def test_a_run_that_goes_on_tells_the_same(cut, name):
    """From stored rows up to any step, which hold the flags that were written with them."""
    rows = rows_of((1, MEASURED), (9, {}), (8, CASES[name][0]), (22, {}))
    whole, stored = Health(), []
    for row in rows:
        whole.add(row["step"], row)
        stored.append(row | whole.metrics())
    resumed = Health.of(stored[:cut])
    for row, expected in zip(rows[cut:], stored[cut:], strict=True):
        resumed.add(row["step"], row)
        assert expected == row | resumed.metrics()
    assert resumed.warnings == whole.warnings


# --- as a whole ---------------------------------------------------------------------------------------------------


def test_only_what_begins_is_told():
    health = Health()
    told = [
        [one.name for one in health.add(row["step"], row)] for row in rows_of((3, {}), (5, CASES["many_clipped"][0]))
    ]
    assert told == [[], [], [], ["many_clipped"], [], [], [], []]
    assert health.metrics() == {"health/num_warnings": 1.0, "health/many_clipped": 1.0}


def test_a_validation_before_training_is_no_step():
    health = Health()
    assert health.add(0, {"val-env/CoordSokoban/success": 0.4, "timing_s/testing": 1.0}) == []
    assert health.verdict().word == "unknown"


def test_verdicts():
    assert Health.of(rows_of((12, {}))).verdict().headline == "Healthy: none of 20 checks warned in 12 steps"
    passed = Health.of(rows_of((6, {}), (1, {"actor/grad_norm": 16.0}), (5, {}))).verdict()
    assert passed.word == "healthy" and not passed.holding
    assert passed.headline == "Healthy at the end; a warning before: a spike of the gradient (step 7)"
    rows = rows_of((1, MEASURED), (9, {}), (10, MEASURED | LOST | {"actor/pg_clipfrac": 0.5}))
    both = Health.of(rows).verdict()
    assert both.word == "template_collapse"
    assert [warning.name for warning in both.holding] == ["template_collapse", "many_clipped"]
    assert both.headline == "Template collapse since step 11: I(X;Z) fell to 0.1 (threshold 0.5, start 2)"
