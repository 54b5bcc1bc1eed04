"""The head without logits: gradients against finite differences, and the Triton passes against the plain ones."""

import pytest
import torch
from interpreter import needs_triton

from ragen.model import vocabulary
from ragen.model.vocabulary import score_rows, token_scores

VOCAB, HIDDEN, ROWS = 11, 5, 7


def given(dtype=torch.float64, rows=ROWS, vocab=VOCAB):
    torch.manual_seed(3)
    hidden = torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(vocab, (rows,))


def plain(hidden, weight, targets, temperature):
    log_probs = torch.log_softmax((hidden @ weight.t()) / temperature, dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("chunk_logits", [VOCAB, 3 * VOCAB, 100 * VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_finite_differences(temperature, chunk_logits):
    hidden, weight, targets = given()
    assert torch.autograd.gradcheck(
        lambda h, w: token_scores(h, w, targets, temperature, chunk_logits), (hidden, weight)
    )


@pytest.mark.parametrize("chunk_logits", [2 * VOCAB, 100 * VOCAB])
def test_same_numbers_as_log_softmax(chunk_logits):
    hidden, weight, targets = given()
    ours, theirs = token_scores(hidden, weight, targets, 0.7, chunk_logits), plain(hidden, weight, targets, 0.7)
    mixed = torch.randn(2, ROWS, dtype=torch.float64)
    got, wanted = (torch.autograd.grad(list(found), (hidden, weight), list(mixed)) for found in (ours, theirs))
    assert all(map(torch.allclose, (*ours, *got), (*theirs, *wanted)))


def test_one_output_alone_can_be_differentiated_and_twice():
    """Gradient analysis differentiates each term, over one forward pass."""
    hidden, weight, targets = given()
    _, entropies = token_scores(hidden, weight, targets, 1.0, 3 * VOCAB)
    first, second = (torch.autograd.grad(entropies.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[1].sum(), (hidden, weight))
    assert all(map(torch.equal, first, second)) and all(map(torch.allclose, first, wanted))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = given()
    token_scores(hidden, weight.requires_grad_(False), targets, 1.0, 3 * VOCAB)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_chunks_are_added_up_in_float32():
    """512 chunks of one row in bf16: adding in bf16 would lose most of the last ones."""
    hidden, weight, targets = given(torch.float64, rows=512)
    of_weight = {}
    for dtype in (torch.float64, torch.bfloat16):
        part = weight.detach().to(dtype).requires_grad_()
        token_scores(hidden.detach().to(dtype), part, targets, 1.0, VOCAB)[0].sum().backward()
        of_weight[dtype] = part.grad.double()
    wanted = of_weight[torch.float64]
    assert (of_weight[torch.bfloat16] - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.slow
@needs_triton
def test_kernels_compute_the_plain_passes():
    from ragen.model import vocabulary_kernels as kernels

    torch.manual_seed(0)
    logits, targets, outer = 4 * torch.randn(3, 5000), torch.tensor([0, 4999, 17]), torch.randn(2, 3)
    theirs, ours = score_rows(logits, targets, 0.7), kernels.score_rows(logits, targets, 0.7)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(theirs, ours, strict=True))
    slopes = [logits.clone(), logits.clone()]
    for module, part in zip((vocabulary, kernels), slopes, strict=True):
        module.differentiate_rows(part, targets, theirs[1], theirs[2], *outer, 0.7)
    assert torch.allclose(*slopes, atol=1e-6)
