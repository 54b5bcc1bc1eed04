"""Triton kernels of the sampler: positions and cache writes, attention over the cache, and drawing a token.

    query = rotate_and_store(qkv, positions, rows, angles, keys, values)
    mixed = attend_to_rows(query, keys, values, lengths)                       # one query for each row
    mixed = attend_to_tiles(query, keys, values, tiles)                        # several, see `tiles_of`
    draw(logits, temperature, state, out_ids, out_log_probs, step)

Keys and values are one layer's part of the cache, [rows, kv heads, capacity, head_dim]. Import this module only where
Triton is installed; `TRITON_INTERPRET=1` runs it on a CPU.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
TILE = 64  # queries of a row that a program of `attend_to_tiles` computes together
VOCABULARY_BLOCK = 2048  # tokens whose mass is summed first
KEY_BLOCK = 32  # keys that a program of `attend_to_rows` reads at a time
# At least this many pairs of row and key head: the parts into which their keys are split, so that no processor idles.
SPLITS = ((192, 1), (48, 4), (0, 16))


# --- positions and cache --------------------------------------------------------------------------------------------


def rotate_and_store(
    qkv: Tensor, positions: Tensor, rows: Tensor | None, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate queries and keys to their positions, store keys and values; returns the queries.

    Token i belongs to row `rows[i]`, or to row i. `angles` are cosines and sines of all positions.
    """
    num_tokens, width = qkv.shape
    _, num_kv_heads, _, head_dim = keys.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    _rotate_and_store[(num_tokens, num_heads + 2 * num_kv_heads)](
        qkv, positions, positions if rows is None else rows, *angles, query, keys, values, *keys.stride()[:3],
        HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2),
        HAS_ROWS=rows is not None, num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _rotate_and_store(
    qkv, positions, rows, cosines, sines, query, keys, values, row_stride, head_stride, token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kind = query.dtype.element_ty
    position = tl.load(positions + token).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64) if HAS_ROWS else token
    index = tl.arange(0, BLOCK)
    inside = index < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + index
    first = tl.load(source, mask=inside)
    second = tl.load(source + HALF, mask=inside)
    if head < HEADS + KV_HEADS:
        cosine = tl.load(cosines + position * HALF + index, mask=inside).to(tl.float32)
        sine = tl.load(sines + position * HALF + index, mask=inside).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        # Rounded after every product, as `pointwise.rope` does.
        first = ((a * cosine).to(kind).to(tl.float32) - (b * sine).to(kind).to(tl.float32)).to(kind)
        second = ((b * cosine).to(kind).to(tl.float32) + (a * sine).to(kind).to(tl.float32)).to(kind)
    if head < HEADS:
        target = query + (token * HEADS + head) * 2 * HALF + index
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        place = row * row_stride + ((head - HEADS) % KV_HEADS) * head_stride + position * token_stride + index
        if head < HEADS + KV_HEADS:
            tl.store(keys + place, first, mask=inside)
            tl.store(keys + place + HALF, second, mask=inside)
        else:
            tl.store(values + place, first, mask=inside)
            tl.store(values + place + HALF, second, mask=inside)


# --- attention: one query for each row ------------------------------------------------------------------------------


def attend_to_rows(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Row i attends to its first `lengths[i] + 1` tokens. Of few rows the keys are split; a second kernel adds up."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    splits = next(splits for least, splits in SPLITS if num_rows * num_kv_heads >= least)
    padded = max(16, triton.next_power_of_2(head_dim))
    mixed = torch.empty_like(query)
    parts, summary = mixed, query.new_empty(2, num_rows, num_heads, splits, dtype=torch.float32)  # top score, mass
    if splits > 1:
        parts = query.new_empty(num_rows, num_heads, splits, head_dim, dtype=torch.float32)
    _attend_part[(num_rows, num_kv_heads, splits)](
        query, keys, values, lengths, parts, summary[0], summary[1], LOG2_E * head_dim**-0.5, *keys.stride()[:3],
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)), DIM=head_dim, DIM_PADDED=padded,
        BLOCK=KEY_BLOCK, SPLITS=splits, PRECISION=_precision(query), num_warps=2, num_stages=4,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(num_rows, num_heads)](
            parts, summary[0], summary[1], mixed, DIM=head_dim, DIM_PADDED=padded, SPLITS=splits, num_warps=1
        )
    return mixed


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # the latter has no meaning for 16 bits


@triton.jit
def _attend_part(
    query, keys, values, lengths, parts, largest, masses, scale, row_stride, head_stride, token_stride,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32) + 1
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * chunk
    end = tl.minimum(start + chunk, length)
    member = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    head = row * tl.num_programs(1) * GROUP + kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(query + head[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    base = row * row_stride + kv_head * head_stride
    top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    mass = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        present = token < end
        place = base + token.to(tl.int64) * token_stride
        k = tl.load(keys + place[None, :] + dim[:, None], mask=present[None, :] & (dim < DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(present[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(scores - new_top[:, None])
        v = tl.load(values + place[:, None] + dim[None, :], mask=present[:, None] & (dim < DIM)[None, :], other=0.0)
        mass = mass * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    place = head * SPLITS + split
    if SPLITS == 1:
        mixed = (mixed / mass[:, None]).to(parts.dtype.element_ty)
    else:
        tl.store(largest + place, top, mask=member < GROUP)
        tl.store(masses + place, mass, mask=member < GROUP)
    tl.store(parts + place[:, None] * DIM + dim[None, :], mixed, mask=real)


@triton.jit
def _add_parts(
    parts, largest, masses, out, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PADDED)
    top = tl.load(largest + head * SPLITS + split)
    share = tl.exp2(top - tl.max(top, axis=0))
    mass = tl.sum(tl.load(masses + head * SPLITS + split) * share, axis=0)
    place = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    mixed = tl.load(parts + place, mask=(dim < DIM)[None, :], other=0.0)
    mixed = tl.sum(mixed * share[:, None], axis=0) / mass
    tl.store(out + head * DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < DIM)


# --- attention: several queries of some rows ------------------------------------------------------------------------


def tiles_of(rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Runs of at most `TILE` queries: their row, the index of the first, its position, and their number."""
    tiles, first = [], 0
    for row, start, count in zip(rows, starts, counts, strict=True):
        for offset in range(0, count, TILE):
            tiles.append([row, first + offset, start + offset, min(TILE, count - offset)])
        first += count
    return tiles


def attend_to_tiles(query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor) -> Tensor:
    """Each query attends to its own row, up to itself. `tiles` is int32 [tiles, 4], see `tiles_of`."""
    _, num_heads, head_dim = query.shape
    mixed = torch.empty_like(query)
    _attend_tile[(len(tiles), num_heads)](
        query, keys, values, tiles, mixed, LOG2_E * head_dim**-0.5, *keys.stride()[:3],
        GROUP=num_heads // keys.shape[1], DIM=head_dim, DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        TILE=TILE, BLOCK=64, PRECISION=_precision(query), num_warps=4, num_stages=2,
    )  # fmt: skip
    return mixed


@triton.jit
def _attend_tile(
    query, keys, values, tiles, out, scale, row_stride, head_stride, token_stride, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles + tile * 4).to(tl.int64)
    first = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    start = tl.load(tiles + tile * 4 + 2)
    count = tl.load(tiles + tile * 4 + 3)
    number = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PADDED)
    real = (number < count)[:, None] & (dim < DIM)[None, :]
    place = ((first + number) * tl.num_programs(1) + head)[:, None] * DIM + dim[None, :]
    q = tl.load(query + place, mask=real, other=0.0)
    base = row * row_stride + (head // GROUP) * head_stride
    top = tl.full([TILE], -float("inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIM_PADDED], tl.float32)
    end = start + count
    for at in range(0, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        present = token < end
        offset = base + token.to(tl.int64) * token_stride
        k = tl.load(keys + offset[None, :] + dim[:, None], mask=present[None, :] & (dim < DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        # Queries beyond `count` see what the last one could see: their results are not stored.
        scores = tl.where(present[None, :] & (token[None, :] <= start + number[:, None]), scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(scores - new_top[:, None])
        v = tl.load(values + offset[:, None] + dim[None, :], mask=present[:, None] & (dim < DIM)[None, :], other=0.0)
        mass = mass * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    tl.store(out + place, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=real)


# --- drawing a token ------------------------------------------------------------------------------------------------


def draw(
    logits: Tensor, temperature: Tensor, state: Tensor, ids: Tensor, log_probs: Tensor, step: Tensor, greedy: bool
) -> None:
    """Sample a token for each row, record it at `step`, and move the rows on by it.

    As `sampler.sample` and `sampler.uniforms`, in two passes over the logits: the mass of blocks of tokens, then the
    tokens of one block. `state` is int64: lengths, last ids, draw keys and draw positions of all rows; `ids` and
    `log_probs` are [steps, rows].
    """
    num_rows, size = logits.shape
    num_blocks = triton.cdiv(size, VOCABULARY_BLOCK)
    summary = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    _sum_blocks[(num_rows, num_blocks)](
        logits, temperature, summary[0], summary[1], size, BLOCK=VOCABULARY_BLOCK, num_warps=4
    )
    _choose[(num_rows,)](
        logits, temperature, summary[0], summary[1], state, ids, log_probs, step, size, num_blocks, state.stride(0),
        ids.stride(0), BLOCKS_PADDED=triton.next_power_of_2(num_blocks), BLOCK=VOCABULARY_BLOCK, GREEDY=greedy,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _sum_blocks(logits, temperature, largest, masses, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * size + token, mask=token < size, other=-float("inf")).to(tl.float32)
    score = score / tl.load(temperature)
    top = tl.max(score, axis=0)
    # All of a block may be excluded (-inf): its mass is then zero, not undefined.
    mass = tl.sum(tl.where(score > -float("inf"), tl.exp(score - top), 0.0), axis=0)
    tl.store(largest + row * tl.num_programs(1) + block, top)
    tl.store(masses + row * tl.num_programs(1) + block, mass)


@triton.jit
def _choose(
    logits, temperature, largest, masses, state, ids, log_probs, step, size, num_blocks, state_stride, ids_stride,
    BLOCKS_PADDED: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS_PADDED)
    inside = index < num_blocks
    tops = tl.load(largest + row * num_blocks + index, mask=inside, other=-float("inf"))
    top = tl.max(tops, axis=0)
    mass = tl.load(masses + row * num_blocks + index, mask=inside, other=0.0).to(tl.float64)
    mass *= tl.exp(tops - top).to(tl.float64)
    total = tl.sum(mass, axis=0)
    position = tl.load(state + 3 * state_stride + row)
    target = _uniform(tl.load(state + 2 * state_stride + row), position) * total
    if GREEDY:
        block = tl.argmax(tops, axis=0)
    else:
        block = _first_beyond(mass, target, index)
    consumed = tl.sum(tl.where(index < block, mass, 0.0), axis=0)

    within = tl.arange(0, BLOCK)
    token = block * BLOCK + within
    score = tl.load(logits + row * size + token, mask=token < size, other=-float("inf")).to(tl.float32)
    score = score / tl.load(temperature)
    if GREEDY:
        chosen = tl.argmax(score, axis=0)
    else:
        chosen = _first_beyond(tl.exp(score - top).to(tl.float64), tl.maximum(target - consumed, 0.0), within)
    log_prob = tl.sum(tl.where(within == chosen, score, 0.0), axis=0) - top - tl.log(total.to(tl.float32))
    id_ = (block * BLOCK + chosen).to(tl.int64)
    at = tl.load(step)
    tl.store(ids + at * ids_stride + row, id_)
    tl.store(log_probs + at * ids_stride + row, log_prob)
    tl.store(state + state_stride + row, id_)
    tl.store(state + row, tl.load(state + row) + 1)
    tl.store(state + 3 * state_stride + row, position + 1)


@triton.jit
def _first_beyond(mass, target, index):
    """The first whose cumulative mass exceeds the target; within rounding of the end, the last with mass."""
    found = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
    last = tl.max(tl.where(mass > 0, index, 0), axis=0)
    return tl.minimum(found, last)


@triton.jit
def _uniform(key, position):
    """`sampler.uniforms`: the same splitmix64, on signed numbers whose products wrap."""
    x = key + (position + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
