"""Memory of a training pass on CUDA: how many layers must be recomputed, and how many tokens fit.

    layers_to_recompute(shape, x, num_rows)        # of this pass, from what is free now
    token_room(model, most, device)                # tokens of a micro-batch, at most `most`
    pass_bytes(shape, num_tokens, num_rows, num_recomputed, size=2)

A layer keeps what its backward pass reads: the inputs of both norms and of the four matrix products, the turned heads,
and the two halves that the activation multiplies. A recomputed layer keeps only its input. Early layers are recomputed
rather than late ones: when their turn comes, the others' memory is free again, so the most is held where the forward
pass ends, at the head. Its logits are computed in chunks, see `vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ragen.protocols import ModelShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CHUNK_LOGITS = 1 << 29  # 1 GB in bf16, 3,533 rows of Qwen2.5's vocabulary
MARGIN = 1.05  # for what the allocator cannot use
CONTEXT = 1 << 30  # CUDA's own memory in a process
RESERVE = 1 << 30  # small tensors, workspaces of kernels
FULL_SPEED = 4096  # tokens from which matrix products run at full speed: fewer are worse than recomputing layers
OFFLOAD_CHUNK, OFFLOAD_CHUNKS = 1 << 25, 3  # numbers, and chunks on the GPU at once, of an offloaded optimizer
STEP = 512  # a limit in multiples of it: small changes of free memory change no micro-batch


class Trainable(Protocol):
    """What is asked of a model here."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


# --- how much ------------------------------------------------------------------------------------------------------


def layer_bytes(shape: ModelShape, size: int) -> int:
    """Kept per token by a layer that is not recomputed; `size` is that of a number."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return size * (4 * shape.hidden_size + attention + 3 * shape.intermediate_size) + 4 * (shape.num_heads + 2)


def pass_bytes(
    shape: ModelShape, num_tokens: int, num_rows: int, num_recomputed: int, size: int, trains_head: bool = True
) -> int:
    """The most that a forward and a backward pass hold besides weights and their gradients.

    `num_rows` are the tokens whose logits are computed; with an adapter the head is not trained.
    """
    inside, entry = layer_bytes(shape, size), shape.hidden_size * size
    kept = num_tokens * (num_recomputed * entry + (shape.num_layers - num_recomputed) * inside)
    again = num_tokens * (num_recomputed * entry + inside) if num_recomputed else 0
    slopes = num_tokens * size * 3 * shape.intermediate_size  # in a layer's backward pass
    return max(kept + max(head_bytes(shape, num_rows, size, trains_head), slopes), again + slopes)


def forward_bytes(shape: ModelShape, num_tokens: int, num_rows: int, size: int) -> int:
    """The most that a pass without gradients holds: the inside of a layer, or a chunk of logits."""
    inside = 2 * shape.hidden_size + 2 * shape.num_heads * shape.head_dim + 3 * shape.intermediate_size
    chunk = chunk_rows(num_rows, shape.vocab_size) if num_rows else 0
    return size * max(num_tokens * inside, (num_tokens + num_rows) * shape.hidden_size + chunk * shape.vocab_size)


def head_bytes(shape: ModelShape, num_rows: int, size: int, trained: bool = True) -> int:
    """Hidden states, a chunk of logits, and gradients of the weight, if it is trained: the head's, the embedding's, and
    their float32 sum if there are several chunks.
    """
    if num_rows == 0:
        return 0
    chunk, weight = chunk_rows(num_rows, shape.vocab_size), shape.vocab_size * shape.hidden_size * trained
    in_float32 = 4 if chunk < num_rows else 0
    return num_rows * 3 * shape.hidden_size * size + chunk * shape.vocab_size * size + weight * (2 * size + in_float32)


def chunk_rows(num_rows: int, vocab_size: int, chunk_logits: int = CHUNK_LOGITS) -> int:
    """Rows whose logits are in memory at once: as few equal chunks as the limit allows."""
    num_chunks = -(-num_rows // max(1, chunk_logits // vocab_size))
    return max(1, -(-num_rows // max(1, num_chunks)))


# --- what fits -----------------------------------------------------------------------------------------------------


def fits(num_bytes: int, free: int) -> bool:
    return MARGIN * num_bytes + RESERVE <= free


def fewest_recomputed(
    shape: ModelShape, num_tokens: int, num_rows: int, size: int, free: int, trains_head: bool = True
) -> int:
    """How many layers must be recomputed for a pass to fit; all of them where even that is too much."""
    for num_recomputed in range(shape.num_layers):
        if fits(pass_bytes(shape, num_tokens, num_rows, num_recomputed, size, trains_head), free):
            return num_recomputed
    return shape.num_layers


def fitting_tokens(
    shape: ModelShape, most: int, size: int, free: int, recomputes: bool, trains_head: bool = True
) -> int:
    """Tokens of a micro-batch: `most`, or fewer if they do not fit without recomputing layers.

    Fewer than FULL_SPEED only if they do not fit with it either. All may need their logits.
    """

    def room(num_recomputed: int) -> int:
        below, above = 0, most + 1  # bisection: the first fits, the second does not
        while above - below > 1:
            middle = (below + above) // 2
            fit = fits(pass_bytes(shape, middle, middle, num_recomputed, size, trains_head), free)
            below, above = (middle, above) if fit else (below, middle)
        return below

    found = room(0)
    if recomputes and found < FULL_SPEED:
        found = max(found, min(FULL_SPEED, room(shape.num_layers)))
    return most if found >= most else max(min(most, STEP), found // STEP * STEP)


def layers_to_recompute(shape: ModelShape, x: Tensor, num_rows: int) -> int:
    """The fewest layers, so that a pass over the tokens `x` fits into what is free."""
    return fewest_recomputed(shape, len(x), num_rows, x.element_size(), free_bytes(x.device))


def token_room(model: Trainable, most: int, device: torch.device) -> int | None:
    """Tokens of a micro-batch on CUDA: `most`, unless memory asks for fewer. None elsewhere."""
    if device.type != "cuda":
        return None
    size = next(model.parameters()).element_size()
    return fitting_tokens(model.shape, most, size, free_bytes(device), model.gradient_checkpointing)


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate on a GPU, its own cached blocks included."""
    import torch

    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), cap) - allocated


def gpu_capacity(device: torch.device) -> int:
    """What a GPU has for this process: its memory or the process's cap on it, less what other processes hold."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    others = max(0, total - free - torch.cuda.memory_reserved(device) - CONTEXT)
    return min(cap, total - others)
