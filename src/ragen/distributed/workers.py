"""Workers: ordinary `torch.distributed` processes, each with the full weights.

    workers = Workers.join()                          # alone, unless a launcher has set RANK and WORLD_SIZE
    groups = workers.gather(play(workers.mine(requests)))
    workers.add_up([parameter.grad for parameter in parameters])

Work is dealt out item by item and gathered in the same order, so every worker then holds the same list, makes the same
decisions and takes the same optimizer step. Nothing but the deal depends on how many there are.

`launcher` starts them on one machine, torchrun on several. What ends one of them ends all, with one message.
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
    """A method in which all workers take part: where one is gone, the others cannot go on."""

    @wraps(method)
    def together(self: "Workers", *given: Any) -> T:
        try:
            return method(self, *given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RunFailed(
                f"worker {self.rank} has lost the others ({str(error).splitlines()[0]}); start the same command again"
            ) from error

    return together


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
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, **_meeting_place())
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For as long as they work. When one fails the others fail too: only the first raises what it was."""
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
        """The one that writes files and talks."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This worker's share."""
        return list(items[self.rank :: self.size])

    @_collective
    def gather(self, mine: Sequence[T]) -> list[T]:
        """Everyone's items, in the order from which `mine` dealt them out."""
        if self.size == 1:
            return list(mine)
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, list(mine))
        return [share[turn] for turn in range(len(shares[0])) for share in shares if turn < len(share)]

    @_collective
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

    @_collective
    def agree(self, value: T) -> T:
        """The first worker's value, for everyone."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Workers()
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


def _meeting_place() -> dict[str, Any]:
    """The workers of `launcher` meet in a file, those of torchrun as it tells them."""
    if SHARED not in os.environ:
        return {}
    place = f"file://{os.environ[SHARED]}/{MEETING}"
    return {"init_method": place, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
