"""Workers: ordinary `torch.distributed` processes, each with the full weights.

    workers = Workers.join()                          # alone, unless a launcher has set RANK and WORLD_SIZE
    groups = workers.gather(play(workers.mine(requests)))
    workers.add_up([parameter.grad for parameter in parameters])

Work is dealt out item by item and gathered in the same order, so every worker then holds the same list, makes the same
decisions and takes the same optimizer step. Nothing but the deal depends on how many there are.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ragen.typed import ConfigError

T = TypeVar("T")


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workers:
    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def join(cls) -> "Workers":
        """This process among those that a launcher started; alone without one."""
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """The one that writes files and talks."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This worker's share."""
        return list(items[self.rank :: self.size])

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Everyone's items, in the order from which `mine` dealt them out."""
        if self.size == 1:
            return list(mine)
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, list(mine))
        return [share[turn] for turn in range(len(shares[0])) for share in shares if turn < len(share)]

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the sum over all workers. Small ones travel together."""
        if self.size == 1:
            return
        for tensors_of_type in _by_type(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors_of_type])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in tensors_of_type])
            for tensor, part in zip(tensors_of_type, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self, value: T) -> T:
        """The first worker's value, for everyone."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Workers()
STATUS_FILE = "RAGEN_STATUS_FILE"  # where the first worker leaves the run's exit status
MAX_BUCKET = 1 << 26  # numbers that travel in one message


def _by_type(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one type, cut into messages of a bounded size."""
    kinds: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        buckets = kinds.setdefault(tensor.dtype, [[]])
        if buckets[-1] and sum(part.numel() for part in buckets[-1]) + tensor.numel() > MAX_BUCKET:
            buckets.append([])
        buckets[-1].append(tensor)
    return [bucket for buckets in kinds.values() for bucket in buckets]


# --- starting them ------------------------------------------------------------------------------------------------


def must_launch(num_workers: int) -> bool:
    """Whether this process is to start the workers instead of being one."""
    return num_workers > 1 and "RANK" not in os.environ


def launch(num_workers: int, num_nodes: int, arguments: Sequence[str]) -> int:
    """Run `ragen train` with these arguments in so many processes on this machine; returns the run's exit status."""
    if num_nodes > 1:
        raise ConfigError(
            f"trainer.nnodes={num_nodes}: start torchrun on every node yourself, for instance\n"
            f"  torchrun --nnodes {num_nodes} --nproc-per-node {num_workers} --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:29500 -m ragen train {' '.join(arguments)}"
        )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        # Processes with all the cores' threads each would stand in each other's way.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    with tempfile.TemporaryDirectory() as folder:
        environment[STATUS_FILE] = str(Path(folder) / "status")
        process = subprocess.Popen([*command, "-m", "ragen", "train", *arguments], env=environment)
        with forwarded(process):
            failed = process.wait()
        try:
            return int(Path(environment[STATUS_FILE]).read_text())
        except (OSError, ValueError):
            return 1 if failed else 0


def report_status(status: int) -> int:
    """The launcher knows only success and failure: what a run has to say besides goes through a file."""
    path = os.environ.get(STATUS_FILE)
    if path is None:
        return status
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(str(status))
    return 0


@contextmanager
def forwarded(process: subprocess.Popen) -> Iterator[None]:
    """A terminal tells the whole group of processes about Ctrl-C: this one only has to wait for the others."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT,)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
