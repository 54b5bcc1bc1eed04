"""The native engine: samples from the same module that is trained, in deterministic bursts.

    engine = NativeEngine(model, tokenizer, end_of_turn_id)
    engine.run(conversations, sampling)

A burst decodes a few tokens for every row without checking them (`eager.py`; on a GPU `graphs.py`; without a cache
`recompute.py`; chosen in `way.py`). Then, in conversation order, the engine looks for the ends of replies, passes
finished ones on, and prefills all new prompts in one packed call. Tokens after a reply's end are discarded. Nothing
depends on a clock or on threads.

The last token of a prompt is not prefilled: it is the first input of the next burst, so that all sampling happens
there.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen.engine.base import Conversation, Prompt, Sampled, Sampling
from ragen.engine.native.eager import EagerRows, Inputs
from ragen.engine.native.recompute import RecomputedRows
from ragen.engine.native.sampler import sample, signed
from ragen.engine.native.slot_memory import MAX_ROWS
from ragen.engine.native.way import choose_way, slots_of_share
from ragen.engine.stop import StopTokens
from ragen.protocols import SampledModel, Tokenizer

if TYPE_CHECKING:
    from ragen.engine.native.graphs import GraphRows

WORTH_SHARING = 16  # a shorter common prefix costs more calls than it saves


@dataclass
class Row:
    """One running conversation. The cache holds `held`, then what bursts have fed of the current turn."""

    conversation: Conversation
    held: list[int]
    pending: list[int] = field(default_factory=list)  # not fed yet; the next burst feeds the last of them
    draw_key: int = 0
    reply: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    forced_length: int = 0  # of the reply; 0: it ends as it is sampled
    num_fed: int = 0  # inputs of this turn fed by bursts: the prompt's last token, then the reply's

    def start_turn(self, prompt: Prompt) -> int:
        """Returns how many tokens of the prompt the cache already holds."""
        if self.num_fed:
            self.held += [self.pending[-1], *self.reply[: self.num_fed - 1]]
        if prompt.continues:
            # The reply's last token was sampled, but not fed unless a burst went beyond it.
            self.pending = [*self.reply[self.num_fed - 1 :], *prompt.ids]
            num_reused = 0
        else:
            num_reused = min(_common_prefix([self.held, prompt.ids]), len(prompt.ids) - 1)
            self.held, self.pending = list(prompt.ids[:num_reused]), list(prompt.ids[num_reused:])
        self.draw_key = signed(prompt.draw_key)
        self.reply, self.log_probs, self.num_fed = [], [], 0
        return num_reused

    def advance(self, num_tokens: int) -> None:
        """Mark the first `num_tokens` pending tokens as held by the cache."""
        self.held += self.pending[:num_tokens]
        del self.pending[:num_tokens]


@dataclass
class Statistics:
    """The cost of an engine run."""

    prefilled: int = 0  # tokens computed by prefill
    shared: int = 0  # prompt tokens copied instead
    decoded: int = 0  # tokens sampled, including discarded ones
    kept: int = 0  # tokens sampled and kept


class NativeEngine:
    def __init__(
        self,
        model: SampledModel,
        tokenizer: Tokenizer,
        end_of_turn_id: int,
        max_rows: int = MAX_ROWS,
        burst: int | None = None,
        max_prefill_tokens: int = 16384,
        max_tokens: int | None = None,  # of a conversation, if known
        memory_share: float = 1.0,  # of the GPU's memory, that conversations of this length may take
    ):
        self.model, self.tokenizer, self.end_of_turn_id = model, tokenizer, end_of_turn_id
        self.way = choose_way(model, max_tokens)
        self.max_rows, self.burst, self.max_prefill_tokens = max_rows, burst or self.way.burst, max_prefill_tokens
        if self.way.graphs and max_tokens is not None:
            self.max_rows = slots_of_share(model, max_rows, max_tokens, memory_share)
        self._max_tokens = 0 if max_tokens is None else max_tokens + self.burst
        self.stop = StopTokens(tokenizer, end_of_turn_id)
        self._graph_rows: GraphRows | None = None  # kept from run to run
        self._borrower: Callable[[], EngineRun | None] = lambda: None  # the run that has them

    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> Statistics:
        run = self.start(list(conversations), sampling)
        run.admit(self.max_rows)
        while run.rows:
            num_finished = run.step()
            if num_finished:
                on_finished(num_finished)
        return run.statistics

    def start(self, conversations: list[Conversation], sampling: Sampling) -> "EngineRun":
        return EngineRun(self, conversations, sampling)

    def release(self) -> None:
        """Give the memory of the slots back; the next run takes it again."""
        if self._graph_rows is not None:
            self._graph_rows.release()

    def lend_rows(self, run: "EngineRun") -> "EagerRows | GraphRows | RecomputedRows":
        """The device part of a run. The slots of graphs serve one run at a time."""
        if self.way.recomputes:
            return RecomputedRows(self.model)
        borrower = self._borrower()
        is_taken = borrower is not None and bool(borrower.rows or borrower.waiting)
        if not (self.way.graphs and run.CAN_REPLAY) or is_taken:
            return EagerRows(self.model)
        from ragen.engine.native.graphs import GraphRows

        if self._graph_rows is None:
            self._graph_rows = GraphRows(self.model, self.way.triton, max_tokens=self._max_tokens)
        self._graph_rows.begin(run.sampling)
        self._borrower = weakref.ref(run)
        return self._graph_rows


class EngineRun:
    """Running conversations: all of one call of `run`; more may join (`waiting.append`, `admit`)."""

    CAN_REPLAY = True  # whether tokens are drawn as `sampler.sample` draws them, so that graphs can

    def __init__(self, engine: NativeEngine, waiting: list[Conversation], sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        self.waiting = deque(waiting)
        self.rows: list[Row | None] = []
        self.arrivals: list[int] = []  # rows with a new prompt
        self.statistics = Statistics()
        self.device_rows = engine.lend_rows(self)

    @torch.no_grad()
    def step(self) -> int:
        """One burst; returns how many conversations ended."""
        self.prefill()
        self.decode()
        return self.collect()

    # --- rows ---------------------------------------------------------------------------------------------------

    def admit(self, num_rows: int) -> None:
        """Waiting conversations take empty rows and new ones, up to `num_rows` in total."""
        num_before = len(self.rows)
        free = deque(index for index in range(num_rows) if index >= len(self.rows) or self.rows[index] is None)
        while self.waiting and free:
            row = self._next_waiting([])
            if row is not None:
                index = free.popleft()
                self.rows[index : index + 1] = [row]
                self.arrivals.append(index)
        self.device_rows.add(len(self.rows) - num_before)

    def _row(self, index: int) -> Row:
        row = self.rows[index]
        assert row is not None, f"row {index} is empty"
        return row

    def _next_waiting(self, held: list[int]) -> Row | None:
        """The next conversation, in a row whose cache holds these tokens; it reuses what its prompt shares."""
        conversation = self.waiting.popleft()
        prompt = conversation.prompt()
        if prompt is None:
            return None
        row = Row(conversation, held)
        self._start_turn(row, prompt)
        return row

    def _start_turn(self, row: Row, prompt: Prompt) -> None:
        self.statistics.shared += row.start_turn(prompt)
        forced = self.sampling.forced_length
        row.forced_length = forced.tokens(prompt.draw_key, self.sampling.max_tokens) if forced else 0

    def _compact(self) -> None:
        """Drop empty rows once they are a quarter of all: until then copying costs more than they do."""
        busy = [index for index, row in enumerate(self.rows) if row is not None]
        if len(busy) * 4 > len(self.rows) * 3:
            return
        new_index = {old: new for new, old in enumerate(busy)}
        self.device_rows.keep(busy)
        self.rows = [self.rows[index] for index in busy]
        self.arrivals = [new_index[index] for index in self.arrivals]

    # --- prefill ------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Compute all new prompts but their last token. Equal prompts and the common prefix are computed once."""
        fresh: dict[tuple[int, ...], list[int]] = {}
        work: list[int] = []
        for index in self.arrivals:
            row = self._row(index)
            if row.held:
                work.append(index)
            else:
                fresh.setdefault(tuple(row.pending), []).append(index)
        longest = max(len(row.held) + row.num_fed + len(row.pending) for row in self.rows if row is not None)
        self.device_rows.reserve(longest + self.engine.burst)
        if fresh:
            first, *others = [copies[0] for copies in fresh.values()]
            shared = min(_common_prefix(list(fresh)), *(len(ids) - 1 for ids in fresh))
            if others and shared >= WORTH_SHARING:
                self._compute([first])
                self._share(first, others, shared)
                work = others + work
            else:
                work = [first, *others, *work]
        self._compute(work)
        for source, *copies in fresh.values():
            if copies:
                self._share(source, copies, len(self._row(source).held))
        self.arrivals = []

    def _share(self, source: int, targets: list[int], num_tokens: int) -> None:
        self.device_rows.copy(source, targets, num_tokens)
        self.statistics.shared += num_tokens * len(targets)
        for index in targets:
            self._row(index).advance(num_tokens)

    def _compute(self, indices: list[int]) -> None:
        batch: list[int] = []
        num_tokens = 0
        for index in indices:
            count = len(self._row(index).pending) - 1
            if batch and num_tokens + count > self.engine.max_prefill_tokens:
                self._compute_packed(batch)
                batch, num_tokens = [], 0
            if count:
                batch.append(index)
                num_tokens += count
        if batch:
            self._compute_packed(batch)

    def _compute_packed(self, indices: list[int]) -> None:
        rows = [self._row(index) for index in indices]
        counts = [len(row.pending) - 1 for row in rows]
        self.device_rows.fill(indices, [len(row.held) for row in rows], [row.pending[:-1] for row in rows])
        self.statistics.prefilled += sum(counts)
        for row, count in zip(rows, counts, strict=True):
            row.advance(count)

    # --- decode -------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """A burst: `burst` tokens for every row, without checking them."""
        rows, burst = self.rows, self.engine.burst
        inputs = Inputs(
            lengths=[0 if row is None else len(row.held) + row.num_fed for row in rows],
            ids=[0 if row is None else (row.reply[-1] if row.num_fed else row.pending[-1]) for row in rows],
            keys=[0 if row is None else row.draw_key for row in rows],
            positions=[0 if row is None else len(row.reply) for row in rows],
        )
        self._sampled, self._log_probs = self.device_rows.burst(inputs, burst, self._draw)
        for row in rows:
            if row is not None:
                row.num_fed += burst
        self.statistics.decoded += burst * sum(row is not None for row in rows)

    def _draw(self, logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits, draws, self.sampling)

    # --- replies ------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """Pass on the replies that ended; returns how many conversations ended."""
        num_finished = 0
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            stopped_by = self._read(row, self._sampled[index], self._log_probs[index])
            if not stopped_by:
                continue
            self.statistics.kept += len(row.reply)
            row.conversation.take(Sampled(tuple(row.reply), tuple(row.log_probs), stopped_by))
            prompt = row.conversation.prompt()
            if prompt is not None:
                self._start_turn(row, prompt)
                self.arrivals.append(index)
                continue
            num_finished += 1
            self.rows[index] = None
            held = [*row.held, row.pending[-1]]
            while self.waiting and self.rows[index] is None:
                self.rows[index] = self._next_waiting(held)
                if self.rows[index] is not None:
                    self.arrivals.append(index)
        self._compact()
        return num_finished

    def _read(self, row: Row, ids: list[int], log_probs: list[float]) -> str:
        """Append a burst's tokens up to the end of the reply; returns why it ended, or an empty string."""
        for id_, log_prob in zip(ids, log_probs, strict=True):
            row.reply.append(id_)
            row.log_probs.append(log_prob)
            if row.forced_length:
                reason = self._forced_reason(row)
            else:
                reason = self.engine.stop.reason(row.reply, self.sampling)
            if reason:
                return reason
        return ""

    def _forced_reason(self, row: Row) -> str:
        if len(row.reply) < row.forced_length:
            return ""
        return "end_of_turn" if row.reply[-1] == self.engine.end_of_turn_id else "length"


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    first, last = min(map(list, sequences)), max(map(list, sequences))  # the extremes in sorted order share the least
    length = 0
    for left, right in zip(first, last, strict=False):
        if left != right:
            break
        length += 1
    return length
