"""Rows on any device, one operation after the other: the engine's device part on a CPU, and where graphs do not serve.

rows = EagerRows(model)
rows.add(2)
rows.reserve(64)
rows.fill([0, 1], starts=[0, 0], ids=[[5, 6, 7], [8]])
ids, log_probs = rows.burst(Inputs(lengths=[3, 1], ids=[9, 4], keys=[11, 12], positions=[0, 0]), 4, draw)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragen.engine.native.cache import Decode, Prefill, RowCache
from ragen.engine.native.sampler import uniforms
from ragen.protocols import SampledModel

# A kernel plan for every new length would cost more than the attention itself.
CUDA_LENGTH_STEP = 128

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, uniforms -> ids, log-probs


class Inputs(NamedTuple):
    """What a burst starts from, for each row; zeros for an empty one."""

    lengths: list[int]  # tokens in the cache
    ids: list[int]  # the next input
    keys: list[int]  # of the draws, signed
    positions: list[int]  # of the next draw


class EagerRows:
    def __init__(self, model: SampledModel):
        shape, weight = model.shape, next(model.parameters())
        self.model, self.device = model, weight.device
        self.cache = RowCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, 0, weight)
        self.length_step = CUDA_LENGTH_STEP if weight.is_cuda else 1

    def add(self, count: int) -> None:
        self.cache.add_rows(count)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep_rows(torch.tensor(rows, dtype=torch.int64, device=self.device))

    def reserve(self, num_tokens: int) -> None:
        self.cache.reserve(num_tokens)

    def copy(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        self.cache.copy(source, targets, num_tokens)

    def fill(self, rows: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Compute tokens into the cache, from `starts[i]` on in row `rows[i]`."""
        attend = Prefill(self.cache, rows, starts, [len(part) for part in ids])
        packed = torch.tensor([id_ for part in ids for id_ in part], device=self.device)
        self.model.fill(packed, attend.positions, attend)

    def burst(self, inputs: Inputs, num_tokens: int, draw: Draw) -> tuple[list[list[int]], list[list[float]]]:
        """Sample tokens for every row: ids and log-probs."""
        model, cache = self.model, self.cache
        keys = torch.tensor(inputs.keys, device=self.device)
        positions = torch.tensor(inputs.positions, device=self.device)
        cache.lengths = torch.tensor(inputs.lengths, device=self.device)
        ids = torch.tensor(inputs.ids, device=self.device)
        longest = max(inputs.lengths)
        cache.reserve(longest + num_tokens)
        sampled, log_probs = [], []
        for offset in range(num_tokens):
            seen = -(-(longest + offset + 1) // self.length_step) * self.length_step
            hidden = model.hidden(ids, cache.lengths, Decode(cache, seen))
            ids, chosen = draw(model.logits(hidden), uniforms(keys, positions + offset))
            cache.lengths = cache.lengths + 1
            sampled.append(ids)
            log_probs.append(chosen)
        return torch.stack(sampled, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist()
