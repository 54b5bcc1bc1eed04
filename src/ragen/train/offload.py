"""AdamW whose float32 weights and moments live in pinned main memory: for models whose state does not fit on the GPU.

    optimizer = make_optimizer(model.parameters(), settings, total_steps, offload=True)     # used as `MasterAdamW`

A step sends the state to the GPU chunk by chunk, updates it there and sends it back. Three chunks are under way at a
time: one arrives, one is computed, one leaves, so a step takes about as long as the copies in one direction. For 3B
parameters that are 37 GB, 0.7 s at 55 GB/s. Stepping on the host would move less (gradients one way, rounded weights
the other, 18 GB), but reads and writes 86 GB of main memory: no faster even with 100 GB/s to itself, and runs on the
other GPUs share that. On the GPU it is also the very arithmetic of `MasterAdamW`: both give the same bits, and their
checkpoints are interchangeable.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ragen.config.schema import Optimizer as Settings
from ragen.errors import RunFailed
from ragen.model.activations import OFFLOAD_CHUNK, OFFLOAD_CHUNKS
from ragen.train.optimizer import COUNT, MOMENTS, MasterAdamW

KINDS = 1 + len(MOMENTS)  # master and moments


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: Settings, total_steps: int, offload: bool
) -> MasterAdamW:
    return (OffloadedAdamW if offload else MasterAdamW)(parameters, settings, total_steps)


class Piece(NamedTuple):
    """Consecutive numbers of a parameter."""

    parameter: int  # its number
    start: int
    stop: int


class OffloadedAdamW(MasterAdamW):
    chunk_size = OFFLOAD_CHUNK

    def _make_masters(self) -> list[Tensor]:
        """Views of three large arrays, since memory is pinned in whole pages."""
        sizes = [parameter.numel() for parameter in self.parameters]
        is_cuda = any(parameter.is_cuda for parameter in self.parameters)
        arrays = [torch.empty(sum(sizes)) for _ in range(KINDS)]
        for array in arrays if is_cuda else []:
            weakref.finalize(self, _pin(array), array.data_ptr()).atexit = False
        masters, *moments = (
            [part.view_as(parameter) for part, parameter in zip(array.split(sizes), self.parameters, strict=True)]
            for array in arrays
        )
        for parameter, master in zip(self.parameters, masters, strict=True):
            master.copy_(parameter.detach())
            master.requires_grad_()
        self._moments = {
            master: dict(zip(MOMENTS, parts, strict=True)) for master, *parts in zip(masters, *moments, strict=True)
        }
        return masters

    def _make_holders(self) -> list[Tensor]:
        """Of each parameter's shape, and without memory: gradients are on the GPU, masters are not."""
        return [
            torch.zeros((), device=parameter.device).expand(parameter.shape).requires_grad_()
            for parameter in self.parameters
        ]

    def _make_moments(self) -> None:
        for holder, master in zip(self.holders, self.masters, strict=True):
            if holder.grad is not None and not self.adamw.state.get(master):
                zeros = {kind: torch.zeros(()).expand_as(master) for kind in MOMENTS}
                count = torch.zeros((), device=self._count_device(master))
                self.adamw.state[master] = {COUNT: count, **self._own_moments(master, zeros)}

    def _own_moments(self, master: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {kind: self._moments[master][kind].copy_(moment) for kind, moment in stored.items()}

    def _count_device(self, master: Tensor) -> torch.device | str:
        return self.parameters[0].device if self.is_cuda else "cpu"

    def _update(self) -> None:
        self._make_moments()
        chunks, pipeline = list(self._chunks()), _Pipeline(self.parameters[0].device)
        buffers = [
            torch.empty(KINDS, self.chunk_size, device=pipeline.device) for _ in range(min(OFFLOAD_CHUNKS, len(chunks)))
        ]
        for number, pieces in enumerate(chunks):
            slot = number % len(buffers)
            host = [self._on_host(piece) for piece in pieces]
            device = list(_parts(buffers[slot], pieces))
            with pipeline.arriving(slot):
                _copy_all(host, device)
            self._step_pieces(pieces, device)
            with pipeline.leaving(slot):
                _copy_all(device, host)
        pipeline.finish()
        for holder, master in zip(self.holders, self.masters, strict=True):
            if holder.grad is not None:
                self.adamw.state[master][COUNT] += 1

    def _chunks(self) -> Iterator[list[Piece]]:
        """The parameters that have a gradient, in pieces that fit into a buffer together."""
        chunk: list[Piece] = []
        room = self.chunk_size
        for number, holder in enumerate(self.holders):
            start, size = 0, holder.numel() if holder.grad is not None else 0
            while start < size:
                stop = min(size, start + room)
                chunk.append(Piece(number, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield chunk
                    chunk, room = [], self.chunk_size
        if chunk:
            yield chunk

    def _on_host(self, piece: Piece) -> list[Tensor]:
        master = self.masters[piece.parameter]
        moments = self.adamw.state[master]
        return [_piece(part, piece) for part in (master.detach(), *(moments[kind] for kind in MOMENTS))]

    def _step_pieces(self, pieces: list[Piece], device: list[list[Tensor]]) -> None:
        group = self.adamw.param_groups[0]
        gradients = [(piece, self.holders[piece.parameter].grad) for piece in pieces]
        adamw(
            [parts[0] for parts in device],
            [_piece(gradient, piece) for piece, gradient in gradients if gradient is not None],
            [parts[1] for parts in device],
            [parts[2] for parts in device],
            [],
            # A parameter in several pieces counts its step once.
            [self.adamw.state[self.masters[piece.parameter]][COUNT].clone() for piece in pieces],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, (master, *_) in zip(pieces, device, strict=True):
            _piece(self.parameters[piece.parameter].detach(), piece).copy_(master)


class _Pipeline:
    """Copies and computation of a few buffers, on streams that wait for each other; on a CPU one after the other."""

    def __init__(self, device: torch.device):
        self.device, self.is_cuda = device, device.type == "cuda"
        if self.is_cuda:
            self.compute, self.inward = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            self.outward = torch.cuda.Stream(device)
            self.inward.wait_stream(self.compute)  # buffers may be memory that earlier work still uses
            self.has_left: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def arriving(self, slot: int) -> Iterator[None]:
        if not self.is_cuda:
            yield
            return
        if slot in self.has_left:
            self.inward.wait_event(self.has_left[slot])
        with torch.cuda.stream(self.inward):
            yield
        self.compute.wait_event(self.inward.record_event())

    @contextmanager
    def leaving(self, slot: int) -> Iterator[None]:
        if not self.is_cuda:
            yield
            return
        self.outward.wait_event(self.compute.record_event())
        with torch.cuda.stream(self.outward):
            yield
        self.has_left[slot] = self.outward.record_event()

    def finish(self) -> None:
        """The host may read its memory, and the buffers may be freed."""
        if self.is_cuda:
            self.outward.synchronize()


def _piece(part: Tensor, piece: Piece) -> Tensor:
    return part.view(-1)[piece.start : piece.stop]


def _parts(buffer: Tensor, pieces: list[Piece]) -> Iterator[list[Tensor]]:
    """For each piece its master and moments within a buffer."""
    start = 0
    for piece in pieces:
        stop = start + piece.stop - piece.start
        yield [kind[start:stop] for kind in buffer]
        start = stop


def _copy_all(sources: list[list[Tensor]], targets: list[list[Tensor]]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for part, copied in zip(source, target, strict=True):
            copied.copy_(part, non_blocking=True)


def _pin(array: Tensor) -> Callable[[int], object]:
    """Pin memory in place; returns what releases it. Torch's own comes in powers of two: up to twice what is asked."""
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(array.data_ptr(), array.nbytes, 0))
    if status != 0:
        raise RunFailed(
            f"optimizer_offload: {array.nbytes / 1e9:.0f} GB of main memory could not be pinned (CUDA error {status}); "
            "free main memory, or raise the limit of locked memory (ulimit -l)"
        )
    return runtime.cudaHostUnregister
