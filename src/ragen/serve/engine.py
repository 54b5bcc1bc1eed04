"""The native engine, heard token by token, with stop texts and a token limit for each conversation.

    engine = StreamingEngine(model, tokenizer, end_of_turn_id)
    engine.run([reply], sampling)                  # reply.heard(id, log_prob) for every token

What is sampled is what `NativeEngine` samples: only the end of a reply is looked for more often. Log-probs are those of
the model's own distribution, whatever the temperature, as OpenAI's clients expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ragen.engine.base import Conversation, Prompt, Sampled, Sampling
from ragen.engine.native.engine import EngineRun, NativeEngine, Row

NO_LIMIT = 1 << 40  # of `Sampling.max_tokens`: each reply has a limit of its own


@dataclass(frozen=True)
class Token:
    id: int
    log_prob: float


@dataclass
class Reply:
    """A conversation of one turn: a prompt, and the reply as it comes."""

    prompt_ids: tuple[int, ...]
    draw_key: int
    max_tokens: int
    stops: tuple[str, ...] = ()
    tokenizer: Any = None
    sampled: Sampled | None = None
    stop_text: str | None = None  # which of `stops` ended it
    error: Exception | None = None
    is_cancelled: bool = False
    arrivals: SimpleQueue = field(default_factory=SimpleQueue)  # Token …, then None
    _was_asked: bool = False

    def prompt(self) -> Prompt | None:
        if self._was_asked:
            return None
        self._was_asked = True
        return Prompt(self.prompt_ids, False, self.draw_key)

    def take(self, reply: Sampled) -> None:
        self.sampled = reply
        self.arrivals.put(None)

    def heard(self, id_: int, log_prob: float) -> None:
        self.arrivals.put(Token(id_, log_prob))

    def fail(self, error: Exception) -> None:
        self.error = error
        self.arrivals.put(None)

    def ends_at(self, ids: Sequence[int]) -> str:
        """Why the reply ends with the last of these tokens, if it does."""
        if self.stops:
            # A stop text of so many bytes is at most so many tokens.
            num_tokens = max(len(text.encode()) for text in self.stops) + 3
            tail = self.tokenizer.decode(ids[-num_tokens:], skip_special_tokens=False)
            found = [text for text in self.stops if text in tail]
            if found:
                self.stop_text = min(found, key=tail.index)
                return "answer"
        return "length" if len(ids) >= self.max_tokens or self.is_cancelled else ""


class StreamingEngine(NativeEngine):
    """For conversations that also `heard` and know where they end (`ends_at`)."""

    def start(self, conversations: list[Conversation], sampling: Sampling) -> EngineRun:
        return _StreamingRun(self, conversations, sampling)


class _StreamingRun(EngineRun):
    def _draw(self, logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        ids, _ = super()._draw(logits, draws)
        return ids, torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, None])[:, 0]

    def _read(self, row: Row, ids: list[int], log_probs: list[float]) -> str:
        reply = row.conversation
        for id_, log_prob in zip(ids, log_probs, strict=True):
            stopped_by = super()._read(row, [id_], [log_prob]) or reply.ends_at(row.reply)
            reply.heard(id_, log_prob)
            if stopped_by:
                return stopped_by
        return ""
