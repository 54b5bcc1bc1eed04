"""The native engine: samples from the same module that is trained, in deterministic bursts.

    engine = NativeEngine(model, tokenizer, end_of_turn_id)
    engine.run(conversations, sampling)

A burst decodes a few tokens for every row without checking them. Then, in conversation order, the engine looks for the
ends of replies, passes finished ones on, and prefills all new prompts in one packed call. Tokens after a reply's end
are discarded. Nothing depends on a clock or on threads.

The last token of a prompt is not prefilled: it is the first input of the next burst, so that all sampling happens
there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragen.engine.base import Conversation, Prompt, Sampled, Sampling
from ragen.engine.native.cache import Decode, Prefill, RowCache
from ragen.engine.native.sampler import sample, signed, uniforms
from ragen.engine.stop import StopTokens
from ragen.protocols import SampledModel, Tokenizer

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
        max_rows: int = 256,
        burst: int = 4,
        max_prefill_tokens: int = 16384,
    ):
        self.model, self.tokenizer, self.end_of_turn_id = model, tokenizer, end_of_turn_id
        self.max_rows, self.burst, self.max_prefill_tokens = max_rows, burst, max_prefill_tokens
        self.stop = StopTokens(tokenizer, end_of_turn_id)

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


class EngineRun:
    """Running conversations: all of one call of `run`; more may join (`waiting.append`, `admit`)."""

    def __init__(self, engine: NativeEngine, waiting: list[Conversation], sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        self.waiting = deque(waiting)
        self.rows: list[Row | None] = []
        self.arrivals: list[int] = []  # rows with a new prompt
        self.statistics = Statistics()
        shape, weight = engine.model.shape, next(engine.model.parameters())
        self.cache = RowCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, 0, weight)
        self.device = weight.device

    @torch.no_grad()
    def step(self) -> int:
        """One burst; returns how many conversations ended."""
        self.prefill()
        self.decode()
        return self.collect()

    # --- rows ---------------------------------------------------------------------------------------------------

    def admit(self, num_rows: int) -> None:
        """Waiting conversations take empty rows and new ones, up to `num_rows` in total."""
        free = deque(index for index in range(num_rows) if index >= len(self.rows) or self.rows[index] is None)
        while self.waiting and free:
            row = self._next_waiting([])
            if row is not None:
                index = free.popleft()
                self.rows[index : index + 1] = [row]
                self.arrivals.append(index)
        self.cache.add_rows(len(self.rows) - len(self.cache.lengths))

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
        self.statistics.shared += row.start_turn(prompt)
        return row

    def _compact(self) -> None:
        """Drop empty rows once they are a quarter of all: until then copying costs more than they do."""
        busy = [index for index, row in enumerate(self.rows) if row is not None]
        if len(busy) * 4 > len(self.rows) * 3:
            return
        new_index = {old: new for new, old in enumerate(busy)}
        self.cache.keep_rows(torch.tensor(busy, dtype=torch.int64, device=self.device))
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
        self.cache.reserve(longest + self.engine.burst)
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
        self.cache.copy(source, targets, num_tokens)
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
        attend = Prefill(self.cache, indices, [len(row.held) for row in rows], counts)
        ids = torch.tensor([id_ for row in rows for id_ in row.pending[:-1]], device=self.device)
        self.engine.model.fill(ids, attend.positions, attend)
        self.statistics.prefilled += len(ids)
        for row, count in zip(rows, counts, strict=True):
            row.advance(count)

    # --- decode -------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """A burst: `burst` tokens for every row, without checking them."""
        model, cache = self.engine.model, self.cache
        rows = self.rows
        held = [0 if row is None else len(row.held) + row.num_fed for row in rows]
        last = [0 if row is None else (row.reply[-1] if row.num_fed else row.pending[-1]) for row in rows]
        keys = torch.tensor([0 if row is None else row.draw_key for row in rows], device=self.device)
        positions = torch.tensor([0 if row is None else len(row.reply) for row in rows], device=self.device)
        cache.lengths = torch.tensor(held, device=self.device)
        ids = torch.tensor(last, device=self.device)
        longest = max(held)
        cache.reserve(longest + self.engine.burst)
        sampled, log_probs = [], []
        for offset in range(self.engine.burst):
            hidden = model.hidden(ids, cache.lengths, Decode(cache, longest + offset + 1))
            ids, chosen = self._draw(model.logits(hidden), uniforms(keys, positions + offset))
            cache.lengths = cache.lengths + 1
            sampled.append(ids)
            log_probs.append(chosen)
        self._sampled = torch.stack(sampled, dim=1).tolist()
        self._log_probs = torch.stack(log_probs, dim=1).tolist()
        for row in rows:
            if row is not None:
                row.num_fed += self.engine.burst
        self.statistics.decoded += self.engine.burst * sum(row is not None for row in rows)

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
                self.statistics.shared += row.start_turn(prompt)
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
            if reason := self.engine.stop.reason(row.reply, self.sampling):
                return reason
        return ""


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    first, last = min(map(list, sequences)), max(map(list, sequences))  # the extremes in sorted order share the least
    length = 0
    for left, right in zip(first, last, strict=False):
        if left != right:
            break
        length += 1
    return length
