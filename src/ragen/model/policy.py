"""Log-probs and entropies of sampled tokens under a model: the learner's view of what the sampler did.

    scored = score(model, packed, temperature=1.0)
    scored.log_probs, scored.entropies

The vocabulary projection runs only where a token was sampled, in chunks: the logits of a whole batch are never in
memory. Distributions are in float32, at the sampling temperature and over the full vocabulary, as in the sampler.

On CUDA, `vocabulary.token_scores` does it with Triton kernels. It is not used for the KL over the full vocabulary, nor
for a model whose logits are more than one matrix product.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ragen.algo.kl import full_kl
from ragen.model.packing import PackedTokens
from ragen.model.pointwise import has_kernels
from ragen.model.vocabulary import token_scores
from ragen.protocols import LanguageModel

MAX_CHUNK_LOGITS = 1 << 24  # 64 MB of float32


class Scored(NamedTuple):
    """One number per sampled token."""

    log_probs: Tensor
    entropies: Tensor  # of the token's distribution
    full_kl: Tensor | None = None  # KL of that distribution from the reference's, if given


def score(
    model: LanguageModel, packed: PackedTokens, temperature: float, reference: LanguageModel | None = None
) -> Scored:
    """Log-probs and entropies of the sampled tokens, and with `reference` the KL over the full vocabulary."""
    hidden = model.hidden(packed.ids, packed.attend.positions, packed.attend, packed.rows)
    theirs = None
    if reference is not None:
        with torch.no_grad():
            theirs = reference.hidden(packed.ids, packed.attend.positions, packed.attend, packed.rows)
    weight = model.head_weight if has_kernels(hidden) and theirs is None else None
    if weight is not None:
        return Scored(*token_scores(hidden, weight, packed.targets, temperature))
    chunk = max(1, MAX_CHUNK_LOGITS // model.shape.vocab_size)
    if len(hidden) <= chunk:
        return _score_rows(model, hidden, packed.targets, temperature, reference, theirs)
    parts = []
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        their_rows = None if theirs is None else theirs[rows]
        given = (model, hidden[rows], packed.targets[rows], temperature, reference, their_rows)
        is_training = torch.is_grad_enabled()
        parts.append(checkpoint(_score_rows, *given, use_reentrant=False) if is_training else _score_rows(*given))
    log_probs, entropies, kls = zip(*parts, strict=True)
    return Scored(torch.cat(log_probs), torch.cat(entropies), None if theirs is None else torch.cat(kls))


def _score_rows(
    model: LanguageModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    reference: LanguageModel | None,
    theirs: Tensor | None,
) -> Scored:
    log_probs = torch.log_softmax(model.logits(hidden).float() / temperature, dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    if reference is None or theirs is None:
        return Scored(chosen, entropies)
    with torch.no_grad():
        their_log_probs = torch.log_softmax(reference.logits(theirs).float() / temperature, dim=-1)
    return Scored(chosen, entropies, full_kl(log_probs, their_log_probs))
