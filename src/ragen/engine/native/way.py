"""How an engine computes on this machine, decided once.

way = choose_way(model)
print(way.text)          # sampling: CUDA graphs, Triton attention, bursts of 8 tokens
"""

import importlib.util
from typing import NamedTuple

import torch

from ragen.model.decoder import Decoder
from ragen.protocols import SampledModel

CPU_BURST, CUDA_BURST = 4, 8  # looking at tokens costs more time where tokens cost less
OLDEST_FOR_TRITON = (8, 0)  # compute capability: bf16 matrix units
LARGEST_HEAD = 256


class Way(NamedTuple):
    graphs: bool  # replay captured graphs over static slots; else one operation after the other
    triton: bool  # our kernels; else torch's
    burst: int  # tokens between two looks
    text: str  # for the user; empty on a CPU, where there is no choice


def choose_way(model: SampledModel) -> Way:
    device = next(model.parameters()).device
    if device.type != "cuda":
        return Way(False, False, CPU_BURST, "")
    # cuDNN makes a plan for every new shape, which costs up to 150 ms; the shapes of a sampler change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not isinstance(model, Decoder):
        name = type(model).__name__
        return Way(False, False, CUDA_BURST, f"sampling: one operation after the other ({name} is not captured)")
    missing = _missing_for_triton(model, device)
    attention = f"torch's attention ({missing})" if missing else "Triton attention"
    return Way(True, not missing, CUDA_BURST, f"sampling: CUDA graphs, {attention}, bursts of {CUDA_BURST} tokens")


def _missing_for_triton(model: Decoder, device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
        return f"Triton kernels need compute capability {OLDEST_FOR_TRITON[0]}.{OLDEST_FOR_TRITON[1]}"
    if model.shape.head_dim > LARGEST_HEAD or model.shape.head_dim % 16:
        return f"no Triton kernel for heads of {model.shape.head_dim}"
    return ""


def slots_within(model: SampledModel, max_tokens: int, share: float) -> int:
    """How many conversations of this length fit into a share of the GPU's memory, at least one; the others wait."""
    shape, weight = model.shape, next(model.parameters())
    total = torch.cuda.get_device_properties(weight.device).total_memory
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * weight.element_size()
    return max(1, int(share * total) // (token * max_tokens))
