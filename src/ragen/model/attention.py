"""What may look at what: the `attend` functions of the learner.

    attend = Packed(lengths=[7, 3, 12])            # three sequences, one after the other, each causal in itself
    hidden_T = decoder.hidden(ids_T, attend.positions, attend)

Linear layers run on packed tokens; only here, where sequences must be told apart, are they laid out side by side,
except on CUDA, where the variable-length kernel needs no padding.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


class Packed:
    """Causal attention within each of several packed sequences."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        assert len(lengths) > 0 and min(lengths) > 0
        self.lengths = list(lengths)
        self.longest = max(lengths)
        self.starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        counts = torch.tensor(self.lengths, device=device)
        num_tokens = int(self.starts[-1])
        self.sequences = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), counts, output_size=num_tokens
        )
        self.positions = torch.arange(num_tokens, device=device) - self.starts[:-1].long()[self.sequences]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.is_cuda:
            return self._variable_length(query, key, value)
        return self._padded(query, key, value)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Right-padded, so that causality alone keeps real tokens from looking at padding."""
        query, key, value = (self._lay_out(part) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.transpose(1, 2)[self.sequences, self.positions]

    def _lay_out(self, packed: Tensor) -> Tensor:
        """[T, heads, head_dim] -> [sequences, heads, longest, head_dim]."""
        padded = packed.new_zeros(len(self.lengths), self.longest, *packed.shape[1:])
        return padded.index_put((self.sequences, self.positions), packed).transpose(1, 2)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:  # the kernel's own sharing of key heads is younger than the oldest torch that we allow
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        lengths = (self.starts, self.starts, self.longest, self.longest)
        return varlen_attn(query, key, value, *lengths, window_size=(-1, 0))  # all keys to the left, none to the right
