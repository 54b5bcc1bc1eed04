"""What happens between matrix products, as single Triton kernels: for CUDA tensors, forward only.

    x, normed = add_norm(x, delta, norm.weight, norm.eps)       # x + delta, and its RMS norm
    mixed = swiglu(gate_up)                                     # silu(gate) * up

They round where the same operations of torch round, one by one: a model computes the same with both, except for the
order of sums in the norm. Import it only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + delta` and its RMS norm; without `delta`, `x` itself."""
    num_rows, size = x.shape
    added, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    _add_norm[(num_rows,)](
        x, x if delta is None else delta, weight, added, normed, eps, size,
        BLOCK=triton.next_power_of_2(size), HAS_DELTA=delta is not None, num_warps=8 if size > 1024 else 4,
    )  # fmt: skip
    return added, normed


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, of neighbouring halves."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    mixed = gate_up.new_empty(num_rows, size)
    block = 1024
    _swiglu[(num_rows, triton.cdiv(size, block))](gate_up, mixed, size, BLOCK=block, num_warps=4)
    return mixed


@triton.jit
def _add_norm(x, delta, weight, added, normed, eps, size, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * size + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(added.dtype.element_ty)
        tl.store(added + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + column, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, mixed, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    kind = mixed.dtype.element_ty
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(mixed + row * size + column, (gate * up).to(kind), mask=inside)
