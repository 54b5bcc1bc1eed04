"""A cache at fixed addresses, and forward passes over it made of few kernels: what CUDA graphs are captured from.

    slots = Slots(decoder, num_rows=128)
    slots.reserve(512)                           # returns True if addresses changed
    slots.fill(rows, starts, ids)                # prefill: packed, no padding, no masks
    logits = slots.logits(num_rows=96)           # one more token for the first rows, from `state`

`state` holds what a step reads and moves on, on the device: for each row the number of its tokens, its last id, its
draw key and its draw position. With Triton, attention, norms, positions and SwiGLU are single kernels; without it, the
operations of the model are used, which then may be a Hugging Face module.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ragen.engine.native.cache import Decode, Prefill, RowCache
from ragen.engine.native.slot_memory import capacity
from ragen.model.decoder import Decoder, Layer
from ragen.protocols import SampledModel

LENGTHS, IDS, KEYS, POSITIONS = range(4)  # rows of `state`


class Slots:
    def __init__(self, decoder: SampledModel, num_rows: int, has_triton: bool):
        shape, weight = decoder.shape, next(decoder.parameters())
        self.decoder, self.num_rows, self.has_triton, self.device = decoder, num_rows, has_triton, weight.device
        # One row more than can be used: padding is written there.
        self.cache = RowCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, num_rows + 1, weight)
        self.state = torch.zeros(4, num_rows, dtype=torch.int64, device=weight.device)
        self.angles: tuple[Tensor, Tensor]  # cosines and sines of all positions, for our kernels

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.cache.keys, *self.cache.values))

    def reserve(self, num_tokens: int) -> bool:
        """Make room for rows of this length; True if the cache moved."""
        if num_tokens <= self.cache.capacity:
            return False
        self.cache.reserve(capacity(num_tokens))
        if self.has_triton:
            self.angles = _native(self.decoder).angles(torch.arange(self.cache.capacity, device=self.device))
        return True

    def add_rows(self, count: int) -> None:
        """The cache moves."""
        self.cache.add_rows(count)
        self.state = F.pad(self.state, (0, count))
        self.num_rows += count

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in this order, in place."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for part in (*self.cache.keys, *self.cache.values):
            part[: len(rows)] = part[index]

    def copy(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        index = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for part in (*self.cache.keys, *self.cache.values):
            part[:, :, :num_tokens].index_copy_(0, index, part[source, :, :num_tokens].expand(len(index), -1, -1, -1))

    # --- forward passes -----------------------------------------------------------------------------------------

    def fill(self, rows: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Compute tokens into the cache, from `starts[i]` on in row `rows[i]`."""
        counts = [len(part) for part in ids]
        packed = [id_ for part in ids for id_ in part]
        if not self.has_triton:
            attend = Prefill(self.cache, rows, starts, counts)
            self.decoder.fill(torch.tensor(packed, device=self.device), attend.positions, attend)
            return
        given, tiles = self.packed(rows, starts, ids, num_tokens=len(packed))
        self.fill_packed(given.to(self.device), tiles.to(self.device))

    def packed(
        self, rows: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]], num_tokens: int,
        num_tiles: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What `fill_packed` takes, in the CPU's memory: padded with tokens of the spare row and empty tiles."""
        from ragen.engine.native.kernels import tiles_of

        counts = [len(part) for part in ids]
        given = torch.zeros(3, num_tokens, dtype=torch.int64)
        given[2] = self.num_rows
        given[:, : sum(counts)] = torch.tensor(
            [
                [id_ for part in ids for id_ in part],
                [start + offset for start, count in zip(starts, counts, strict=True) for offset in range(count)],
                [row for row, count in zip(rows, counts, strict=True) for _ in range(count)],
            ]
        )
        listed = tiles_of(rows, starts, counts)
        tiles = torch.zeros(max(num_tiles, len(listed)), 4, dtype=torch.int32)
        tiles[: len(listed)] = torch.tensor(listed, dtype=torch.int32).view(len(listed), 4)
        return given, tiles

    def fill_packed(self, given: Tensor, tiles: Tensor) -> None:
        """Compute tokens into the cache; `given` is int64: their ids, positions and rows."""
        from ragen.engine.native.kernels import attend_to_tiles

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_to_tiles(query, keys, values, tiles)

        self._forward(given[0], given[1], given[2], attend, only_fill=True)

    def logits(self, num_rows: int, longest: int) -> Tensor:
        """The next token's logits of the first rows; without Triton, rows have at most `longest` tokens."""
        lengths, ids = self.state[LENGTHS, :num_rows], self.state[IDS, :num_rows]
        if not self.has_triton:
            hidden = self.decoder.hidden(ids, lengths, Decode(self.cache, longest, lengths))
            return self.decoder.logits(hidden)
        from ragen.engine.native.kernels import attend_to_rows

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_to_rows(query, keys, values, lengths)

        return self.decoder.logits(self._forward(ids, lengths, None, attend))

    def _forward(self, ids: Tensor, positions: Tensor, rows: Tensor | None, attend, only_fill: bool = False) -> Tensor:
        """`Decoder.hidden`, or `Decoder.fill`, in few kernels."""
        from ragen.engine.native.kernels import rotate_and_store
        from ragen.model.pointwise_kernels import add_norm, swiglu

        decoder = _native(self.decoder)
        x, delta = decoder.embed(ids), None
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, Layer)
            keys, values = self.cache.keys[index], self.cache.values[index]
            x, normed, _ = add_norm(x, delta, layer.attention_norm.weight, layer.attention_norm.eps)
            query = rotate_and_store(layer.project(normed).flatten(1), positions, rows, self.angles, keys, values)
            if only_fill and index == len(decoder.layers) - 1:
                return x
            mixed = attend(query, keys, values).flatten(-2)
            x, normed, _ = add_norm(x, layer.out(mixed), layer.mlp_norm.weight, layer.mlp_norm.eps)
            delta = layer.down(swiglu(layer.gate_up(normed)))
        return add_norm(x, delta, decoder.norm.weight, decoder.norm.eps)[1]


def _native(model: SampledModel) -> Decoder:
    """Only our decoder is made of our kernels."""
    assert isinstance(model, Decoder)
    return model
