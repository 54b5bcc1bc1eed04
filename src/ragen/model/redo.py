"""A pass that runs out of memory is redone with smaller micro-batches, and they stay smaller.

    redo = Redo("the actor's update", log.note)
    sums = redo(batches_of, compute, undo)         # batches_of(2): half as large as batches_of(1)
    redo.count                                     # how often something was redone

How samples are cut into micro-batches changes no result but its rounding, so each worker redoes its own share before
it meets the others; none of them has to know. Where every sample is alone already, the error is raised.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
Batches = list[list[int]]


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an error class; main memory only a text."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


class Redo:
    def __init__(self, what: str = "a pass", note: Callable[[str], None] = lambda line: None):
        self.what, self.note = what, note
        self.divisor = 1  # micro-batches are this much smaller than they were
        self.count = 0

    def __call__(
        self,
        batches_of: Callable[[int], Batches],
        compute: Callable[[Sequence[list[int]]], T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """`compute` of micro-batches; `undo` drops what an attempt that failed has left behind."""
        while True:
            batches = batches_of(self.divisor)
            try:
                return compute(batches)
            except RuntimeError as error:
                if not is_out_of_memory(error) or not any(len(batch) > 1 for batch in batches):
                    raise
            # Not within `except`: the error holds on to the tensors of the failed attempt.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._shrink(batches_of, batches)

    def _shrink(self, batches_of: Callable[[int], Batches], failed: Batches) -> None:
        self.count += 1
        self.divisor *= 2
        while batches_of(self.divisor) == failed:
            self.divisor *= 2
        size = f"1/{self.divisor} of their size"
        self.note(f"out of memory in {self.what}: redone with micro-batches of {size}; they stay smaller")
