"""Where the gradient comes from: by bucket of groups and by term of the loss, from one sweep.

    buckets = BUCKETINGS["quantile"](stds_G, 6)         # {"bucket_1": [3, 0], …}: groups by reward spread
    after = Sums(buckets, counts_G, ["task", "kl"], parameters, workers)
    sweep(parameters, by_spread(stds_G), {"grad_norm": after}, passes_of, workers)
    after.measured["all"].norms["task"], after.measured["bucket_1"].snr, after.between["bucket_1", "bucket_2"]

`passes_of(group)` yields, for each part of the group, the losses of its terms from one forward pass; each is
differentiated separately: one forward pass, and one backward pass per term. Everything else (`all`, cosines, signal and
noise) is computed from the sums.

**Weights.** The loss of a set of tokens is a weighted sum with the weights of that set: a bucket's gradient is the one
that an update on this bucket alone would follow. The count c of a set is the divisor of its weights: tokens for
`token-mean`, sequences for the `seq-mean-…` aggregations. With g_i the gradient of group i under its own weights,

    bucket: G = sum of (c_i / c_bucket) g_i            all: sum of (c_bucket / c_all) G

exactly, and `all` is the gradient of an update with one mini-batch. A coefficient belongs to its term: the norm of `kl`
is that of coefficient * KL, as in the update. A loss `value` has no coefficient.

**Signal and noise.** What group i adds to its bucket is v_i = (c_i / c_bucket) g_i. Each n v_i estimates the
gradient, so G is the mean of n estimates, and its noise (the squared standard error, summed over all weights) is
estimated by (n Q - |G|^2) / (n - 1), where Q is the sum of |v_i|^2. The ratio |G|^2 / noise is

    snr = (n - 1) |G|^2 / (n Q - |G|^2)

Groups with unrelated directions give about 1 for any n: G is only noise. Above 1 there is a common direction, and
snr - 1 grows like n. It is exact and needs no second pass; but |v_i|^2 needs the whole gradient of a group, so one
worker computes a group, and groups share no pass.
Worked: two groups of one sequence each with g = (4, 0) and (0, 2): v = (2, 0) and (0, 1), G = (2, 1), Q = 5, and
snr = 1 * 5 / (2 * 5 - 5) = 1. It is 0 where there is no gradient at all, and None for a single group or equal ones.

**Cosines** compare terms as the loss has them: above 0, both move the weights the same way. With a zero gradient they
are 0.

**Memory.** A sum is on the device if there is room for two of its size and an eighth of the memory stays free for
activations, else in main memory; sums that every pass touches are allocated first. Only the first worker holds `all`
and what is compared. docs/guide_gradient_analysis.md has sizes and times.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from ragen.distributed.workers import ALONE, CPU, Workers

ALL = "all"
TASK = "task"  # the term whose groups are compared
EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, math.inf)  # of `fixed_rv`
KEPT_FREE = 8  # 1/8 of a device's memory stays free for activations
CHUNK = 1 << 24  # numbers to convert to float64 at once

Vector = list[Tensor]  # one tensor per parameter
Buckets = dict[str, list[int]]  # bucket name -> groups, both in ascending order of spread


# --- buckets ------------------------------------------------------------------------------------------------------


def by_spread(stds_G: Sequence[float]) -> list[int]:
    """The groups in ascending order of spread; the sort is stable."""
    return sorted(range(len(stds_G)), key=stds_G.__getitem__)


def quantiles(stds_G: Sequence[float], num_buckets: int) -> Buckets:
    """Equal parts of the groups, the remainder in the last; fewer parts if there are fewer groups."""
    order, num = by_spread(stds_G), min(num_buckets, len(stds_G))
    size = len(order) // max(1, num)
    starts = [size * part for part in range(num)]
    stops = [*starts[1:], len(order)]
    return {f"bucket_{part + 1}": order[starts[part] : stops[part]] for part in range(num)}


def fixed(stds_G: Sequence[float], num_buckets: int = len(EDGES) - 1) -> Buckets:
    """Groups with a spread in [0, 1) are bucket_1, …, in [5, inf) bucket_6; without empty buckets."""
    found: Buckets = {}
    for group in by_spread(stds_G):
        part = sum(stds_G[group] >= edge for edge in EDGES[:-1])
        found.setdefault(f"bucket_{part}", []).append(group)
    return found


BUCKETINGS: dict[str, Callable[[Sequence[float], int], Buckets]] = {"quantile": quantiles, "fixed_rv": fixed}


# --- sums ---------------------------------------------------------------------------------------------------------


class TermLoss(NamedTuple):
    """A term on a part of a group, with the weights of the group."""

    term: str
    total: Tensor  # with its coefficient, to be differentiated
    value: Tensor  # without its coefficient
    into: tuple[str, ...]  # the names of the sums to add it to


@dataclass(frozen=True)
class BucketGradient:
    """The measurements of a bucket."""

    num_groups: int
    norms: dict[str, float]  # of the gradient of each term
    losses: dict[str, float]  # of each term, without coefficients
    cosines: dict[tuple[str, str], float]  # between terms
    snr: float | None  # of the task's gradient; None for a single group, or without noise


@dataclass
class _Numbers:
    """The sums of a bucket besides gradients."""

    losses: dict[str, float]
    squares: float = 0.0  # sum of |v_i|^2 of the task

    def add_up(self, workers: Workers) -> None:
        held = torch.tensor([*self.losses.values(), self.squares], dtype=torch.float64, device=workers.device)
        workers.add_up([held])
        *losses, self.squares = held.tolist()
        self.losses = dict(zip(self.losses, losses, strict=True))


@dataclass
class Sums:
    """The gradients of buckets, summed group by group: one bucket at a time, in order.

    `counts_G` are the counts of all groups; buckets hold indices into it.
    """

    buckets: Buckets
    counts_G: Sequence[float]
    terms: Sequence[str]
    parameters: Sequence[Tensor]
    workers: Workers = ALONE
    measured: dict[str, BucketGradient] = field(default_factory=dict)
    between: dict[tuple[str, str], float] = field(default_factory=dict)
    total: dict[str, Vector] = field(default_factory=dict)  # of `all`, by term; on the first worker only

    def __post_init__(self):
        self.bucket_of = {group: name for name, groups in self.buckets.items() for group in groups}
        self.count = {name: sum(self.counts_G[group] for group in groups) for name, groups in self.buckets.items()}
        self.count_of_all = sum(self.count.values())
        self.group = self._zeros()
        # Sums allocated first are likelier to fit on the device. The task's is used once per group, so it comes last.
        self.bucket = {term: self._zeros() for term in sorted(self.terms, key=TASK.__eq__)}
        self.numbers, self.numbers_of_all = (_Numbers(dict.fromkeys(self.terms, 0.0)) for _ in range(2))
        self.kept: dict[str, Vector] = {}

    def _zeros(self) -> Vector:
        num_bytes = 4 * sum(parameter.numel() for parameter in self.parameters)
        device = device_for(num_bytes, self.workers.device)
        return [torch.zeros(parameter.shape, dtype=torch.float32, device=device) for parameter in self.parameters]

    def add(self, group: int, term: str, gradient: Sequence[Tensor | None], value: Tensor) -> None:
        """Add the gradient of one pass over a part of the group."""
        share = self.counts_G[group] / self.count[self.bucket_of[group]]  # the weight of the group in its bucket
        add_to(self.group if term == TASK else self.bucket[term], gradient, share)
        self.numbers.losses[term] += share * float(value)

    def end_group(self) -> None:
        """Call after all passes over a group."""
        self.numbers.squares += products([self.group], self.workers.device)[0][0]
        add_to(self.bucket[TASK], self.group, 1.0)
        clear(self.group)

    def end_bucket(self, name: str) -> None:
        """Call when all workers have finished the groups of a bucket."""
        for vector in self.bucket.values():
            add_up(vector, self.workers)
        self.numbers.add_up(self.workers)
        if self.workers.is_first:
            self.measured[name] = self._measure(self.bucket, self.numbers, len(self.buckets[name]))
            self._add_to_all(self.count[name] / self.count_of_all)
            self._keep(name)
        for vector in self.bucket.values():
            clear(vector)
        self.numbers = _Numbers(dict.fromkeys(self.terms, 0.0))
        if self.workers.is_first and len(self.measured) == len(self.buckets):
            self._end()

    def _add_to_all(self, share: float) -> None:
        self.total = self.total or {term: self._zeros() for term in self.terms}
        for term in self.terms:
            add_to(self.total[term], self.bucket[term], share)
            self.numbers_of_all.losses[term] += share * self.numbers.losses[term]
        self.numbers_of_all.squares += share**2 * self.numbers.squares

    def _keep(self, name: str) -> None:
        """Keep a copy of the task's gradient, in the type of the weights."""
        num_bytes = sum(parameter.nbytes for parameter in self.parameters)
        device = device_for(num_bytes, self.workers.device)
        pairs = zip(self.bucket[TASK], self.parameters, strict=True)
        self.kept[name] = [part.to(parameter.dtype, copy=True).to(device) for part, parameter in pairs]

    def _end(self) -> None:
        self.measured[ALL] = self._measure(self.total, self.numbers_of_all, len(self.bucket_of))
        matrix = products(list(self.kept.values()), self.workers.device)
        self.between = {
            (left, right): cosine(matrix, row, column)
            for (row, left), (column, right) in combinations(enumerate(self.kept), 2)
        }
        self.kept = {}

    def _measure(self, vectors: Mapping[str, Vector], numbers: _Numbers, num_groups: int) -> BucketGradient:
        matrix = products([vectors[term] for term in self.terms], self.workers.device)
        row = {term: index for index, term in enumerate(self.terms)}
        squares = {term: matrix[index][index] for term, index in row.items()}
        return BucketGradient(
            num_groups,
            norms={term: math.sqrt(square) for term, square in squares.items()},
            losses=dict(numbers.losses),
            cosines={pair: cosine(matrix, *(row[term] for term in pair)) for pair in combinations(self.terms, 2)},
            snr=signal_to_noise(num_groups, squares[TASK], numbers.squares),
        )


def signal_to_noise(num_groups: int, square: float, squares: float) -> float | None:
    """From |G|^2 and the sum of |v_i|^2. None for a single group or equal ones, 0 without a gradient."""
    if num_groups < 2:
        return None
    if square == 0:
        return 0.0
    noise = max(0.0, num_groups * squares - square)
    return (num_groups - 1) * square / noise if noise > 0 else None


def sweep(
    parameters: Sequence[Tensor],
    order: Iterable[int],
    sums: Mapping[str, Sums],
    passes_of: Callable[[int], Iterator[Sequence[TermLoss]]],
    workers: Workers = ALONE,
) -> None:
    """Process the groups in an order that keeps each bucket of all sums contiguous; workers take turns."""
    left = {name: {bucket: len(groups) for bucket, groups in part.buckets.items()} for name, part in sums.items()}
    for turn, group in enumerate(order):
        if turn % workers.size == workers.rank:
            _differentiate(parameters, sums, group, passes_of(group))
        for name, part in sums.items():
            bucket = part.bucket_of.get(group)
            if bucket is not None:
                left[name][bucket] -= 1
                if not left[name][bucket]:
                    part.end_bucket(bucket)


def _differentiate(
    parameters: Sequence[Tensor], sums: Mapping[str, Sums], group: int, passes: Iterable[Sequence[TermLoss]]
) -> None:
    for losses in passes:
        for number, loss in enumerate(losses, start=1):
            # All terms use the graph of the forward pass: only the last one may free it.
            gradient = torch.autograd.grad(loss.total, parameters, retain_graph=number < len(losses), allow_unused=True)
            for name in loss.into:
                sums[name].add(group, loss.term, gradient, loss.value)
    for part in sums.values():
        if group in part.bucket_of:
            part.end_group()


# --- vectors ------------------------------------------------------------------------------------------------------


def device_for(num_bytes: int, device: torch.device) -> torch.device:
    """The device if that much fits twice and leaves enough for activations; else main memory."""
    if device.type != "cuda":
        return device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return device if free + cached - 2 * num_bytes >= total // KEPT_FREE else CPU


def add_to(vector: Vector, other: Sequence[Tensor | None], factor: float) -> None:
    """Add `factor * other`. A parameter that a term does not use has no gradient."""
    for mine, theirs in zip(vector, other, strict=True):
        if theirs is not None:
            mine.add_(theirs if theirs.device == mine.device else moved(theirs, mine.device), alpha=factor)


def moved(part: Tensor, device: torch.device) -> Tensor:
    """In float32. To main memory through pinned memory, which is many times faster."""
    if device.type != "cpu":
        return part.to(device, torch.float32)
    stage = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return stage.copy_(part).float()


def add_up(vector: Vector, workers: Workers) -> None:
    """Sum over all workers. Vectors in main memory pass through the device, where workers communicate."""
    if workers.size == 1:
        return
    if vector[0].device == workers.device:
        workers.add_up(vector)
        return
    for part in vector:
        on_device = part.to(workers.device)
        workers.add_up([on_device])
        part.copy_(on_device)


def clear(vector: Vector) -> None:
    for part in vector:
        part.zero_()


def products(vectors: Sequence[Vector], device: torch.device) -> list[list[float]]:
    """Dot products of all vectors with each other, in float64 on the device. Reads each once."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=device)
    for parts in zip(*vectors, strict=True):
        for chunks in zip(*(part.flatten().split(CHUNK) for part in parts), strict=True):
            rows = torch.stack([chunk.to(device).double() for chunk in chunks])
            total += rows @ rows.T
    return total.tolist()


def cosine(matrix: Sequence[Sequence[float]], row: int, column: int) -> float:
    """From the dot products; 0 if one of the two vectors is zero."""
    squares = matrix[row][row] * matrix[column][column]
    return matrix[row][column] / math.sqrt(squares) if squares > 0 else 0.0
