"""Workers: ordinary `torch.distributed` processes, each with the full weights.

    workers = Workers.join()                          # a single worker unless a launcher has set RANK and WORLD_SIZE
    groups = workers.gather(play(workers.mine(requests)))
    workers.add_up([parameter.grad for parameter in parameters])

Items are distributed round-robin and gathered in the same order, so every worker holds the same list, makes the same
decisions and takes the same optimizer step. Only this distribution depends on the number of workers.

`launcher` starts them on one machine, torchrun on several. If one fails, all end, with one message.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ragen.distributed.launcher import FAILED, MEETING, SHARED
from ragen.errors import RunFailed

T = TypeVar("T")

CPU = torch.device("cpu")


def _collective(method: Callable[..., T]) -> Callable[..., T]:
    """A method in which all workers take part: if one is gone, the others cannot continue."""

    @wraps(method)
    def together(self: "Workers", *given: Any) -> T:
        try:
            return method(self, *given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RunFailed(
                f"worker {self.rank} lost contact with the others ({str(error).splitlines()[0]}); "
                "run the same command to resume"
            ) from error

    return together


@dataclass(frozen=True)
class Workers:
    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def join(cls) -> "Workers":
        """This process as one of those that a launcher started, or as the only worker."""
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, **_rendezvous())
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surrounds the work. When one worker fails, the others fail too; only the first raises its error."""
        try:
            yield
        except BaseException:
            if not self._fails_first():
                raise SystemExit(1) from None
            raise
        finally:
            if self.size > 1 and dist.is_initialized():
                dist.destroy_process_group()

    def _fails_first(self) -> bool:
        if self.size == 1 or SHARED not in os.environ:
            return True
        try:
            with open(Path(os.environ[SHARED]) / FAILED, "x") as file:
                file.write(str(self.rank))
        except FileExistsError:
            return False
        return True

    @property
    def is_first(self) -> bool:
        """Whether this worker writes files and prints."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This worker's share."""
        return list(items[self.rank :: self.size])

    @_collective
    def gather(self, mine: Sequence[T]) -> list[T]:
        """The items of all workers, in the order before `mine` distributed them."""
        if self.size == 1:
            return list(mine)
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, list(mine))
        return [share[turn] for turn in range(len(shares[0])) for share in shares if turn < len(share)]

    @_collective
    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the sum over all workers. Small ones are sent together."""
        if self.size == 1:
            return
        for tensors_of_type in _by_type(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors_of_type])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in tensors_of_type])
            for tensor, part in zip(tensors_of_type, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    @_collective
    def agree(self, value: T) -> T:
        """The first worker's value, on all workers."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Workers()
MAX_BUCKET = 1 << 26  # numbers in one message


def _by_type(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one type, split into messages of limited size."""
    kinds: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        buckets = kinds.setdefault(tensor.dtype, [[]])
        if buckets[-1] and sum(part.numel() for part in buckets[-1]) + tensor.numel() > MAX_BUCKET:
            buckets.append([])
        buckets[-1].append(tensor)
    return [bucket for buckets in kinds.values() for bucket in buckets]


def _rendezvous() -> dict[str, Any]:
    """Workers of `launcher` meet through a file, those of torchrun through its environment variables."""
    if SHARED not in os.environ:
        return {}
    url = f"file://{os.environ[SHARED]}/{MEETING}"
    return {"init_method": url, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
