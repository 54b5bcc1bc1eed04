"""The native engine, token by token, with stop texts and a token limit for each conversation; for many clients at once.

    engine = StreamingEngine(model, tokenizer, end_of_turn_id)
    engine.run([reply], sampling)                  # reply.heard(id, log_prob) for every token
    with Batcher(engine) as batcher:
        batcher.submit(replies, sampling)          # returns at once; the replies fill up

It samples what `NativeEngine` samples, and only looks for the end of a reply more often. Log-probs are those of the
model's own distribution at any temperature, as OpenAI's clients expect.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragen.engine.base import Conversation, Prompt, Sampled, Sampling
from ragen.engine.native.engine import EngineRun, NativeEngine, Row

NO_LIMIT = 1 << 40  # for `Sampling.max_tokens`: every reply has its own limit
GATHER_S = 0.01  # clients that were answered together return together, within this time


class Token(NamedTuple):
    id: int
    log_prob: float


@dataclass
class Reply:
    """A conversation of one turn. The engine's thread fills it, the event loop that created it reads `tokens()`."""

    prompt_ids: tuple[int, ...]
    draw_key: int
    max_tokens: int
    stops: Sequence[str] = ()
    tokenizer: Any = None
    sampled: Any = None  # `Sampled`, once it has ended
    stop_text: str | None = None  # which of `stops` ended it
    error: Exception | None = None
    is_cancelled: bool = False
    has_started: bool = False
    _arrivals: asyncio.Queue = field(default_factory=asyncio.Queue)  # Token …, then None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def tokens(self) -> AsyncIterator[Token]:
        while (token := await self._arrivals.get()) is not None:
            yield token

    def prompt(self) -> Prompt | None:
        if self.has_started:
            return None
        self.has_started = True
        return Prompt(self.prompt_ids, False, self.draw_key)

    def heard(self, id_: int, log_prob: float) -> None:
        self._put(Token(id_, log_prob))

    def take(self, reply: Sampled) -> None:
        self.sampled = reply
        self._put(None)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._put(None)

    def _put(self, token: Token | None) -> None:
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, token)

    def ends_at(self, ids: Sequence[int]) -> str:
        """Why the reply ends with the last of these tokens, if it does."""
        if self.stops:
            # A stop text has at most as many tokens as bytes.
            num_tokens = max(len(text.encode()) for text in self.stops) + 3
            tail = self.tokenizer.decode(ids[-num_tokens:], skip_special_tokens=False)
            found = [text for text in self.stops if text in tail]
            if found:
                self.stop_text = min(found, key=tail.index)
                return "answer"
        return "length" if len(ids) >= self.max_tokens or self.is_cancelled else ""


class StreamingEngine(NativeEngine):
    """For conversations that also have `heard` and `ends_at`."""

    def start(self, conversations: list[Conversation], sampling: Sampling) -> EngineRun:
        return _StreamingRun(self, conversations, sampling)


class _StreamingRun(EngineRun):
    CAN_REPLAY = False

    def _draw(self, logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        ids, _ = super()._draw(logits, draws)
        return ids, torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, None])[:, 0]

    def _read(self, row: Row, ids: list[int], log_probs: list[float]) -> str:
        reply: Any = row.conversation
        for id_, log_prob in zip(ids, log_probs, strict=True):
            stopped_by = super()._read(row, [id_], [log_prob]) or reply.ends_at(row.reply)
            reply.heard(id_, log_prob)
            if stopped_by:
                return stopped_by
        return ""


class Batcher:
    """Answers requests together, whenever they arrive.

    One thread runs the model in bursts of a few tokens. Between two bursts, new requests join those that are sampled in
    the same way; those sampled in different ways take turns. A token's draw depends on its own prompt and seed alone,
    so a reply does not depend on what shares its batch.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self._waiting: deque[tuple[Sampling, Reply]] = deque()
        self._has_news = threading.Event()
        self._runs: dict[Sampling, EngineRun] = {}
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._is_closed = False

    def __enter__(self) -> "Batcher":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Refuses what runs, what waits, and what is submitted later."""
        self._is_closed = True
        self._has_news.set()
        self._thread.join()
        self._refuse_all()

    def submit(self, replies: Sequence[Reply], sampling: Sampling) -> None:
        self._waiting.extend((sampling, reply) for reply in replies)
        self._has_news.set()
        if not self._thread.is_alive():
            self._refuse_all()

    def _work(self) -> None:
        while not self._is_closed:
            self._admit()
            for sampling, run in list(self._runs.items()):
                self._step(run)
                if not run.rows:
                    del self._runs[sampling]

    def _refuse_all(self) -> None:
        for reply in [*self._in_flight(), *(reply for _, reply in list(self._waiting))]:
            reply.is_cancelled = True
            reply.fail(RuntimeError("the server is stopping"))

    def _admit(self) -> None:
        """First come, first served, while there are free rows. When idle, wait a moment after the first."""
        if not self._runs and not self._waiting:
            self._has_news.wait()
            self._has_news.clear()
            time.sleep(GATHER_S)
        room = self.engine.max_rows - len(self._in_flight())
        for _ in range(min(room, len(self._waiting))):
            sampling, reply = self._waiting.popleft()
            if sampling not in self._runs:
                self._runs[sampling] = self.engine.start([], sampling)
            self._runs[sampling].waiting.append(reply)

    def _in_flight(self) -> list[Reply]:
        return [reply for run in self._runs.values() for reply in _replies(run)]

    def _step(self, run: EngineRun) -> None:
        try:
            run.admit(self.engine.max_rows)
            run.step()
        except Exception as error:  # the clients get any error, and the server keeps running
            for reply in _replies(run):
                reply.fail(error)
            run.rows = []


def _replies(run: EngineRun) -> list[Any]:
    return [*(row.conversation for row in run.rows if row is not None), *run.waiting]
