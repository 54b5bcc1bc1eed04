"""What the GPU benchmarks share: times, ceilings, and conversations whose prompts are known in advance."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ragen.engine.base import Prompt, Sampled

NO_SUCH_TOKEN = -1


@dataclass
class Scripted:
    """A conversation with given prompts: only the replies are open."""

    prompts: list[tuple[int, ...]]
    key: int
    replies: list[Sampled] = field(default_factory=list)

    def prompt(self) -> Prompt | None:
        turn = len(self.replies)
        if turn == len(self.prompts):
            return None
        return Prompt(self.prompts[turn], continues=turn > 0, draw_key=(self.key * 0x9E3779B97F4A7C15 + turn) % 2**64)

    def take(self, reply: Sampled) -> None:
        self.replies.append(reply)


class EveryToken:
    """As much of a tokenizer as the engine asks for."""

    eos_token_id = pad_token_id = None

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, ids) -> list[str]:
        return [self.decode(part) for part in ids]


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


def machine() -> str:
    import triton

    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{name}, {memory:.0f} GiB, torch {torch.__version__}, Triton {triton.__version__}"
