"""The two passes of `vocabulary` over a chunk of logits as Triton kernels: each reads the logits once.

    log_probs, entropies, mass = score_rows(logits, targets, temperature)
    differentiate_rows(logits, targets, entropies, mass, of_log_probs, of_entropies, temperature)     # in place

Imported on CUDA only, and in tests with Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _score(logits, targets, log_probs, entropies, masses, temperature, vocab_size: tl.constexpr, block: tl.constexpr):
    """One row. Each lane has its maximum so far, and sums of exp(z - maximum) and of that times z."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * vocab_size
    largest = tl.full([block], -1e30, tl.float32)  # finite: infinities would subtract to nothing
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for first in range(0, vocab_size, block):
        columns = first + tl.arange(0, block)
        inside = columns < vocab_size
        scaled = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        grows = scaled > largest
        smaller = tl.exp(-tl.abs(scaled - largest))  # of the two, relative to the larger
        shrink, share = tl.where(grows, smaller, 1.0), tl.where(grows, 1.0, smaller)
        total = total * shrink + share
        weighted = weighted * shrink + tl.where(inside, share * scaled, 0.0)
        largest = tl.maximum(largest, scaled)
    maximum = tl.max(largest, axis=0)
    shrink = tl.exp(largest - maximum)
    summed = tl.sum(total * shrink, axis=0)
    mass = maximum + tl.log(summed)
    target = tl.load(targets + row)
    chosen = tl.load(start + target).to(tl.float32) / temperature
    tl.store(log_probs + row, chosen - mass)
    tl.store(entropies + row, mass - tl.sum(weighted * shrink, axis=0) / summed)
    tl.store(masses + row, mass)


@triton.jit
def _differentiate(
    logits,
    targets,
    entropies,
    masses,
    of_log_probs,
    of_entropies,
    temperature,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < vocab_size
    places = logits + row.to(tl.int64) * vocab_size + columns
    target, mass, entropy = tl.load(targets + row), tl.load(masses + row), tl.load(entropies + row)
    of_log_prob, of_entropy = tl.load(of_log_probs + row), tl.load(of_entropies + row)
    log_prob = tl.load(places, mask=inside, other=0.0).to(tl.float32) / temperature - mass
    slope = -tl.exp(log_prob) * (of_log_prob + of_entropy * (log_prob + entropy))
    slope += tl.where(columns == target, of_log_prob, 0.0)
    tl.store(places, (slope / temperature).to(logits.dtype.element_ty), mask=inside)


def score_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `vocabulary.score_rows`."""
    num_rows, vocab_size = logits.shape
    log_probs, entropies, masses = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    _score[(num_rows,)](logits, targets, log_probs, entropies, masses, temperature, vocab_size, BLOCK, num_warps=8)
    return log_probs, entropies, masses


def differentiate_rows(
    logits: Tensor,
    targets: Tensor,
    entropies: Tensor,
    mass: Tensor,
    of_log_probs: Tensor,
    of_entropies: Tensor,
    temperature: float,
) -> None:
    """As `vocabulary.differentiate_rows`."""
    num_rows, vocab_size = logits.shape
    given = (targets, entropies, mass, of_log_probs.contiguous(), of_entropies.contiguous())
    grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
    _differentiate[grid](logits, *given, temperature, vocab_size, BLOCK, num_warps=8)
