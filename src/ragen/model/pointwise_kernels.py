"""Triton kernels of `pointwise`: each reads its input once.

Forward passes round where the same operations of torch round, one by one, so that a model computes the same with both.

    turned = rope(heads, cos, sin, num_turned)             # inverse=True turns back: the gradient
    hidden = swiglu(gate_up)
    of_gate_up = swiglu_gradient(gate_up, of_hidden)

Imported on CUDA only, and in tests with Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _rope(
    source,
    target,
    cos,
    sin,
    source_stride,
    num_turned,
    sign: tl.constexpr,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    column = tl.arange(0, block_half)[None, :]
    inside = (head < num_heads) & (column < half)
    turned = inside & (head < num_turned)
    place = head * 2 * half + column
    first = tl.load(source + token * source_stride + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + token * source_stride + place + half, mask=inside, other=0.0).to(tl.float32)
    # Heads that are not turned have an angle of zero.
    along = tl.load(cos + token * half + column + 0 * head, mask=turned, other=1.0).to(tl.float32)
    across = sign * tl.load(sin + token * half + column + 0 * head, mask=turned, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    left = (first * along).to(kind).to(tl.float32) - (second * across).to(kind).to(tl.float32)
    right = (second * along).to(kind).to(tl.float32) + (first * across).to(kind).to(tl.float32)
    place += token * num_heads * 2 * half
    tl.store(target + place, left.to(kind), mask=inside)
    tl.store(target + place + half, right.to(kind), mask=inside)


@triton.jit
def _swiglu(gate_up, hidden, size: tl.constexpr, block: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    kind = hidden.dtype.element_ty
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(hidden + row * size + column, (gate * up).to(kind), mask=inside)


@triton.jit
def _swiglu_gradient(gate_up, of_hidden, of_gate_up, size: tl.constexpr, block: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    place = row * 2 * size + column
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + size, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(of_hidden + row * size + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = outer * up * share * (1.0 + gate * (1.0 - share))
    of_up = outer * gate * share
    tl.store(of_gate_up + place, of_gate.to(of_gate_up.dtype.element_ty), mask=inside)
    tl.store(of_gate_up + place + size, of_up.to(of_gate_up.dtype.element_ty), mask=inside)


def rope(heads: Tensor, cos: Tensor, sin: Tensor, num_turned: int, inverse: bool = False) -> Tensor:
    """As `pointwise.rope`, into a new tensor."""
    num_tokens, num_heads, head_dim = heads.shape
    if heads.stride()[1:] != (head_dim, 1):
        heads = heads.contiguous()
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    sizes = (num_heads, head_dim // 2)
    blocks = [triton.next_power_of_2(size) for size in sizes]
    sign = -1 if inverse else 1
    given = (heads, turned, cos.contiguous(), sin.contiguous(), heads.stride(0), num_turned)
    if num_tokens:
        _rope[(num_tokens,)](*given, sign, *sizes, *blocks, num_warps=4)
    return turned


def swiglu(gate_up: Tensor) -> Tensor:
    """As `pointwise.swiglu`."""
    size = gate_up.shape[-1] // 2
    hidden = gate_up.new_empty(*gate_up.shape[:-1], size)
    if gate_up.numel():
        _swiglu[_grid(gate_up, size)](gate_up.contiguous(), hidden, size, BLOCK, num_warps=4)
    return hidden


def swiglu_gradient(gate_up: Tensor, of_hidden: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    of_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    given = (gate_up.contiguous(), of_hidden.contiguous(), of_gate_up)
    if gate_up.numel():
        _swiglu_gradient[_grid(gate_up, size)](*given, size, BLOCK, num_warps=4)
    return of_gate_up


def _grid(gate_up: Tensor, size: int) -> tuple[int, int]:
    return gate_up.numel() // gate_up.shape[-1], triton.cdiv(size, BLOCK)
