"""Run health: every check on histories made by hand, against a naive second implementation, and as a whole."""

import math
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.diagnose.checks import CHECKS
from ragen.diagnose.health import Health
from ragen.diagnose.history import series_of
from ragen.diagnose.success import success_change
from ragen.statistics import Difference

FIRST = "collapse_first_turn_sample/"
HEALTHY = {
    "train/CoordSokoban/success": 0.4,
    "train/CoordSokoban/action_is_valid": 0.98,
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


def verdict_of(rows, **options):
    return Health.of(rows).verdict(success_change(rows), **options)


SUCCESS, SPREAD, ENTROPY = "train/CoordSokoban/success", "rollout/in_group_reward_std", "actor/entropy"
VALID, EMPTY = "train/CoordSokoban/action_is_valid", "rollout/empty_after_filter"
# What goes wrong after ten healthy steps, and the step at which the check sees it.
# A mean of five steps falls below a share s of the start when k of them are at zero and 1 - k/5 < s: the third of five
# for 0.5 and for 0.45 (2/5 are left), the third for 0.6 (2/5 < 0.6; with two 3/5 is not below).
CASES = {
    "no_valid_reply": ({VALID: 0.0}, 15),  # five of five
    "success_falls": ({SUCCESS: 0.0}, 13),
    "rewards_alike": ({SPREAD: 0.0}, 13),
    "entropy_cliff": ({ENTROPY: 0.0}, 14),  # 1/5 < 0.25
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


def decline(num_steps, first, last, end):
    """Entropy that falls by the same factor in each step from `first` to `last`, and stays."""
    share = [min(max(step - first, 0) / (last - first), 1.0) for step in range(1, num_steps + 1)]
    return [{"step": step, **HEALTHY, ENTROPY: 0.2 * end**part} for step, part in enumerate(share, start=1)]


def test_a_slow_decline_of_entropy_is_not_a_cliff():
    """To 30 % in a hundred steps, as in steady runs of SmolLM2 (docs/results.md)."""
    assert begun(decline(100, 1, 100, end=0.3), "entropy_cliff") == []


@pytest.mark.parametrize(("last", "end", "step"), [(25, 0.1, 22), (25, 0.02, 18), (60, 0.1, 43)])
def test_a_collapse_of_entropy_is(last, end, step):
    ((first, held),) = begun(decline(100, 10, last, end), "entropy_cliff")
    assert (first, held) == (step, 100)


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
    assert verdict_of(rows).word in ("healthy", "no_gain", "no_success", "too_early")


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
    assert health.verdict(success_change([])).word == "unknown"


def test_verdicts():
    rose = {SUCCESS: 0.6}
    assert verdict_of(rows_of((6, {}), (6, rose))).headline == (
        "Healthy: training success rose (40.0 % at step 5, 60.0 % at step 12, best 60.0 % at step 11); "
        "none of 21 checks warned in 12 steps"
    )
    passed = verdict_of(rows_of((6, {}), (1, {"actor/grad_norm": 16.0}), (5, rose)))
    assert passed.word == "healthy" and not passed.holding
    assert passed.headline == (
        "Healthy: training success rose (40.0 % at step 5, 60.0 % at step 12, best 60.0 % at step 12); "
        "no check warns now, a warning before: a spike of the gradient (step 7)"
    )
    rows = rows_of((1, MEASURED), (9, {}), (10, MEASURED | LOST | {"actor/pg_clipfrac": 0.5}))
    both = verdict_of(rows)
    assert both.word == "template_collapse"
    assert [warning.name for warning in both.holding] == ["template_collapse", "many_clipped"]
    assert both.headline == "Template collapse since step 11: I(X;Z) fell to 0.1 (threshold 0.5, start 2)"


# --- runs that must not be called healthy -------------------------------------------------------------------------


def validated(step, success, low=None, high=None, tag="CoordSokoban"):
    ends = {} if low is None else {f"val-env/{tag}/success_low": low, f"val-env/{tag}/success_high": high}
    return {"step": step, f"val-env/{tag}/success": success, **ends}


def test_a_run_without_a_valid_reply_says_so_first():
    """Also where a wrong format costs nothing, so that `format_valid` is 1 all the time."""
    rows = rows_of((20, {VALID: 0.0, SUCCESS: 0.0, "train/format_valid": 1.0}))
    found = verdict_of(rows)
    assert found.word == "no_valid_reply" and found.is_alarming
    assert found.headline == "No valid reply since step 1: no reply was ever valid in 20 steps, so no action counted"


def test_one_valid_reply_is_enough():
    rows = rows_of((4, {VALID: 0.0}), (1, {VALID: 0.01}), (4, {VALID: 0.0}))
    assert begun(rows, "no_valid_reply") == [(1, 4)]


def test_replies_that_are_no_longer_valid():
    found = verdict_of(rows_of((10, {}), (10, {VALID: 0.0})))
    assert "not one reply of the last steps was valid" in found.headline


@pytest.mark.parametrize("num_steps", [1, 3, 12])
def test_every_group_filtered_out_is_not_healthy(num_steps):
    found = verdict_of(rows_of((num_steps, {EMPTY: 1.0})))
    assert found.word == "empty_filter"
    assert f"dropped every group in all of {num_steps} step" in found.headline


@pytest.mark.parametrize(
    ("rows", "word", "start"),
    [
        (rows_of((20, {SUCCESS: 0.0})), "no_success", "No success: not one episode succeeded in 20 steps"),
        ([validated(0, 0.0), *rows_of((3, {SUCCESS: 0.0}))], "no_success", "No success: not one episode succeeded in"),
        (rows_of((20, {})), "no_gain", "No gain: training success did not change by more than noise (40.0 % at step 5"),
        (rows_of((10, {SUCCESS: 0.6}), (10, {})), "success_fell", "Training success fell (60.0 % at step 5, 40.0 % at"),
        (rows_of((4, {})), "too_early", "Too early to say whether it learns (training success 40.0 % at step 1)"),
        ([validated(0, 0.4), *rows_of((4, {}))], "too_early", "Too early to say whether it learns (validation success"),
        (
            [validated(0, 0.4, 0.35, 0.45), *rows_of((20, {})), validated(20, 0.5, 0.45, 0.55)],
            "healthy",
            "Healthy: validation success rose (40.0 % at step 0, 50.0 % at step 20, best 50.0 % at step 20); none of",
        ),
        (
            [validated(0, 0.4, 0.35, 0.45), *rows_of((20, {})), validated(20, 0.43, 0.38, 0.48)],
            "no_gain",
            "No gain: validation success did not change by more than noise (40.0 % at step 0, 43.0 % at step 20, best",
        ),
        (
            [validated(0, 0.4), validated(9, 0.6, 0.55, 0.65), *rows_of((9, {})), validated(20, 0.48, 0.4, 0.5)],
            "success_fell",
            "Validation success fell (40.0 % at step 0, 48.0 % at step 20, best 60.0 % at step 9)",
        ),
        (
            [validated(0, 0.95, 0.9, 0.98), *rows_of((20, {})), validated(20, 0.94, 0.9, 0.97)],
            "healthy",
            "Healthy: validation success was high from the start (95.0 % at step 0",
        ),
        (
            [
                validated(0, 0.27, 0.22, 0.32) | {"val-env/CoordSokoban/optimal": 0.28},
                *rows_of((20, {})),
                validated(20, 0.27, 0.22, 0.32) | {"val-env/CoordSokoban/optimal": 0.28},
            ],
            "healthy",
            "Healthy: validation success was high from the start",
        ),
    ],
)  # fmt: skip
def test_quiet_runs_by_what_became_of_success(rows, word, start):
    found = verdict_of(rows)
    assert (found.word, found.headline[: len(start)]) == (word, start)
    assert found.is_alarming == (word in ("no_success", "success_fell"))


def test_a_run_that_a_rule_stopped_is_not_healthy():
    found = verdict_of(rows_of((6, {}), (6, {SUCCESS: 0.6})), stopped_by="low_validation_success")
    assert found.word == "stopped_early" and found.is_alarming
    assert found.headline.startswith("Stopped early by the rule low_validation_success: training success 40.0 %")


def test_level_by_level_a_smaller_gain_counts():
    rows = [validated(0, 0.4, 0.35, 0.45), *rows_of((20, {})), validated(20, 0.45, 0.4, 0.5)]
    assert success_change(rows).outcome == "flat"
    assert success_change(rows, Difference(0.05, 0.01, 0.09, 512)).outcome == "rose"
    assert success_change(rows, Difference(-0.05, -0.09, -0.01, 512)).outcome == "fell"
    assert success_change(rows, Difference(0.05, -0.01, 0.11, 512)).outcome == "flat"


def test_success_of_several_environments_is_their_mean():
    rows = [validated(0, 0.4) | validated(0, 0.6, tag="Bandit"), validated(9, 0.8) | validated(9, 0.6, tag="Bandit")]
    change = success_change(rows)
    assert (change.outcome, change.start.value, change.end.value) == ("rose", 0.5, pytest.approx(0.7))


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=4), st.lists(st.floats(), max_size=12))
def test_any_numbers_give_a_verdict(validations, training):
    rows = [validated(step, *values) for step, values in enumerate(validations)]
    rows += [{"step": step, SUCCESS: value} for step, value in enumerate(training, start=1)]
    assert success_change(rows).outcome in ("rose", "fell", "flat", "solved", "none", "early", "unknown")
