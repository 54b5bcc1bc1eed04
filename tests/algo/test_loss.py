"""The policy loss: numbers worked by hand, plain loops as a second opinion, finite differences, and adding up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen.algo.loss import (
    AGGREGATIONS,
    ESS,
    Term,
    add_sums,
    entropy_term,
    kl_sums,
    kl_term,
    policy_metrics,
    policy_sums,
    policy_terms,
    token_weights,
    value_sums,
    value_term,
    weighted_sum,
)

LOW, HIGH, C = 0.2, 0.28, 3.0


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def losses_of(ratios, advantages, clips=(LOW, HIGH, C)):
    old = [-1.0] * len(ratios)
    new = [math.log(ratio) - 1.0 for ratio in ratios]
    return policy_terms(tensor(new), tensor(old), tensor(advantages), *clips)


# By hand ------------------------------------------------------------------------------------------------------------

# ratio, advantage -> loss, clipped, clipped by dual clip
CASES = [
    (1.0, 2.0, -2.0, False, False),
    (1.0, -2.0, 2.0, False, False),
    (1.25, 2.0, -2.5, False, False),  # within the higher bound 1.28
    (1.5, 2.0, -2.56, True, False),  # -2 * 1.28
    (0.5, 2.0, -1.0, False, False),  # already worse: the bound must not help
    (0.9, -2.0, 1.8, False, False),
    (0.5, -2.0, 1.6, True, False),  # 2 * 0.8
    (1.5, -2.0, 3.0, False, False),
    (2.9, -2.0, 5.8, False, False),
    (4.0, -2.0, 6.0, False, True),  # 2 * 3
    (4.0, 2.0, -2.56, True, False),  # dual clip is for A < 0 only
    (4.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "clipped_lower"), CASES)
def test_policy_loss_by_hand(ratio, advantage, loss, clipped, clipped_lower):
    losses_T, diagnostics = losses_of([ratio], [advantage])
    assert losses_T.item() == pytest.approx(loss, rel=1e-12)
    assert diagnostics["ratio"].item() == pytest.approx(ratio)
    assert diagnostics["clipped"].item() is clipped
    assert diagnostics["clipped_lower"].item() is clipped_lower
    assert diagnostics["approx_kl"].item() == pytest.approx(-math.log(ratio))


def test_the_log_ratio_is_bounded():
    losses_T, diagnostics = policy_terms(
        tensor([0.0, -90.0]), tensor([-90.0, 0.0]), tensor([-1.0, 1.0]), LOW, HIGH, 1e12
    )
    assert diagnostics["ratio"].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert losses_T.tolist() == pytest.approx([math.exp(20), -math.exp(-20)])


def test_the_first_update_has_the_plain_policy_gradient():
    log_probs_T = tensor([-0.5, -1.0, -3.0]).requires_grad_()
    advantages_T = tensor([1.5, -2.0, 0.0])
    losses_T, diagnostics = policy_terms(log_probs_T, log_probs_T.detach(), advantages_T, LOW, HIGH, C)
    losses_T.sum().backward()
    assert log_probs_T.grad.tolist() == [-1.5, 2.0, 0.0]
    assert not any(value.requires_grad for value in diagnostics.values())


def test_a_clipped_token_has_no_gradient():
    ratios, advantages = [1.5, 0.5, 4.0, 4.0, 0.5], [2.0, -2.0, -2.0, 2.0, 2.0]
    log_probs_T = tensor([math.log(ratio) for ratio in ratios]).requires_grad_()
    policy_terms(log_probs_T, torch.zeros_like(log_probs_T), tensor(advantages), LOW, HIGH, C)[0].sum().backward()
    assert log_probs_T.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, -1.0])


@pytest.mark.parametrize("clips", [(-0.1, 0.2, 3.0), (1.1, 0.2, 3.0), (0.2, -0.1, 3.0), (0.2, 0.2, 1.0)])
def test_impossible_clip_ratios_are_refused(clips):
    with pytest.raises(ValueError, match="clip"):
        losses_of([1.0], [1.0], clips)


def test_token_mean_by_hand():
    weights_T = token_weights(torch.tensor([3, 0, 1]), "token-mean")
    assert weights_T.dtype == torch.float32 and weights_T.tolist() == [0.25] * 4
    assert token_weights(torch.tensor([1, 2]), "token-mean", torch.float64).tolist() == [1 / 3] * 3
    assert token_weights(torch.tensor([0, 0]), "token-mean").shape == (0,)
    assert token_weights(torch.tensor([], dtype=torch.long), "token-mean").shape == (0,)


# Sequences of 3, 0 and 1 tokens: two that count.
@pytest.mark.parametrize(
    ("mode", "norm_length", "weights"),
    [
        ("token-mean", None, [1 / 4] * 4),
        ("seq-mean-token-mean", None, [1 / 6] * 3 + [1 / 2]),
        ("seq-mean-token-sum", None, [1 / 2] * 4),
        ("seq-mean-token-sum-norm", None, [1 / 6] * 4),  # the longest has 3
        ("seq-mean-token-sum-norm", 10, [1 / 20] * 4),
        ("token-mean", 10, [1 / 4] * 4),  # the length is for the last one only
    ],
)
def test_aggregations_by_hand(mode, norm_length, weights):
    got_T = token_weights(torch.tensor([3, 0, 1]), mode, torch.float64, norm_length)
    assert got_T.tolist() == pytest.approx(weights, rel=1e-15)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_tokens_no_weights(mode):
    for counts in ([], [0, 0]):
        assert token_weights(torch.tensor(counts, dtype=torch.long), mode).shape == (0,)


def test_wrong_aggregations_are_refused():
    with pytest.raises(AssertionError, match="seq-max"):
        token_weights(torch.tensor([1]), "seq-max")
    with pytest.raises(ValueError, match="norm_length=0"):
        token_weights(torch.tensor([1]), "token-mean", norm_length=0)


def naive_aggregate(losses_S_T, mode, norm_length):
    filled = [losses for losses in losses_S_T if losses]
    tokens = [loss for losses in filled for loss in losses]
    if mode == "token-mean":
        return math.fsum(tokens) / len(tokens)
    of_sequence = {
        "seq-mean-token-mean": lambda losses: math.fsum(losses) / len(losses),
        "seq-mean-token-sum": math.fsum,
        "seq-mean-token-sum-norm": lambda losses: math.fsum(losses) / (norm_length or max(map(len, filled))),
    }[mode]
    return math.fsum(map(of_sequence, filled)) / len(filled)


@given(
    st.lists(st.lists(st.floats(-10, 10), max_size=6), min_size=1, max_size=6).filter(any),
    st.sampled_from(sorted(AGGREGATIONS)),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_aggregations_against_plain_loops(losses_S_T, mode, norm_length):
    counts_S = torch.tensor([len(losses) for losses in losses_S_T])
    weights_T = token_weights(counts_S, mode, torch.float64, norm_length)
    total = Term("task", 1.0, tensor([loss for losses in losses_S_T for loss in losses])).weighted(weights_T)
    assert total.item() == pytest.approx(naive_aggregate(losses_S_T, mode, norm_length), rel=1e-9, abs=1e-12)


# value, old value, return -> loss, clipped; the clip is 0.5
VALUE_CASES = [
    (1.0, 1.0, 3.0, 2.0, False),  # (1 - 3)^2 / 2
    (1.4, 1.0, 3.0, 1.28, False),  # within the clip
    (2.0, 1.0, 3.0, 1.125, True),  # moved too far towards the return: held at 1.5
    (0.0, 1.0, 3.0, 4.5, False),  # moved away from it
    (2.0, 1.0, 1.0, 0.5, False),
    (5.0, 1.0, 3.0, 2.0, False),  # beyond it, and further away than the held 1.5
    (4.0, 1.0, 3.0, 1.125, True),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "clipped"), VALUE_CASES)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    values_T = tensor([value]).requires_grad_()
    term, clipped_T = value_term(values_T, tensor([old]), tensor([target]), 0.5)
    assert (term.name, term.coefficient) == ("value", 1.0)
    assert term.per_token.item() == pytest.approx(loss) and clipped_T.item() is clipped
    term.per_token.sum().backward()
    assert values_T.grad.item() == pytest.approx(0.0 if clipped else value - target)


def test_value_metrics_add_up():
    values, olds, targets, losses, clipped = map(list, zip(*VALUE_CASES, strict=True))
    weights_T, means_T = tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1]), tensor([1 / 7] * 7)
    sums = {}
    for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
        values_T = tensor(values)[part].requires_grad_()
        term, clipped_T = value_term(values_T, tensor(olds)[part], tensor(targets)[part], 0.5)
        sums = add_sums(sums, value_sums(term, clipped_T, values_T, weights_T[part], means_T[part]))
    assert not any(value.requires_grad for value in sums.values())
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "critic/vf_loss": sum(weight * loss for weight, loss in zip(weights_T.tolist(), losses, strict=True)),
            "critic/vf_clipfrac": sum(clipped) / 7,
            "critic/vpred_mean": sum(values) / 7,
        }
    )


def test_a_negative_value_clip_is_refused():
    with pytest.raises(AssertionError, match="-1"):
        value_term(tensor([0.0]), tensor([0.0]), tensor([0.0]), -1)


@given(
    st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=8),
    st.floats(0, 2),
)
def test_value_loss_against_plain_loops(tokens, clip):
    values_T, olds_T, targets_T = (tensor(column) for column in zip(*tokens, strict=True))
    values_T.requires_grad_()
    term, _ = value_term(values_T, olds_T, targets_T, clip)

    def naive(value, old, target):
        held = min(max(value, old - clip), old + clip)
        return max((value - target) ** 2, (held - target) ** 2) / 2

    assert term.per_token.tolist() == pytest.approx([naive(*token) for token in tokens], rel=1e-9, abs=1e-12)
    term.per_token.sum().backward()
    step = 1e-6
    for slope, (value, old, target) in zip(values_T.grad.tolist(), tokens, strict=True):
        held = min(max(value, old - clip), old + clip)
        at_the_edge = abs(abs(value - old) - clip) < 1e-4
        tie = value != held and abs(abs(value - target) - abs(held - target)) < 1e-4
        if not at_the_edge and not tie:
            finite = (naive(value + step, old, target) - naive(value - step, old, target)) / (2 * step)
            assert slope == pytest.approx(finite, abs=1e-6)


def test_a_kl_term_is_a_cost():
    weights_T, kl_T = tensor([0.5, 0.5]), tensor([0.2, 0.4]).requires_grad_()
    term = kl_term(kl_T, 0.1)
    assert (term.name, term.coefficient) == ("kl", 0.1)
    assert weighted_sum([Term("task", 1.0, tensor([1.0, 3.0])), term], weights_T).item() == pytest.approx(2.03)
    sums = kl_sums(kl_T, weights_T)
    assert sums["actor/kl_loss"].item() == pytest.approx(0.3) and not sums["actor/kl_loss"].requires_grad


def test_the_loss_is_the_sum_of_its_terms_and_entropy_lowers_it():
    weights_T = tensor([0.5, 0.25, 0.25])
    task, entropy = Term("task", 1.0, tensor([2.0, 4.0, 8.0])), entropy_term(tensor([1.0, 2.0, 6.0]), 0.1)
    assert entropy.name == "entropy" and entropy.coefficient == -0.1
    assert task.weighted(weights_T).item() == 4.0  # 1 + 1 + 2
    assert entropy.weighted(weights_T).item() == pytest.approx(-0.25)  # -0.1 * (0.5 + 0.5 + 1.5)
    assert weighted_sum([task, entropy], weights_T).item() == pytest.approx(3.75)
    with pytest.raises(AssertionError, match="task"):
        weighted_sum([task, task], weights_T)
    with pytest.raises(AssertionError):
        task.weighted(weights_T[:1])  # would broadcast


def test_metrics_by_hand():
    # Two sequences of one and three tokens. Loss weights differ from the means on purpose.
    ratios, advantages = [1.5, 0.5, 4.0, 1.0], [2.0, -2.0, -2.0, 1.0]  # losses -2.56, 1.6, 6, -1
    losses_T, diagnostics = losses_of(ratios, advantages)
    weights_T, means_T = tensor([1.0, 0.5, 0.5, 2.0]), tensor([0.25] * 4)
    metrics = policy_metrics(policy_sums(losses_T, diagnostics, tensor([1.0, 2.0, 3.0, 6.0]), weights_T, means_T))
    assert metrics == pytest.approx(
        {
            "actor/pg_loss": -2.56 + 0.8 + 3.0 - 2.0,
            "actor/pg_clipfrac": 0.5,
            "actor/pg_clipfrac_lower": 0.25,
            "actor/ppo_kl": -(math.log(1.5) + math.log(0.5) + math.log(4.0)) / 4,
            "actor/entropy": 3.0,
            "actor/effective_sample_size": 7.0**2 / (4 * (2.25 + 0.25 + 16.0 + 1.0)),  # sum 7
        }
    )
    assert all(type(value) is float for value in metrics.values())


def test_metrics_of_no_tokens_are_zero():
    empty_T = tensor([])
    losses_T, diagnostics = policy_terms(empty_T, empty_T, empty_T, LOW, HIGH, C)
    assert set(policy_metrics(policy_sums(losses_T, diagnostics, empty_T, empty_T, empty_T)).values()) == {0.0}


@pytest.mark.parametrize(("ratios", "share"), [([1.0] * 5, 1.0), ([1.3] * 4, 1.0), ([1e8, 1e-3, 1e-3, 1e-3], 0.25)])
def test_effective_sample_size(ratios, share):
    losses_T, diagnostics = losses_of(ratios, [1.0] * len(ratios))
    means_T = tensor([1 / len(ratios)] * len(ratios))
    metrics = policy_metrics(policy_sums(losses_T, diagnostics, means_T, means_T, means_T))
    assert metrics[ESS] == pytest.approx(share, abs=1e-6)


# A second opinion ---------------------------------------------------------------------------------------------------


def naive_loss(new, old, advantage, low, high, c):
    ratio = math.exp(min(20.0, max(-20.0, new - old)))
    if advantage >= 0:  # gain grows with the ratio, up to the bound
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), c)  # loss grows with the ratio, between the bounds


some_log_prob = st.floats(-8, 0)
some_advantage = st.one_of(st.floats(-5, 5), st.sampled_from([0.0, 1.0, -1.0]))
some_tokens = st.lists(
    st.tuples(some_log_prob, st.one_of(some_log_prob, st.floats(-60, 0)), some_advantage, st.floats(0, 8)),
    min_size=1,
    max_size=12,
)
some_clips = st.tuples(st.floats(0, 1), st.floats(0, 1.5), st.floats(2.51, 20))


@given(some_tokens, some_clips)
def test_policy_loss_against_plain_loops(tokens, clips):
    new, old, advantages, _ = (tensor(column) for column in zip(*tokens, strict=True))
    losses_T, _ = policy_terms(new, old, advantages, *clips)
    expected = [naive_loss(*token[:3], *clips) for token in tokens]
    assert losses_T.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(some_tokens, some_clips)
def test_gradient_against_finite_differences(tokens, clips):
    low, high, c = clips
    new, old, advantages, entropies = (tensor(column) for column in zip(*tokens, strict=True))
    step, coefficient = 1e-6, 0.3
    new.requires_grad_()
    entropies.requires_grad_()
    weights_T = token_weights(torch.tensor([len(tokens)]), "token-mean", torch.float64)
    terms = [Term("task", 1.0, policy_terms(new, old, advantages, *clips)[0]), entropy_term(entropies, coefficient)]
    weighted_sum(terms, weights_T).backward()
    kinks = [math.log(edge) for edge in (1 - low, 1 + high, c) if edge > 0] + [-20.0, 20.0]
    for row, (log_prob, old_log_prob, advantage, _) in enumerate(tokens):
        if min(abs(log_prob - old_log_prob - kink) for kink in kinks) < 1e-4:
            continue  # the slope is not defined there
        above = naive_loss(log_prob + step, old_log_prob, advantage, *clips)
        below = naive_loss(log_prob - step, old_log_prob, advantage, *clips)
        slope = (above - below) / (2 * step) / len(tokens)
        # The difference of two losses has their rounding, divided by the step.
        rounding = 1e-9 * max(1.0, abs(above))
        assert new.grad[row].item() == pytest.approx(slope, rel=1e-6, abs=rounding)
        assert entropies.grad[row].item() == pytest.approx(-coefficient / len(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_micro_batches_add_up(dtype, data):
    num_tokens_S = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(sum))
    total = sum(num_tokens_S)
    columns = [
        data.draw(st.lists(st.floats(low, high, width=32), min_size=total, max_size=total))
        for low, high in ((-4, 0), (-4, 0), (-3, 3), (0, 5))
    ]
    random = data.draw(st.randoms(use_true_random=False))
    order = list(range(len(num_tokens_S)))
    random.shuffle(order)
    num_parts = data.draw(st.integers(1, len(order)))
    starts = [sum(num_tokens_S[:sequence]) for sequence in order]
    rows_of = [
        list(range(start, start + num_tokens_S[sequence])) for start, sequence in zip(starts, order, strict=True)
    ]
    parts = [[row for rows in rows_of[first::num_parts] for row in rows] for first in range(num_parts)]
    weights_T = token_weights(torch.tensor(num_tokens_S), "token-mean", dtype)

    def run(parts):
        log_probs_T = tensor(columns[0], dtype).requires_grad_()
        loss, sums = 0.0, {}
        for part in parts:
            new, old, advantages, entropies = (
                log_probs_T[part],
                *(tensor(column, dtype)[part] for column in columns[1:]),
            )
            losses_T, diagnostics = policy_terms(new, old, advantages, LOW, HIGH, C)
            total = weighted_sum([Term("task", 1.0, losses_T), entropy_term(entropies, 0.01)], weights_T[part])
            total.backward()
            loss += total.item()
            sums = add_sums(sums, policy_sums(losses_T, diagnostics, entropies, weights_T[part], weights_T[part]))
        return loss, log_probs_T.grad.tolist(), policy_metrics(sums)

    whole, cut = run([list(range(total))]), run(parts)
    tolerance = {"rel": 1e-5, "abs": 1e-5} if dtype == torch.float32 else {"rel": 1e-11, "abs": 1e-11}
    assert cut[0] == pytest.approx(whole[0], **tolerance)
    assert cut[1] == pytest.approx(whole[1], **tolerance)
    assert cut[2] == pytest.approx(whole[2], **tolerance)
    # And the whole is the mean over all tokens of the mini-batch, whatever the sequences' lengths.
    mean = sum(naive_loss(*token, LOW, HIGH, C) for token in zip(*columns[:3], strict=True)) / total
    assert whole[2]["actor/pg_loss"] == pytest.approx(mean, rel=1e-5, abs=1e-5)
    assert whole[0] == pytest.approx(mean - 0.01 * sum(columns[3]) / total, rel=1e-5, abs=1e-5)


def test_adding_sums_needs_the_same_names():
    one = {"a": tensor(1.0)}
    assert add_sums({}, one) == one == add_sums(one, {})
    assert add_sums(one, {"a": tensor(2.0)})["a"].item() == 3.0
    with pytest.raises(AssertionError):
        add_sums(one, {"b": tensor(2.0)})
