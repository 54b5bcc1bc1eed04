"""Pointwise kernels against plain torch, in Triton's interpreter."""

import pytest
import torch
from interpreter import needs_triton

from ragen.model import pointwise

COUNTS, HEAD_DIM, TOKENS = (4, 2, 2), 12, 5


def angles():
    torch.manual_seed(1)
    return torch.rand(TOKENS, 1, HEAD_DIM // 2).cos(), torch.rand(TOKENS, 1, HEAD_DIM // 2).sin()


def test_queries_and_keys_are_normed_values_are_not():
    torch.manual_seed(0)
    heads, weights = torch.randn(TOKENS, sum(COUNTS), HEAD_DIM), torch.randn(2, HEAD_DIM)
    normed = pointwise.norm_heads(heads, *weights, COUNTS, 1e-6)
    for part, weight in ((slice(0, 4), weights[0]), (slice(4, 6), weights[1])):
        wanted = heads[:, part] / heads[:, part].square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight
        assert torch.allclose(normed[:, part], wanted, atol=1e-5)
    assert torch.equal(normed[:, 6:], heads[:, 6:])


def test_without_cuda_nothing_is_fused():
    heads, (cos, sin) = torch.randn(TOKENS, sum(COUNTS), HEAD_DIM), angles()
    query, key, value = pointwise.split_heads(heads, cos, sin, COUNTS)
    assert not pointwise.has_kernels(heads)
    assert [part.shape[1] for part in (query, key, value)] == list(COUNTS)
    assert torch.equal(value, heads[:, 6:]) and torch.equal(
        torch.cat((query, key), 1), pointwise.rope(heads[:, :6], cos, sin)
    )


@pytest.mark.slow
@needs_triton
def test_kernels_have_the_values_and_gradients_of_plain_torch(monkeypatch):
    torch.manual_seed(0)
    sizes = ((TOKENS, sum(COUNTS), HEAD_DIM), (TOKENS, 2 * 1300), (TOKENS, 70), (TOKENS, 70), (70,), (12,), (12,))
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    heads, gate_up, x, delta, weight, query_weight, key_weight = given
    monkeypatch.setattr("ragen.model.pointwise_kernels.NORM_PROGRAMS", 2)
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr(pointwise, "has_kernels", lambda x, answer=has_kernels: answer)
        outputs = (
            *pointwise.split_heads(heads, *angles(), COUNTS),
            pointwise.swiglu(gate_up),
            pointwise.norm(x, weight, 1e-6),
            *pointwise.add_norm(x, delta, weight, 1e-6),
            pointwise.norm_heads(heads, query_weight, key_weight, COUNTS, 1e-6),
        )
        torch.manual_seed(2)
        loss = sum((part * torch.randn(part.shape)).sum() for part in outputs)
        found.append((*outputs, *torch.autograd.grad(loss, given)))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


@pytest.mark.slow
@needs_triton
def test_norms_of_heads_in_bf16(monkeypatch):
    """Also of heads that are a part of a wider matrix. The interpreter rounds towards zero."""
    torch.manual_seed(0)
    heads = torch.randn(TOKENS, sum(COUNTS) + 3, HEAD_DIM).bfloat16()[:, : sum(COUNTS)]
    weights = torch.randn(2, HEAD_DIM).bfloat16().unbind()
    wanted = pointwise.norm_heads(heads.float(), *(weight.float() for weight in weights), COUNTS, 1e-6)
    monkeypatch.setattr(pointwise, "has_kernels", lambda x: True)
    got = pointwise.norm_heads(heads, *weights, COUNTS, 1e-6)
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), wanted, rtol=2**-7, atol=0)


@pytest.mark.slow
@needs_triton
def test_the_kernel_that_adds_to_float32_is_exact(monkeypatch):
    torch.manual_seed(0)
    total, part = torch.randn(70, 99), torch.randn(70, 99).bfloat16()
    wanted = total + part
    monkeypatch.setattr(pointwise, "has_kernels", lambda x: True)
    assert torch.equal(pointwise.add_into(total, part), wanted) and torch.equal(total, wanted)
