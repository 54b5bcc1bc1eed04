"""The native engine, token by token, with stop texts and a token limit for each conversation.

    engine = StreamingEngine(model, tokenizer, end_of_turn_id)
    engine.run([reply], sampling)                  # reply.heard(id, log_prob) for every token

It samples what `NativeEngine` samples, and only looks for the end of a reply more often. Log-probs are those of the
model's own distribution at any temperature, as OpenAI's clients expect.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragen.engine.base import Conversation, Prompt, Sampled, Sampling
from ragen.engine.native.engine import EngineRun, NativeEngine, Row

NO_LIMIT = 1 << 40  # for `Sampling.max_tokens`: every reply has its own limit


@dataclass(frozen=True)
class Token:
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
