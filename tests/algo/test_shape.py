"""What is done to advantages after they were estimated."""

import math
from itertools import product
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_experience import experience, settings

from ragen.algo.advantage import ESTIMATORS, AdvantageEstimate, ShapeSettings, shape_advantages


def shape(estimator="grpo", soft_reweight=False, loss_scaling="none", length_weight=False, zero_task=False):
    return ShapeSettings(estimator, soft_reweight, loss_scaling, length_weight, zero_task)


# Groups 5 and 2 with returns 0, 2 and 0, 4: std sqrt(2) and 2 sqrt(2). Lengths 1, 2, 3, 2, mean 2.
MADE = experience([[1], [2], [1, 2], [2]], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0], [5, 5, 2, 2])
CENTRED = ESTIMATORS["grpo"](MADE, settings(norm_by_std=False))  # -1, 1, -2, 2


def shaped(chosen, kept_ratio=1.0):
    advantages_T, metrics = shape_advantages(CENTRED, MADE, chosen, kept_ratio)
    parts = [set(part.tolist()) for part in advantages_T.split([1, 2, 3, 2])]
    assert all(len(part) == 1 for part in parts)
    return [part.pop() for part in parts], metrics


def test_nothing_asked_nothing_changed():
    assert shaped(shape()) == ([-1.0, 1.0, -2.0, 2.0], {})


def test_soft_reweight_by_hand():
    advantages, metrics = shaped(shape(soft_reweight=True))
    half, one = math.sqrt(2) / (2 * math.sqrt(2) + 1e-6), 2 * math.sqrt(2) / (2 * math.sqrt(2) + 1e-6)
    assert advantages == pytest.approx([-half, half, -2 * one, 2 * one], rel=1e-12)
    assert metrics == pytest.approx(
        {
            "train/soft_reweight_min": half,
            "train/soft_reweight_max": one,
            "train/soft_reweight_mean": (half + one) / 2,
        }
    )


def test_soft_reweight_of_groups_of_one_and_of_groups_without_spread():
    alone = experience([[1], [1]], [3.0, -1.0], [1, 2])
    estimate = ESTIMATORS["grpo"](alone, settings(norm_by_std=False))
    advantages_T, metrics = shape_advantages(estimate, alone, shape(soft_reweight=True), 1.0)
    assert advantages_T.tolist() == pytest.approx([3.0, -1.0], rel=1e-5)
    assert metrics["train/soft_reweight_min"] == pytest.approx(1.0, rel=1e-5)
    flat = experience([[1], [1]], [3.0, 3.0], [1, 1])
    advantages_T, metrics = shape_advantages(ESTIMATORS["grpo"](flat, settings()), flat, shape(soft_reweight=True), 1.0)
    assert advantages_T.tolist() == [0.0, 0.0] and metrics["train/soft_reweight_max"] == 0.0


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 0.25), ("sqrt", 0.5)])
def test_loss_scaling_by_hand(scaling, factor):
    advantages, _ = shaped(shape(loss_scaling=scaling), kept_ratio=0.25)
    assert advantages == [-factor, factor, -2 * factor, 2 * factor]


def test_length_weight_by_hand():
    advantages, _ = shaped(shape(length_weight=True))
    assert advantages == pytest.approx([-2.0, 1.0, -4 / 3, 2.0], rel=1e-5)
    assert advantages[0] == pytest.approx(-1 / (1.000001 / 2), rel=1e-12)


def test_zero_task_advantage_comes_last_and_leaves_the_critic_alone():
    made = experience([[2]], [0.0, 3.0], values=[1.0, 1.0])
    estimate = ESTIMATORS["gae"](made, settings())
    advantages_T, _ = shape_advantages(estimate, made, shape("gae", zero_task=True, loss_scaling="sqrt"), 0.5)
    assert advantages_T.tolist() == [0.0, 0.0] and estimate.returns_T.tolist() == [3.0, 3.0]
    assert shaped(shape(soft_reweight=True, zero_task=True))[0] == [0.0] * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_scaling": "cubic"},
        {"estimator": "gae", "soft_reweight": True},
        {"estimator": "brpo", "length_weight": True},
    ],
)
def test_what_would_have_no_effect_is_refused(changes):
    with pytest.raises(AssertionError):
        shape(**changes)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-8, 8), st.sampled_from([0, 1, 2])), min_size=1, max_size=8),
    st.floats(0.01, 1.0),
)
def test_against_plain_loops(episodes, kept_ratio):
    lengths, returns, groups = zip(*episodes, strict=True)
    rewards = [
        reward for length, value in zip(lengths, returns, strict=True) for reward in [0.0] * (length - 1) + [value]
    ]
    made = experience([[length] for length in lengths], rewards, groups)
    estimate = AdvantageEstimate(torch.arange(1.0, len(rewards) + 1, dtype=torch.float64), None)
    members = {
        group: [value for value, other in zip(returns, groups, strict=True) if other == group] for group in groups
    }
    stds = {group: stdev(values) if len(values) > 1 else 1.0 for group, values in members.items()}
    for soft, scaling, by_length, zero in product(
        (False, True), ("none", "linear", "sqrt"), (False, True), (False, True)
    ):
        expected, token = [], 0
        for length, group in zip(lengths, groups, strict=True):
            factor = {"none": 1.0, "linear": kept_ratio, "sqrt": kept_ratio**0.5}[scaling]
            factor *= stds[group] / (max(stds.values()) + 1e-6) if soft else 1.0
            factor /= (length + 1e-6) / fmean(lengths) if by_length else 1.0
            for _ in range(length):
                token += 1
                expected.append(0.0 if zero else factor * token)
        got, metrics = shape_advantages(estimate, made, shape("grpo", soft, scaling, by_length, zero), kept_ratio)
        assert got.tolist() == pytest.approx(expected, rel=1e-9)
        assert bool(metrics) == soft
