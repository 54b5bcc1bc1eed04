"""Attention over packed sequences: the `attend` function of the learner.

    attend = Packed(lengths=[7, 3, 12])            # three concatenated sequences, each causal
    hidden_T = decoder.hidden(ids_T, attend.positions, attend)

Linear layers run on packed tokens; only here are sequences padded, except on CUDA, where the variable-length kernel
needs no padding.
"""

from collections.abc import Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def grouping_options() -> dict[str, Any]:
    """What lets several query heads share a key head: a flag from torch 2.12 on; 2.11 asks for none."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the CPU on a device; to a GPU without waiting for what that is busy with."""
    device = torch.device(device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Layout:
    """Where the tokens of packed sequences are; some sequences may be empty."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        self.lengths = list(lengths)
        self.longest = max(lengths)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(self.lengths))
        positions = torch.arange(sum(lengths)) - starts[:-1].long()[sequences]
        self.starts, self.sequences, self.positions = (sent(part, device) for part in (starts, sequences, positions))

    def pad(self, packed: Tensor) -> Tensor:
        """[T, heads, head_dim] -> [sequences, heads, longest, head_dim]."""
        padded = packed.new_zeros(len(self.lengths), self.longest, *packed.shape[1:])
        return padded.index_put((self.sequences, self.positions), packed).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return padded.transpose(1, 2)[self.sequences, self.positions]


class Packed(Layout):
    """Causal attention within each of several packed sequences."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        assert len(lengths) > 0 and min(lengths) > 0
        super().__init__(lengths, device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """With a `window`, a token attends to this many tokens, itself included."""
        if window is not None and window >= self.longest:
            window = None
        if query.is_cuda:
            return self._variable_length(query, key, value, window)
        return self._padded(query, key, value, window)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """Right-padded, so causality alone keeps real tokens from attending to padding."""
        query, key, value = (self.pad(part) for part in (query, key, value))
        visible = None
        if window is not None:
            before = torch.arange(self.longest)[:, None] - torch.arange(self.longest)
            visible = ((before >= 0) & (before < window)).to(query.device)
        mixed = F.scaled_dot_product_attention(
            query, key, value, visible, is_causal=visible is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.unpad(mixed)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        lengths = (self.starts, self.starts, self.longest, self.longest)
        # Keys to the left, all (-1) or as many as the window has besides the token; none to the right.
        left = -1 if window is None else window - 1
        mixed = varlen_attn(query, key, value, *lengths, window_size=(left, 0), **grouping_options())
        assert isinstance(mixed, Tensor)
        return mixed
