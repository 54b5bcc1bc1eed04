"""Rows without a cache: each sampled token computes its conversation again.

    rows = RecomputedRows(model)                 # the same methods as `eager.EagerRows`

For models whose layers carry more from token to token than keys and values: convolutions, linear attention, state
spaces. The sampler then computes exactly what the learner does.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ragen.engine.native.eager import Draw, Inputs
from ragen.engine.native.sampler import uniforms
from ragen.model.attention import Packed
from ragen.protocols import SampledModel

MAX_TOKENS = 16384  # of a pass, padding included


class RecomputedRows:
    def __init__(self, model: SampledModel):
        self.model, self.device = model, next(model.parameters()).device
        self.rows: list[list[int]] = []  # ids; those beyond a row's length are left over from discarded tokens

    def add(self, count: int) -> None:
        self.rows += [[] for _ in range(count)]

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def reserve(self, num_tokens: int) -> None:
        """Nothing to reserve."""

    def copy(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        for target in targets:
            self.rows[target] = self.rows[source][:num_tokens]

    def fill(self, rows: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        for row, start, part in zip(rows, starts, ids, strict=True):
            self.rows[row][start:] = part

    def burst(self, inputs: Inputs, num_tokens: int, draw: Draw) -> tuple[list[list[int]], list[list[float]]]:
        """Sample tokens for every row: ids and log-probs."""
        keys = torch.tensor(inputs.keys, device=self.device)
        positions = torch.tensor(inputs.positions, device=self.device)
        for row, length, id_ in zip(self.rows, inputs.lengths, inputs.ids, strict=True):
            row[length:] = [id_]
        sampled, log_probs = [], []
        for offset in range(num_tokens):
            ids, chosen = draw(self._logits(), uniforms(keys, positions + offset))
            for row, id_ in zip(self.rows, ids.tolist(), strict=True):
                row.append(id_)
            sampled.append(ids)
            log_probs.append(chosen)
        return torch.stack(sampled, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist()

    def _logits(self) -> Tensor:
        """Of the token after each row's last."""
        return torch.cat([self._logits_of(rows) for rows in self._batches()])

    def _logits_of(self, rows: Sequence[list[int]]) -> Tensor:
        attend = Packed([len(row) for row in rows], self.device)
        ids = torch.tensor([id_ for row in rows for id_ in row], device=self.device)
        last = attend.starts[1:].long() - 1
        return self.model.logits(self.model.hidden(ids, attend.positions, attend, last))

    def _batches(self) -> Iterator[list[list[int]]]:
        batch: list[list[int]] = []
        for row in self.rows:
            longest = max(map(len, [*batch, row]))
            if batch and longest * (len(batch) + 1) > MAX_TOKENS:
                yield batch
                batch = []
            batch.append(row)
        yield batch
