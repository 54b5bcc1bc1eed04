"""What the GPU benchmarks share: shapes, times, and the measured ceilings of the machine.

milliseconds(lambda: step())               # median, by device events
seconds(lambda: rollout())                 # of one call, by the host's clock
matrix_rate()                              # FLOP/s of a large bf16 product
copy_bandwidth()                           # bytes a second
in_each_checkout(options.against)          # this script's `--json` with the code of another checkout, then with ours
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "src"))  # behind PYTHONPATH, so that another checkout can be measured

from ragen.model.decoder import Decoder, Shape, to_huggingface
from ragen.model.load import LoadedModel

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")  # to try a script, with "tiny"
PEAK = 989e12  # bf16, dense, by the vendor's datasheet of the H100 and H200
QWEN = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True)
SHAPES = {
    "tiny": Shape(1000, 64, 128, 3, 4, 2, 16, tied_embeddings=True, **QWEN),
    "0.5B": Shape(151936, 896, 4864, 24, 14, 2, 64, tied_embeddings=True, **QWEN),
    "1.5B": Shape(151936, 1536, 8960, 28, 12, 2, 128, tied_embeddings=True, **QWEN),
    "3B": Shape(151936, 2048, 11008, 36, 16, 2, 128, tied_embeddings=True, **QWEN),
    "7B": Shape(152064, 3584, 18944, 28, 28, 4, 128, tied_embeddings=False, **QWEN),
}


def random_decoder(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder with small random weights, made on the GPU."""
    torch.manual_seed(0)
    with DEVICE:
        torch.set_default_dtype(dtype)
        try:
            decoder = Decoder(shape)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
    decoder.frequencies = (shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)).to(DEVICE)
    return decoder


def milliseconds(action: Callable[[], object], rounds: int = 5, warm_up: int = 2) -> float:
    """The median time of an action."""
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(rounds if DEVICE.type == "cpu" else 0):
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    for _ in range(0 if times else rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def seconds(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def middle(action: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median time and the spread, as a share of it."""
    times = [seconds(action) for _ in range(rounds)]
    return statistics.median(times), (max(times) - min(times)) / statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(5))


def matrix_rate(size: int = 8192 if DEVICE.type == "cuda" else 256) -> float:
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (milliseconds(lambda: left @ right, rounds=10, warm_up=5) / 1e3)


def machine() -> str:
    if DEVICE.type == "cpu":
        return f"CPU, torch {torch.__version__}"
    import triton

    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    return f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, {versions}"


def their_model(loaded: LoadedModel) -> torch.nn.Module:
    """The same weights in the module of transformers."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    config = AutoConfig.from_pretrained(loaded.source.folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    theirs.load_state_dict(to_huggingface(loaded.model), strict=False)
    return theirs


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def in_each_checkout(against: Path | None) -> Iterator[tuple[str, Any]]:
    """What this script prints with `--json`, in a process each: `before` with the code of `against`, and `now`."""
    for name, checkout in {"before": against, "now": Path(__file__).parents[2]}.items():
        if checkout is None:
            continue
        environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, *sys.argv, "--json"], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        yield name, json.loads(done.stdout.splitlines()[-1])
