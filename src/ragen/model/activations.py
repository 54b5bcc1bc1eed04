"""Memory of a training pass on CUDA: how many layers must be recomputed, and how many tokens fit.

    layers_to_recompute(shape, x, num_rows)        # of this pass, from what is free now
    token_room(model, most, device)                # tokens of a micro-batch, at most `most`

A layer keeps what its backward pass reads: the inputs of both norms and of the four matrix products, the turned heads,
and the two halves that the activation multiplies. A recomputed layer keeps only its input. Early layers are recomputed
rather than late ones: when their turn comes, the others' memory is free again, so only the end of the forward pass
counts: the head's chunk of logits, and gradients of the weights it makes.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ragen.model.vocabulary import CHUNK_LOGITS, chunk_rows
from ragen.protocols import ModelShape

MARGIN = 1.05  # for what the allocator cannot use
RESERVE = 1 << 30  # small tensors, workspaces of kernels
FULL_SPEED = 4096  # tokens from which matrix products run at full speed: fewer are worse than recomputing layers
STEP = 512  # a limit in multiples of it: small changes of free memory change no micro-batch


class Trainable(Protocol):
    """What is asked of a model here."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def layer_bytes(shape: ModelShape, size: int) -> int:
    """Kept per token by a layer that is not recomputed; `size` is that of a number."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return size * (4 * shape.hidden_size + attention + 3 * shape.intermediate_size) + 4 * (shape.num_heads + 2)


def pass_bytes(shape: ModelShape, num_tokens: int, num_rows: int, num_recomputed: int, size: int) -> int:
    """The most that a forward and a backward pass hold besides weights and gradients."""
    inside = layer_bytes(shape, size)
    kept = num_tokens * (num_recomputed * shape.hidden_size * size + (shape.num_layers - num_recomputed) * inside)
    again = num_tokens * (shape.num_layers * shape.hidden_size * size + inside) if num_recomputed else 0
    slopes = num_tokens * size * 3 * shape.intermediate_size  # in a layer's backward pass
    return int(MARGIN * (max(kept + head_bytes(shape, num_rows, size), again) + slopes)) + RESERVE


def head_bytes(shape: ModelShape, num_rows: int, size: int) -> int:
    """Hidden states, a chunk of logits and the gradient of the weight: in float32, rounded, and the embedding's."""
    weight = shape.vocab_size * shape.hidden_size
    return num_rows * 3 * shape.hidden_size * size + head_chunk(shape, num_rows) * size + weight * (4 + 2 * size)


def head_chunk(shape: ModelShape, num_rows: int) -> int:
    return chunk_rows(num_rows, shape.vocab_size, CHUNK_LOGITS) * shape.vocab_size


def layers_to_recompute(shape: ModelShape, x: Tensor, num_rows: int) -> int:
    """The fewest layers, so that a pass over the tokens `x` fits into what is free."""
    free = free_bytes(x.device)
    for num_recomputed in range(shape.num_layers):
        if pass_bytes(shape, len(x), num_rows, num_recomputed, x.element_size()) <= free:
            return num_recomputed
    return shape.num_layers


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate on a GPU, its own cached blocks included."""
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), cap) - allocated


def token_room(model: Trainable, most: int, device: torch.device) -> int | None:
    """Tokens of a micro-batch on CUDA: `most`, unless memory asks for fewer. None elsewhere."""
    if device.type != "cuda":
        return None
    free, size = free_bytes(device), next(model.parameters()).element_size()

    def fitting(num_recomputed: int) -> int:
        """Bytes are linear in tokens, but for the chunk of logits, which is counted in full."""
        fixed = pass_bytes(model.shape, 0, most, num_recomputed, size)
        each = pass_bytes(model.shape, 1024, most, num_recomputed, size) - fixed
        return max(0, (free - fixed) * 1024 // each)

    room = fitting(0)
    if room < FULL_SPEED and model.gradient_checkpointing:
        room = max(room, min(FULL_SPEED, fitting(model.shape.num_layers)))
    return min(most, max(STEP, room // STEP * STEP))
