"""One token from a row of logits, by inverting the CDF at a uniform that is a hash of the token's coordinates.

    ids, log_probs = sample(logits, uniforms(keys, positions), sampling)

There is no generator and no state: the prompt's key and the position fix the draw of a token, whatever else is in the
batch. The log-prob is that of the full distribution at the sampling temperature, before top-p and top-k.
"""

import torch
from torch import Tensor

from ragen.engine.base import Sampling

# The splitmix64 mixer, its constants as signed 64-bit numbers: integer products wrap on every device.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def signed(key: int) -> int:
    """A 64-bit key as a signed number, as tensors hold it."""
    return key - (1 << 64) if key >= 1 << 63 else key


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, each a function of its key and position (both int64)."""
    x = keys + (positions + 1) * _STEP
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, count: int) -> Tensor:
    """A logical right shift; tensors have only the arithmetic one."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def sample(logits: Tensor, draws: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The sampled id of each row and its log-prob."""
    log_probs = torch.log_softmax(logits.float() / (1.0 if sampling.greedy else sampling.temperature), dim=-1)
    if sampling.greedy:
        ids = log_probs.argmax(dim=-1)
    else:
        ids = _invert(_restrict(log_probs.exp(), sampling), draws)
    return ids, log_probs.gather(-1, ids[:, None])[:, 0]


def _invert(probs: Tensor, draws: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds the draw's share of the total."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # A draw within rounding of 1 can fall beyond the last token: take the last one with mass.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(ids, last)


def _restrict(probs: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k and top-p exclude; ties at the border go to the lower id."""
    if sampling.top_k < 1 and sampling.top_p >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k >= 1:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        before = ordered.cumsum(dim=-1) - ordered
        kept &= before < sampling.top_p  # keep the token that crosses the limit
    return torch.zeros_like(probs).scatter(-1, order, ordered * kept)
