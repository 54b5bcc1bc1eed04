"""Log-probs and entropies over the vocabulary without keeping logits: the learner's head on CUDA.

    log_probs_T, entropies_T = token_scores(hidden, weight, targets, temperature=1.0)

Logits exist for a chunk of rows only. The backward pass computes them a second time, turns them into their gradient in
place, and adds each chunk to one gradient of the weight, in float32. That is four matrix products and two passes over
the logits of each chunk, one in each direction, instead of one autograd graph and one weight gradient per chunk.

With z = logits / temperature, p = softmax(z) and H the entropy:

    d log p_t / dz_j = [j = t] - p_j                dH / dz_j = -p_j (log p_j + H)

On CUDA both passes are Triton kernels (`vocabulary_kernels`); the plain functions here say what they compute.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ragen.model.activations import CHUNK_LOGITS, chunk_rows


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_logits: int = CHUNK_LOGITS
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution. `weight` is the head: [vocabulary, hidden size]."""
    num_rows = chunk_rows(len(hidden), weight.shape[0], chunk_logits)
    return _TokenScores.apply(hidden, weight, targets, temperature, num_rows)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        score, _ = _passes(hidden)
        logits = hidden.new_empty(num_rows, weight.shape[0])
        parts = [
            score(torch.mm(rows, weight.t(), out=logits[: len(rows)]), wanted, temperature)
            for rows, wanted in zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
        ]
        log_probs, entropies, masses = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, entropies, masses)
        ctx.temperature, ctx.num_rows = temperature, num_rows
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropies, masses = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        _, differentiate = _passes(hidden)
        logits = hidden.new_empty(ctx.num_rows, weight.shape[0])
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        # A single chunk is one product, which rounds once; several are added up in at least float32.
        is_single = len(hidden) <= ctx.num_rows
        total_type = weight.dtype if is_single else torch.promote_types(weight.dtype, torch.float32)
        of_weight: Tensor | None = None
        columns = (hidden, targets, entropies, masses, of_log_probs, of_entropies)
        for start in range(0, len(hidden), ctx.num_rows):
            rows, *given = (column[start : start + ctx.num_rows] for column in columns)
            slopes = torch.mm(rows, weight.t(), out=logits[: len(rows)])
            differentiate(slopes, *given, ctx.temperature)
            if of_hidden is not None:
                torch.mm(slopes, weight, out=of_hidden[start : start + ctx.num_rows])
            if wants_weight:
                of_weight = add_product(of_weight, slopes.t(), rows, total_type)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + left @ right` in `dtype`, in place; None is zero."""
    if dtype == left.dtype:
        return left @ right if total is None else total.addmm_(left, right)
    if not left.is_cuda:  # no kernel with another output type
        product = left.to(dtype) @ right.to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)


# --- the two passes over a chunk of logits --------------------------------------------------------------------------


def _passes(hidden: Tensor) -> tuple[Any, Any]:
    if hidden.is_cuda:
        from ragen.model import vocabulary_kernels as kernels

        return kernels.score_rows, kernels.differentiate_rows
    return score_rows, differentiate_rows


def score_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the target's log-prob, the entropy, and the log of the summed exponentials."""
    scaled = _scaled(logits, temperature)
    mass = torch.logsumexp(scaled, dim=-1)
    entropies = mass - (torch.exp(scaled - mass[:, None]) * scaled).sum(dim=-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - mass, entropies, mass


def differentiate_rows(
    logits: Tensor,
    targets: Tensor,
    entropies: Tensor,
    mass: Tensor,
    of_log_probs: Tensor,
    of_entropies: Tensor,
    temperature: float,
) -> None:
    """Overwrite logits with the gradient of the loss with respect to them."""
    log_probs = _scaled(logits, temperature) - mass[:, None]
    probs = log_probs.exp()
    slopes = -probs * (of_log_probs[:, None] + of_entropies[:, None] * (log_probs + entropies[:, None]))
    slopes.scatter_add_(-1, targets[:, None], of_log_probs[:, None])
    logits.copy_(slopes / temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
