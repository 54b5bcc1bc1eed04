"""How an engine computes on this machine, decided once.

way = choose_way(model, max_tokens=4096)
print(way.text)          # sampling: CUDA graphs, Triton attention, bursts of 8 tokens
"""

import importlib.util
from typing import NamedTuple

import torch

from ragen.engine.native.slot_memory import CUDA_BURST, slots_within
from ragen.model.decoder import Decoder
from ragen.protocols import SampledModel

CPU_BURST = 4  # shorter than CUDA_BURST: looking at tokens costs more time where tokens cost less
OLDEST_FOR_TRITON = (8, 0)  # compute capability: bf16 matrix units
LARGEST_HEAD = 256


class Way(NamedTuple):
    graphs: bool  # replay captured graphs over static slots; else one operation after the other
    triton: bool  # our kernels; else torch's
    burst: int  # tokens between two looks
    text: str  # for the user; empty on a CPU, where there is no choice
    recomputes: bool = False  # without a cache: each token computes its conversation again


def choose_way(model: SampledModel, max_tokens: int | None = None) -> Way:
    """`max_tokens` is the length of the longest conversation, if known."""
    device = next(model.parameters()).device
    if not model.is_cacheable:
        why = "this model keeps more of earlier tokens than keys and values, or keeps them in another shape"
        burst = CUDA_BURST if device.type == "cuda" else CPU_BURST
        return Way(False, False, burst, f"sampling: each token computes its conversation again ({why})", True)
    if device.type != "cuda":
        return Way(False, False, CPU_BURST, "")
    # cuDNN makes a plan for every new shape, which costs up to 150 ms; the shapes of a sampler change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if _waits_for_the_gpu(model):
        why = "this model waits for the GPU while it computes, so it cannot be captured"
        return Way(False, False, CUDA_BURST, f"sampling: one operation after the other ({why})")
    missing = _missing_for_triton(model, device, max_tokens)
    attention = f"torch's attention ({missing})" if missing else "Triton attention"
    return Way(True, not missing, CUDA_BURST, f"sampling: CUDA graphs, {attention}, bursts of {CUDA_BURST} tokens")


@torch.no_grad()
def _waits_for_the_gpu(model: SampledModel) -> bool:
    """Whether a step of a Hugging Face module reads a result back, as routing to experts does: tried, not known."""
    if isinstance(model, Decoder):
        return False
    from ragen.engine.native.slots import Slots

    slots = Slots(model, 1, has_triton=False)
    slots.reserve(1)
    slots.logits(1, 1)  # makes workspaces
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots.logits(1, 1)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _missing_for_triton(model: SampledModel, device: torch.device, max_tokens: int | None) -> str:
    if not isinstance(model, Decoder):
        return "a Hugging Face module"
    window = model.window
    if window is not None and (max_tokens is None or max_tokens > window):
        return f"no Triton kernel for a sliding window of {window} tokens"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
        return f"Triton kernels need compute capability {OLDEST_FOR_TRITON[0]}.{OLDEST_FOR_TRITON[1]}"
    if model.shape.head_dim > LARGEST_HEAD or model.shape.head_dim % 16:
        return f"no Triton kernel for heads of {model.shape.head_dim}"
    return ""


def slots_of_share(model: SampledModel, max_rows: int, max_tokens: int, share: float) -> int:
    """How many conversations of this length fit into a share of the GPU's memory, at least one; the others wait."""
    weight = next(model.parameters())
    total = torch.cuda.get_device_properties(weight.device).total_memory
    return slots_within(model.shape, max_rows, max_tokens, weight.element_size(), share * total)
