"""Rows on a GPU: one captured CUDA graph a token, replayed in bursts over slots at fixed addresses.

    rows = GraphRows(decoder, has_triton=True)
    rows.begin(sampling)                         # before every run: weights may have moved since the last
    rows.add(128)
    ids, log_probs = rows.burst(inputs, 8, draw)

The device part of an engine run, as `eager.EagerRows`. There is a graph for each number of rows in `ROW_STEPS` (and,
without Triton, for each range of lengths). It computes one token for all its rows, draws it, records it and moves the
rows on, so the host looks only between bursts. Prefilling a few tokens is captured too: launching its kernels takes
longer than running them. Slots and graphs stay for the next run, unless they are released: where updates need their
memory, capturing them again takes about a second. They are made for `max_tokens` at once, since growing moves them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ragen.engine.base import Sampling
from ragen.engine.native.eager import Draw, Inputs
from ragen.engine.native.sampler import sample, uniforms
from ragen.engine.native.slot_memory import rounded
from ragen.engine.native.slots import IDS, KEYS, LENGTHS, POSITIONS, Slots
from ragen.protocols import SampledModel

FILL_STEPS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # beyond, computing takes longer than launching
TOKENS_PER_TILE = 16  # of a captured prefill, on average at least; with Triton
LENGTH_STEP = 512  # without Triton: a graph reads lengths rounded up to this
MAX_BURST = 64


class GraphRows:
    def __init__(self, decoder: SampledModel, has_triton: bool, capture: bool = True, max_tokens: int = 0):
        self.decoder, self.has_triton, self.capture = decoder, has_triton, capture
        self.max_tokens = max_tokens  # of a conversation, with the burst after it; 0: not known
        self.device = next(decoder.parameters()).device
        self.slots = Slots(decoder, 0, has_triton)
        self.num_rows = 0
        self.temperature = torch.ones((), dtype=torch.float32, device=self.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._weights: tuple[int, ...] = ()
        self._forget_graphs()

    def begin(self, sampling: Sampling) -> None:
        """A new run: no rows. Graphs are dropped if the weights have other addresses than at their capture."""
        self.sampling, self.num_rows = sampling, 0
        self.temperature.fill_(1.0 if sampling.greedy else sampling.temperature)
        weights = tuple(parameter.data_ptr() for parameter in self.decoder.parameters())
        if weights != self._weights:
            self._weights = weights
            self._forget_graphs()

    def release(self) -> None:
        """Give the memory of slots and graphs back; the next run takes it again."""
        self._forget_graphs()
        self.slots = Slots(self.decoder, 0, self.has_triton)

    def _forget_graphs(self) -> None:
        self._graphs: dict[tuple[object, ...], Callable[[], None]] = {}
        self._fills: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        self._pool: Any = None  # memory that all graphs share, which never run at the same time; it goes with them

    # --- rows -----------------------------------------------------------------------------------------------------

    def add(self, count: int) -> None:
        self.num_rows += count
        if self.num_rows > self.slots.num_rows:
            self._enlarge(rounded(self.num_rows))

    def _enlarge(self, num_rows: int) -> None:
        self._forget_graphs()
        self.slots.add_rows(num_rows - self.slots.num_rows)
        self.ids = torch.zeros(MAX_BURST, num_rows, dtype=torch.int64, device=self.device)
        self.log_probs = torch.zeros(MAX_BURST, num_rows, dtype=torch.float32, device=self.device)

    def keep(self, rows: list[int]) -> None:
        self.slots.keep(rows)
        self.num_rows = len(rows)

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.slots.cache.capacity:
            self._forget_graphs()
            self.slots.reserve(max(num_tokens, self.max_tokens))

    def copy(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        self.slots.copy(source, targets, num_tokens)

    def fill(self, rows: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        num_tokens = sum(map(len, ids))
        size = next((step for step in FILL_STEPS if step >= num_tokens), 0)
        if not (size and self.has_triton):
            self.slots.fill(rows, starts, ids)
            return
        given, tiles = self.slots.packed(rows, starts, ids, size, size // TOKENS_PER_TILE)
        if len(tiles) > size // TOKENS_PER_TILE:  # many short parts
            self.slots.fill(rows, starts, ids)
            return
        if size not in self._fills:
            self._fills[size] = self._captured_fill(size)
        static, static_tiles, replay = self._fills[size]
        static.copy_(given)
        static_tiles.copy_(tiles)
        replay()

    def _captured_fill(self, size: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        static, tiles = (part.to(self.device) for part in self.slots.packed([], [], [], size, size // TOKENS_PER_TILE))
        return static, tiles, self._captured(lambda: self.slots.fill_packed(static, tiles))

    # --- bursts ---------------------------------------------------------------------------------------------------

    def burst(self, inputs: Inputs, num_tokens: int, draw: Draw) -> tuple[list[list[int]], list[list[float]]]:
        """Sample tokens for every row: ids and log-probs. `draw` is not used: graphs draw by themselves."""
        assert num_tokens <= MAX_BURST
        count = len(inputs.lengths)
        num_rows = rounded(count)
        self.reserve(max(inputs.lengths) + num_tokens)
        longest = min(-(-(max(inputs.lengths) + num_tokens) // LENGTH_STEP) * LENGTH_STEP, self.slots.cache.capacity)
        advance = self._graph(num_rows, 0 if self.has_triton else longest)
        given = torch.zeros(4, num_rows, dtype=torch.int64)
        given[:, :count] = torch.tensor(inputs)
        self.slots.state[:, :num_rows].copy_(given)
        self.step.zero_()
        for _ in range(num_tokens):
            advance()
        ids, log_probs = self.ids[:num_tokens, :count], self.log_probs[:num_tokens, :count]
        return ids.T.tolist(), log_probs.T.tolist()

    def _graph(self, num_rows: int, longest: int) -> Callable[[], None]:
        sampling = self.sampling
        restricted = not sampling.greedy and (sampling.top_p < 1 or sampling.top_k >= 1)
        kind = (sampling.temperature, sampling.top_p, sampling.top_k) if restricted or not self.has_triton else ()
        key = (num_rows, longest, sampling.greedy, *kind)
        if key not in self._graphs:
            self._graphs[key] = self._captured(lambda: self._advance(num_rows, longest, sampling, restricted))
        return self._graphs[key]

    def _captured(self, advance: Callable[[], None]) -> Callable[[], None]:
        """The trial that compiles kernels and makes workspaces writes where no row has a token yet."""
        self.slots.state.zero_()
        self.slots.state[LENGTHS] = self.slots.cache.capacity - 1
        self.step.zero_()
        if not self.capture:
            advance()
            return advance
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            advance()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            advance()
        return graph.replay

    def _advance(self, num_rows: int, longest: int, sampling: Sampling, restricted: bool) -> None:
        """One token for the first rows, all on the device."""
        logits, state = self.slots.logits(num_rows, longest), self.slots.state
        if self.has_triton and not restricted:
            from ragen.engine.native.kernels import draw

            draw(logits, self.temperature, state, self.ids, self.log_probs, self.step, sampling.greedy)
        else:
            rows = slice(0, num_rows)
            ids, log_probs = sample(logits, uniforms(state[KEYS, rows], state[POSITIONS, rows]), sampling)
            self._record(self.ids, ids)
            self._record(self.log_probs, log_probs)
            state[IDS, rows] = ids
            state[LENGTHS, rows] += 1
            state[POSITIONS, rows] += 1
        self.step += 1

    def _record(self, listed: Tensor, values: Tensor) -> None:
        listed[:, : len(values)].index_copy_(0, self.step[None], values[None])
