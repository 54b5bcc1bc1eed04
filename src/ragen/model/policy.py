"""Log-probs and entropies of sampled tokens under a model: the learner's view of what the sampler did.

    log_probs, entropies = score(model, packed, temperature=1.0)

The vocabulary projection runs only where a token was sampled, in chunks: the logits of a whole batch are never in
memory. Distributions are taken in float32 at the sampling temperature over the full vocabulary, as by the sampler.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ragen.rollout.batch import PackedTokens

MAX_CHUNK_LOGITS = 1 << 24  # 64 MB of float32


def score(model: Any, packed: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-prob of each sampled token and the entropy of the distribution it was drawn from."""
    hidden = model.hidden(packed.ids, packed.attend.positions, packed.attend)[packed.rows]
    chunk = max(1, MAX_CHUNK_LOGITS // model.shape.vocab_size)
    if len(hidden) <= chunk:
        return _score_rows(model, hidden, packed.targets, temperature)
    parts = [
        checkpoint(_score_rows, model, rows, targets, temperature, use_reentrant=False)
        if torch.is_grad_enabled()
        else _score_rows(model, rows, targets, temperature)
        for rows, targets in zip(hidden.split(chunk), packed.targets.split(chunk), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _score_rows(model: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(model.logits(hidden).float() / temperature, dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropies
