"""Keys and values of the running conversations: one row each, filled from the left.

A row keeps its tokens from turn to turn, so a turn computes only new tokens. `Decode` adds one token to every row,
`Prefill` several tokens to some rows; both are `attend` functions of the decoder. Entries beyond a row's length are
left over from discarded tokens: nothing attends to them, and the next token overwrites them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class RowCache:
    """Rows x capacity, for each layer. `lengths` is the number of valid tokens in each row."""

    GROWTH = 128  # capacity grows in these steps

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, num_rows: int, like: Tensor):
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
        self.capacity = 0
        size = (num_rows, num_kv_heads, 0, head_dim)
        self.keys = [like.new_empty(size) for _ in range(num_layers)]
        self.values = [like.new_empty(size) for _ in range(num_layers)]

    def reserve(self, num_tokens: int) -> None:
        """Make room for rows of this length."""
        if num_tokens <= self.capacity:
            return
        added = -(-(num_tokens - self.capacity) // self.GROWTH) * self.GROWTH
        self._replace(lambda part: F.pad(part, (0, 0, 0, added)))
        self.capacity += added

    def add_rows(self, count: int) -> None:
        """Append `count` rows."""
        if count:
            self.lengths = F.pad(self.lengths, (0, count))
            self._replace(lambda part: F.pad(part, (0, 0, 0, 0, 0, 0, 0, count)))

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.lengths = self.lengths[rows]
        self._replace(lambda part: part[rows])

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors, one at a time: only one of them is in memory twice."""
        for parts in (self.keys, self.values):
            for layer in range(len(parts)):
                parts[layer] = make(parts[layer])

    def copy(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Copy the first tokens of one row into others: a shared prefix is computed once."""
        for parts in (self.keys, self.values):
            for part in parts:
                part[list(targets), :, :num_tokens] = part[source, :, :num_tokens]


def visibility(last: Tensor, longest: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """A mask to add, [*last, longest]: 0 for the tokens up to `last`, of which a window is the last ones; else -inf."""
    at = torch.arange(longest, device=last.device)
    visible = at <= last[..., None]
    if window is not None:
        visible &= at > last[..., None] - window
    return torch.zeros(visible.shape, dtype=dtype, device=last.device).masked_fill_(~visible, -torch.inf)


class Decode:
    """One new token for every row, or for the first rows, which have these lengths; none is longer than `longest`."""

    def __init__(self, cache: RowCache, longest: int, lengths: Tensor | None = None):
        self.cache, self.longest = cache, longest
        self.lengths = cache.lengths if lengths is None else lengths
        self.rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.lengths] = key
        values[self.rows, :, self.lengths] = value
        if window not in self.masks:
            self.masks[window] = visibility(self.lengths, self.longest, window, keys.dtype)[:, None, None]
        # Query heads that share a key head become more queries to it, so no key is repeated.
        grouped = query.unflatten(1, (key.shape[1], -1))
        seen = (slice(0, len(self.rows)), slice(None), slice(0, self.longest))
        mixed = F.scaled_dot_product_attention(grouped, keys[seen], values[seen], attn_mask=self.masks[window])
        return mixed.flatten(1, 2)


class Prefill:
    """New tokens for some rows, packed row by row."""

    def __init__(self, cache: RowCache, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]):
        self.cache = cache
        device = cache.lengths.device
        self.rows = torch.tensor(rows, device=device)
        self.is_all_rows = list(rows) == list(range(len(cache.lengths)))  # then the cache is read without a copy
        first, counted = torch.tensor(starts, device=device), torch.tensor(counts, device=device)
        self.index = torch.repeat_interleave(torch.arange(len(rows), device=device), counted)
        within = torch.arange(len(self.index), device=device) - (counted.cumsum(0) - counted)[self.index]
        self.within = within
        self.positions = first[self.index] + within
        self.num_queries = max(counts)
        self.longest = max(start + count for start, count in zip(starts, counts, strict=True))
        # A query sees its own row up to itself. Rows with fewer queries than the longest repeat harmless ones.
        self.last_visible = first[:, None] + torch.arange(self.num_queries, device=device)
        self.masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        self.store(layer, key, value)
        if window not in self.masks:
            self.masks[window] = visibility(self.last_visible, self.longest, window, key.dtype)[:, None]
        num_kv_heads, heads_per_kv = key.shape[1], query.shape[1] // key.shape[1]
        laid_out = query.new_empty(len(self.rows), self.num_queries, *query.shape[1:])
        laid_out[self.index, self.within] = query
        # [rows, queries, heads, dim] -> [rows, kv heads, heads of it x queries, dim]
        grouped = laid_out.unflatten(2, (num_kv_heads, heads_per_kv)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(
            grouped,
            self._visible(self.cache.keys[layer]),
            self._visible(self.cache.values[layer]),
            attn_mask=self.masks[window].repeat(1, 1, heads_per_kv, 1),
        )
        mixed = mixed.unflatten(2, (heads_per_kv, self.num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return mixed[self.index, self.within]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        rows = self.rows[self.index]
        self.cache.keys[layer][rows, :, self.positions] = key
        self.cache.values[layer][rows, :, self.positions] = value

    def _visible(self, part: Tensor) -> Tensor:
        return (part if self.is_all_rows else part[self.rows])[:, :, : self.longest]
