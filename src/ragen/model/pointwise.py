"""Pointwise parts of a layer, shared by sampler and learner so that both round alike.

    total, normed = add_norm(x, delta, weight, eps)                # x + delta, and its RMS norm
    heads = norm_heads(heads, query_weight, key_weight, counts, eps)   # RMS norm of each query and key
    query, key, value = split_heads(qkv, cos, sin, counts)         # queries and keys with rotary positions
    turned = rope(heads, cos, sin)
    hidden = swiglu(gate_up)                                       # silu(gate) * up

On CUDA each is one Triton kernel (`pointwise_kernels`), forward and backward. Elsewhere, and without Triton, they
are plain torch operations.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels run on this tensor."""
    return x.is_cuda and _has_triton()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm."""
    if has_kernels(x):
        return _AddNorm.apply(x, None, weight, eps)[1]
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm."""
    if has_kernels(x):
        return _AddNorm.apply(x, delta, weight, eps)
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


def add_into(total: Tensor, part: Tensor) -> Tensor:
    """Add in place, to a float32 total."""
    if has_kernels(total) and total.is_contiguous() and total.shape == part.shape:
        from ragen.model import pointwise_kernels as kernels

        return kernels.add_into(total, part)
    return total.add_(part)


def norm_heads(heads: Tensor, query_weight: Tensor, key_weight: Tensor, counts: Sequence[int], eps: float) -> Tensor:
    """RMS norm within each query and key of [T, heads, head_dim]; values stay. Counts as in `split_heads`."""
    if has_kernels(heads):
        return _NormHeads.apply(heads, query_weight, key_weight, counts[0], counts[1], eps)
    query, key, value = heads.split([*counts], dim=1)
    size = query_weight.shape
    return torch.cat((F.rms_norm(query, size, query_weight, eps), F.rms_norm(key, size, key_weight, eps), value), dim=1)


def split_heads(heads: Tensor, cos: Tensor, sin: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from [T, heads, head_dim], of which each has its count of heads, in this order."""
    num_turned = counts[0] + counts[1]
    if has_kernels(heads):
        query, key, value = rope(heads, cos, sin, num_turned).split([*counts], dim=1)
    else:
        value = heads[:, num_turned:]
        query, key = rope(heads[:, :num_turned], cos, sin).split([*counts[:2]], dim=1)
    return query, key, value


def rope(heads: Tensor, cos: Tensor, sin: Tensor, num_turned: int | None = None) -> Tensor:
    """Rotary positions for [T, heads, head_dim]: the halves of each head are the two coordinates of its planes.

    `cos` and `sin` are [T, 1, head_dim / 2]. Heads from `num_turned` on are only copied.
    """
    if has_kernels(heads):
        return _Rope.apply(heads, cos, sin, heads.shape[1] if num_turned is None else num_turned)
    assert num_turned is None
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, the two being the halves of the last dimension."""
    if has_kernels(gate_up):
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _AddNorm(torch.autograd.Function):
    """Also the gradient of a sum that is used twice, as it is and normed, is one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
        from ragen.model import pointwise_kernels as kernels

        total, normed, scales = kernels.add_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, scales)
        ctx.set_materialize_grads(False)
        return None if delta is None else total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor | None, of_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        from ragen.model import pointwise_kernels as kernels

        total, weight, scales = ctx.saved_tensors
        if of_normed is None:
            return of_total, of_total, None, None
        of_x, of_weight = kernels.add_norm_gradient(total, weight, scales, of_total, of_normed)
        return of_x, of_x if ctx.needs_input_grad[1] else None, of_weight, None


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, query_weight: Tensor, key_weight: Tensor, num_queries: int, num_keys: int, eps: float
    ) -> Tensor:
        from ragen.model import pointwise_kernels as kernels

        normed, scales = kernels.norm_heads(heads, query_weight, key_weight, num_queries, num_keys, eps)
        ctx.save_for_backward(heads, query_weight, key_weight, scales)
        ctx.counts = (num_queries, num_keys)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        from ragen.model import pointwise_kernels as kernels

        heads, query_weight, key_weight, scales = ctx.saved_tensors
        given = (heads, query_weight, key_weight, scales, of_normed)
        return *kernels.norm_heads_gradient(*given, *ctx.counts), None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, num_turned: int) -> Tensor:
        from ragen.model import pointwise_kernels as kernels

        ctx.save_for_backward(cos, sin)
        ctx.num_turned = num_turned
        return kernels.rope(heads, cos, sin, num_turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_turned: Tensor) -> tuple[Tensor | None, ...]:
        from ragen.model import pointwise_kernels as kernels

        cos, sin = ctx.saved_tensors
        return kernels.rope(of_turned, cos, sin, ctx.num_turned, inverse=True), None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from ragen.model import pointwise_kernels as kernels

        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> Tensor:
        from ragen.model import pointwise_kernels as kernels

        (gate_up,) = ctx.saved_tensors
        return kernels.swiglu_gradient(gate_up, of_output)
