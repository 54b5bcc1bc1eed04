"""KL estimators and the KL in the reward: by hand, against sums over a whole vocabulary, and by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_experience import experience

from ragen.algo.kl import KINDS, KlController, full_kl, kl_of_tokens, needs_vocabulary, pay_kl
from ragen.config.schema import KL_TYPES

SAMPLED = [kind for kind in KINDS if kind != "full"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_slope(kind, differences, full=None):
    log_probs_T = tensor(differences).requires_grad_()
    full_T = None if full is None else tensor(full)
    kl_T = kl_of_tokens(kind, log_probs_T, torch.zeros_like(log_probs_T), full_T)
    if not kl_T.requires_grad:
        return kl_T.tolist(), None
    kl_T.sum().backward()
    return kl_T.tolist(), log_probs_T.grad.tolist()


# By hand ------------------------------------------------------------------------------------------------------------


def test_the_kinds_are_those_of_the_config():
    assert {kind.removesuffix("+") for kind in KL_TYPES} == set(KINDS)


@pytest.mark.parametrize(
    ("kinds", "values", "slopes"),
    [
        (("kl", "k1"), [0.5, -0.5, 0.0], [1.0, 1.0, 1.0]),
        (("abs",), [0.5, 0.5, 0.0], [1.0, -1.0, 0.0]),
        (("mse", "k2"), [0.125, 0.125, 0.0], [0.5, -0.5, 0.0]),
        (
            ("low_var_kl", "low-var-kl", "k3"),
            [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0],
            [1 - math.exp(-0.5), 1 - math.exp(0.5), 0.0],
        ),
    ],
)
def test_by_hand(kinds, values, slopes):
    for kind in kinds:
        got = value_and_slope(kind, [0.5, -0.5, 0.0])
        assert got[0] == pytest.approx(values, rel=1e-12) and got[1] == pytest.approx(slopes, rel=1e-12)
        plus = value_and_slope(f"{kind}+", [0.5, -0.5, 0.0])
        assert plus[0] == pytest.approx(values, rel=1e-12) and plus[1] == pytest.approx([0.5, -0.5, 0.0])


def test_low_var_kl_is_bounded():
    # exp(2) - 3 = 4.4 is within 10; exp(3) - 4 = 16.1, exp(-20) + 20 - 1 = 19 and what is beyond are not.
    values, slopes = value_and_slope("k3", [-2.0, -3.0, 20.0, 500.0, -500.0])
    assert values == pytest.approx([math.exp(2) - 3, 10.0, 10.0, 10.0, 10.0])
    assert slopes == pytest.approx([1 - math.exp(2), 0.0, 0.0, 0.0, 0.0])


def test_low_var_kl_of_nearly_equal_policies_is_not_lost_to_rounding():
    log_probs_T = torch.tensor([-1.0, -1.0]) + torch.tensor([2**-12, -(2**-12)])
    kl_T = kl_of_tokens("k3", log_probs_T, torch.tensor([-1.0, -1.0]))
    assert kl_T.dtype == torch.float32 and kl_T.tolist() == pytest.approx([2**-25] * 2, rel=1e-2)


def test_full_by_hand():
    # p = 1/2, 1/4, 1/4 against q = 1/4, 1/4, 1/2: log 2 / 2 - log 2 / 4.
    log_probs = tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    reference = tensor([[0.25, 0.25, 0.5], [0.25, 0.75, 0.0]]).log()
    assert full_kl(log_probs, reference).tolist() == pytest.approx([math.log(2) / 4, math.log(4)])


def test_full_takes_its_own_values():
    assert needs_vocabulary("full") and needs_vocabulary("full+") and not any(map(needs_vocabulary, SAMPLED))
    assert value_and_slope("full", [0.5, -1.0], [3.0, 4.0]) == ([3.0, 4.0], None)
    assert value_and_slope("full+", [0.5, -1.0], [3.0, 4.0]) == ([3.0, 4.0], [0.5, -1.0])
    with pytest.raises(ValueError, match="full_kl"):
        value_and_slope("full", [0.5])


@pytest.mark.parametrize("kind", ["k4", "", "+", "k1++", "kl_loss"])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(AssertionError):
        value_and_slope(kind, [0.0])


# A second opinion ---------------------------------------------------------------------------------------------------


def naive(kind, log_prob, reference):
    difference = log_prob - reference
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return abs(difference)
    if kind in ("mse", "k2"):
        return difference * difference / 2
    ratio = max(-20.0, min(20.0, reference - log_prob))
    return max(-10.0, min(10.0, math.exp(ratio) - ratio - 1))


some_pairs = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=10)


@given(some_pairs, st.sampled_from(SAMPLED), st.sampled_from(["", "+"]))
def test_values_and_slopes_against_plain_loops(pairs, kind, suffix):
    new, old = (tensor(column) for column in zip(*pairs, strict=True))
    new.requires_grad_()
    kl_T = kl_of_tokens(kind + suffix, new, old)
    kl_T.sum().backward()
    assert kl_T.tolist() == pytest.approx([naive(kind, *pair) for pair in pairs], rel=1e-9, abs=1e-12)
    step = 1e-6
    for slope, (log_prob, reference) in zip(new.grad.tolist(), pairs, strict=True):
        value = naive(kind, log_prob, reference)
        if suffix:
            assert slope == pytest.approx(log_prob - reference, abs=1e-12)
        elif min(abs(value - 10), abs(log_prob - reference)) > 1e-4:  # not at a kink
            above, below = naive(kind, log_prob + step, reference), naive(kind, log_prob - step, reference)
            assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-6)


some_logits = st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=2, max_size=6)


@given(some_logits)
def test_what_the_kinds_are_on_average(pairs):
    """Exactly, by adding up over the vocabulary instead of sampling: the claims of the module's docstring."""
    logits, reference_logits = (tensor(column) for column in zip(*pairs, strict=True))
    logits.requires_grad_()
    reference = reference_logits.log_softmax(0)

    def mean_and_slope(kind):
        log_probs = logits.log_softmax(0)
        kl_T = kl_of_tokens(kind, log_probs, reference)
        mean = (log_probs.detach().exp() * kl_T).sum()
        return mean.item(), torch.autograd.grad(mean, logits)[0].tolist()

    kl = full_kl(logits.log_softmax(0)[None], reference[None]).sum()
    slope = torch.autograd.grad(kl, logits)[0].tolist()
    back = full_kl(reference[None], logits.log_softmax(0)[None]).sum()
    back_slope = torch.autograd.grad(back, logits)[0].tolist()
    exact = sum(p * (math.log(p) - q) for p, q in zip(logits.softmax(0).tolist(), reference.tolist(), strict=True))
    tolerance = {"rel": 1e-8, "abs": 1e-9}
    assert kl.item() == pytest.approx(exact, **tolerance)
    assert mean_and_slope("k1")[0] == pytest.approx(exact, **tolerance)
    assert mean_and_slope("k3")[0] == pytest.approx(exact, **tolerance)
    assert mean_and_slope("k1")[1] == pytest.approx([0.0] * len(pairs), **tolerance)
    assert mean_and_slope("k2")[1] == pytest.approx(slope, **tolerance)
    assert mean_and_slope("k3+")[1] == pytest.approx(slope, **tolerance)
    assert mean_and_slope("k3")[1] == pytest.approx(back_slope, **tolerance)


# In the reward ------------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_by_hand():
    made = experience([[1, 1], [1]], [0.0, 5.0, -1.0], [1, 2])
    control = KlController("fixed", 0.5, 0.1, 1000)
    paid, metrics = pay_kl(made, tensor([0.1, 0.3, 0.6]).requires_grad_(), control)
    assert paid.rewards_T.tolist() == pytest.approx([-0.05, 4.85, -1.3]) and not paid.rewards_T.requires_grad
    assert paid.returns_E.tolist() == pytest.approx([4.8, -1.3])
    assert paid.group_E is made.group_E and paid.turn_T is made.turn_T
    assert made.rewards_T.tolist() == [0.0, 5.0, -1.0]
    # The first episode has 0.2 a token, the second 0.6.
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.4, "actor/reward_kl_penalty_coeff": 0.5})
    assert control.coefficient == 0.5


def test_the_adaptive_coefficient_by_hand():
    control = KlController("adaptive", 0.2, target=0.1, horizon=1000)
    control.update(0.11, 100)  # a tenth too much, a tenth of the horizon
    assert control.coefficient == pytest.approx(0.2 * 1.01)
    control.update(5.0, 100)  # far too much counts as a fifth
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02)
    control.update(-3.0, 500)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.9)
    control.update(0.1, 100)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.9)


def test_the_control_is_updated_after_the_step_that_it_paid_for():
    made = experience([[1]] * 2, [1.0, 1.0])
    control = KlController("adaptive", 1.0, target=0.5, horizon=10)
    paid, metrics = pay_kl(made, tensor([0.55, 0.55]), control)
    assert paid.rewards_T.tolist() == pytest.approx([0.45, 0.45])
    assert metrics["actor/reward_kl_penalty_coeff"] == 1.0
    assert control.coefficient == pytest.approx(1 + 0.1 * 2 / 10)


def test_state_and_restore():
    first, second = (KlController("adaptive", 0.2, target=0.1, horizon=1000) for _ in range(2))
    first.update(0.3, 70)
    second.restore(first.state())
    for control in (first, second):
        control.update(0.02, 30)
    assert first.coefficient == second.coefficient != 0.2


def test_no_episodes_leave_the_control_alone():
    control = KlController("adaptive", 0.2, target=0.1, horizon=1000)
    made = experience([], [])
    assert pay_kl(made, tensor([]), control) == (made, {})
    assert control.coefficient == 0.2


@pytest.mark.parametrize(
    ("type_", "target", "horizon"), [("pid", 0.1, 10), ("adaptive", 0.0, 10), ("adaptive", 0.1, 0)]
)
def test_impossible_controls_are_refused(type_, target, horizon):
    with pytest.raises(AssertionError):
        KlController(type_, 0.1, target, horizon)
