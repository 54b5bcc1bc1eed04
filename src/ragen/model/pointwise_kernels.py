"""Triton kernels of `pointwise`: each reads its input once.

Forward passes round where the same operations of torch round, one by one, so that a model computes the same with both.

    total, normed, scales = add_norm(x, delta, weight, eps)
    of_x, of_weight = add_norm_gradient(total, weight, scales, of_total, of_normed)
    normed, scales = norm_heads(heads, query_weight, key_weight, num_queries, num_keys, eps)
    of_heads, of_query_weight, of_key_weight = norm_heads_gradient(
        heads, query_weight, key_weight, scales, of_normed, num_queries, num_keys
    )
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


NORM_PROGRAMS = 512  # of the norm's backward pass: each adds up the weight's gradient over its rows


@triton.jit
def _add_norm(x, delta, weight, total, normed, scales, eps, size, block: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(delta + row * size + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + column, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _add_norm_gradient(
    total,
    weight,
    scales,
    of_total,
    of_normed,
    of_x,
    of_weights,
    num_rows,
    size,
    rows_each: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
):
    """With y = x s w and s = (mean x² + eps)^-½: dx = s (w dy - x s² mean(x w dy)), plus the gradient of the sum."""
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < size
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([block], tl.float32)
    for number in range(0, rows_each):
        row = (program * rows_each + number).to(tl.int64)
        there = column < tl.where(row < num_rows, size, 0)
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)
        value = tl.load(total + row * size + column, mask=there, other=0.0).to(tl.float32)
        outer = tl.load(of_normed + row * size + column, mask=there, other=0.0).to(tl.float32)
        of_weight += outer * value * scale
        outer *= gain
        slope = scale * (outer - value * (scale * scale * tl.sum(value * outer, axis=0) / size))
        if adds:
            slope += tl.load(of_total + row * size + column, mask=there, other=0.0).to(tl.float32)
        tl.store(of_x + row * size + column, slope.to(of_x.dtype.element_ty), mask=there)
    tl.store(of_weights + program.to(tl.int64) * size + column, of_weight, mask=inside)


@triton.jit
def _norm_heads(
    heads,
    query_weight,
    key_weight,
    normed,
    scales,
    stride,
    num_queries,
    num_normed,
    eps,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    """All heads of one token; values are only copied."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < num_heads) & (column < size)
    value = tl.load(heads + token * stride + head * size + column, mask=inside, other=0.0).to(tl.float32)
    gain = _head_gain(query_weight, key_weight, head, column, num_queries, size)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / size + eps)
    value = tl.where(head < num_normed, value * scale[:, None] * gain, value)
    tl.store(normed + (token * num_heads + head) * size + column, value.to(normed.dtype.element_ty), mask=inside)
    row = tl.arange(0, block_heads)
    tl.store(scales + token * num_normed + row, scale, mask=row < num_normed)


@triton.jit
def _head_gain(query_weight, key_weight, head, column, num_queries, size: tl.constexpr):
    """A query's or a key's weight, by the number of the head."""
    inside = column < size
    of_query = tl.load(query_weight + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(head < num_queries, of_query, of_key)


@triton.jit
def _norm_heads_gradient(
    heads,
    query_weight,
    key_weight,
    scales,
    of_normed,
    of_heads,
    of_weights,
    stride,
    outer_stride,
    num_tokens,
    num_queries,
    num_normed,
    tokens_each: tl.constexpr,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    """As `_add_norm_gradient`, for the heads of several tokens; `of_weights` is [programs, normed heads, size]."""
    program = tl.program_id(0)
    row = tl.arange(0, block_heads)
    head = row[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < num_heads) & (column < size)
    gain = _head_gain(query_weight, key_weight, head, column, num_queries, size)
    of_weight = tl.zeros([block_heads, block], tl.float32)
    for number in range(0, tokens_each):
        token = (program * tokens_each + number).to(tl.int64)
        there = inside & (token + 0 * column < num_tokens)
        place = tl.minimum(token, num_tokens - 1) * num_normed + row  # beyond the last token everything else is 0
        scale = tl.load(scales + place, mask=row < num_normed, other=0.0)[:, None]
        value = tl.load(heads + token * stride + head * size + column, mask=there, other=0.0).to(tl.float32)
        given = tl.load(of_normed + token * outer_stride + head * size + column, mask=there, other=0.0).to(tl.float32)
        of_weight += given * value * scale
        outer = given * gain
        shared = tl.sum(value * outer, axis=1)[:, None] / size
        slope = scale * (outer - value * (scale * scale * shared))
        slope = tl.where(head < num_normed, slope, given)
        place = (token * num_heads + head) * size + column
        tl.store(of_heads + place, slope.to(of_heads.dtype.element_ty), mask=there)
    place = (program.to(tl.int64) * num_normed + head) * size + column
    tl.store(of_weights + place, of_weight, mask=inside & (head < num_normed))


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


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, or `x` itself, its norm, and by what each row was multiplied."""
    x = x.contiguous()
    num_rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed, scales = torch.empty_like(x), x.new_empty(num_rows, dtype=torch.float32)
    given = (x, x if delta is None else delta.contiguous(), weight, total, normed, scales, eps, size)
    if num_rows:
        _add_norm[(num_rows,)](*given, triton.next_power_of_2(size), delta is not None, num_warps=_warps(size))
    return total, normed, scales


def add_norm_gradient(
    total: Tensor, weight: Tensor, scales: Tensor, of_total: Tensor | None, of_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """Of what was added, each, and of the weight."""
    num_rows, size = total.shape
    # A power of two, so that few lengths compile the kernel again.
    rows_each = triton.next_power_of_2(max(1, triton.cdiv(num_rows, NORM_PROGRAMS)))
    num_programs = triton.cdiv(num_rows, rows_each)
    of_x, of_weights = torch.empty_like(total), total.new_empty(num_programs, size, dtype=torch.float32)
    outer = (total if of_total is None else of_total.contiguous(), of_normed.contiguous())
    given = (total, weight, scales, *outer, of_x, of_weights, num_rows, size, rows_each)
    if num_rows:
        block = triton.next_power_of_2(size)
        _add_norm_gradient[(num_programs,)](*given, block, of_total is not None, num_warps=_warps(size))
    return of_x, of_weights.sum(dim=0).to(weight.dtype)


def _warps(size: int) -> int:
    return 8 if size > 1024 else 4


@triton.jit
def _add_into(total, part, size, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    added = tl.load(total + place, mask=inside) + tl.load(part + place, mask=inside).to(tl.float32)
    tl.store(total + place, added, mask=inside)


def add_into(total: Tensor, part: Tensor) -> Tensor:
    """`total.add_(part)` for a float32 total; torch is half as fast where the types differ."""
    _add_into[(triton.cdiv(total.numel(), 4096),)](total, part.contiguous(), total.numel(), 4096, num_warps=8)
    return total


def rope(heads: Tensor, cos: Tensor, sin: Tensor, num_turned: int, inverse: bool = False) -> Tensor:
    """As `pointwise.rope`, into a new tensor."""
    num_tokens, num_heads, head_dim = heads.shape
    heads = _with_adjacent_heads(heads)
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    sizes = (num_heads, head_dim // 2)
    sign = -1 if inverse else 1
    given = (heads, turned, cos.contiguous(), sin.contiguous(), heads.stride(0), num_turned)
    if num_tokens:
        _rope[(num_tokens,)](*given, sign, *sizes, *_blocks(*sizes), num_warps=4)
    return turned


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, num_queries: int, num_keys: int, eps: float
) -> tuple[Tensor, Tensor]:
    """As `pointwise.norm_heads`, and by what each head was multiplied."""
    heads = _with_adjacent_heads(heads)
    num_tokens, num_heads, size = heads.shape
    num_normed = num_queries + num_keys
    normed = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    scales = heads.new_empty(num_tokens, num_normed, dtype=torch.float32)
    given = (heads, query_weight, key_weight, normed, scales, heads.stride(0), num_queries, num_normed, eps)
    if num_tokens:
        _norm_heads[(num_tokens,)](*given, num_heads, size, *_blocks(num_heads, size), num_warps=4)
    return normed, scales


def norm_heads_gradient(
    heads: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    scales: Tensor,
    of_normed: Tensor,
    num_queries: int,
    num_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the heads, and of both weights."""
    heads, of_normed = _with_adjacent_heads(heads), _with_adjacent_heads(of_normed)
    num_tokens, num_heads, size = heads.shape
    num_normed = num_queries + num_keys
    tokens_each = triton.next_power_of_2(max(1, triton.cdiv(num_tokens, NORM_PROGRAMS)))
    num_programs = triton.cdiv(num_tokens, tokens_each)
    of_heads = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    of_weights = heads.new_empty(num_programs, num_normed, size, dtype=torch.float32)
    given = (heads, query_weight, key_weight, scales, of_normed, of_heads, of_weights, heads.stride(0))
    counts = (of_normed.stride(0), num_tokens, num_queries, num_normed)
    if num_tokens:
        sizes = (tokens_each, num_heads, size, *_blocks(num_heads, size))
        _norm_heads_gradient[(num_programs,)](*given, *counts, *sizes, num_warps=8)
    of_query, of_key = of_weights.sum(dim=0).split([num_queries, num_keys])
    return of_heads, of_query.sum(dim=0).to(query_weight.dtype), of_key.sum(dim=0).to(key_weight.dtype)


def _with_adjacent_heads(heads: Tensor) -> Tensor:
    """Only the distance between two tokens may be any."""
    return heads if heads.stride()[1:] == (heads.shape[-1], 1) else heads.contiguous()


def _blocks(*sizes: int) -> list[int]:
    return [triton.next_power_of_2(size) for size in sizes]


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
