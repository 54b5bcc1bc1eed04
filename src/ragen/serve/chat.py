"""Messages to token ids, so that a conversation continues exactly where the model left it.

    renderer = Renderer(tokenizer)
    ids = renderer.ids(messages)                          # a trailing assistant message is the opening of the reply
    renderer.remember(messages, reply_ids, reply_text, ended_itself)

A client sends past replies as text. Tokenised again, a text can become other tokens than those that were sampled; the
replies of the last conversations are therefore kept as ids, and found again by their text.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError as JinjaError

from ragen.agent.template import ChatTemplate

MAX_REMEMBERED = 20_000  # replies

Message = dict[str, str]


class BadMessages(ValueError):
    """The messages cannot be put into tokens."""


@dataclass(frozen=True)
class _Kept:
    opening: str  # what was given of the reply
    ids: tuple[int, ...]  # what was sampled
    ended_itself: bool


class LockedTokenizer:
    """A tokenizer for several threads: it changes its own settings from call to call."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._lock = tokenizer, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        if not callable(value):
            return value

        def locked(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return value(*args, **kwargs)

        return locked


class Renderer:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.chat = ChatTemplate(tokenizer)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens in front of the reply."""
        past, opening = _parted(messages)
        if _is_plain(past):
            return self._exact(past, opening)
        return self._by_template(past, opening)

    def remember(self, messages: Sequence[Message], sampled: Sequence[int], text: str, ended_itself: bool) -> None:
        """Keep a reply to these messages: its text, the opening not included, and its ids."""
        past, opening = _parted(messages)
        kept = _Kept(opening, tuple(sampled), ended_itself)
        with self._lock:
            for key in (_key(past, opening + text), _key((), opening + text)):
                self._kept[key] = kept
                self._kept.move_to_end(key)
            while len(self._kept) > 2 * MAX_REMEMBERED:
                self._kept.popitem(last=False)

    def _exact(self, past: Sequence[Message], opening: str) -> list[int]:
        """system, user, assistant, user, …: the pieces that a rollout is made of."""
        system, first, *rest = past
        turns = list(zip(rest[::2], rest[1::2], strict=True))
        kept = [self._find(past[: 2 + 2 * index], reply["content"]) for index, (reply, _) in enumerate(turns)]
        openings = [*(item.opening for item in kept), opening]
        ids = self.chat.opening_ids(system["content"], first["content"], openings[0])
        for item, (_, user), next_opening in zip(kept, turns, openings[1:], strict=True):
            ids += item.ids if item.ended_itself else (*item.ids, *self.chat.closing_ids())
            ids += self.chat.delta_ids(user["content"], next_opening)
        return ids

    def _find(self, past: Sequence[Message], text: str) -> _Kept:
        """A reply as it was sampled; one of another conversation with the same text; or the text in tokens."""
        with self._lock:
            for key in (_key(past, text), _key((), text)):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return _Kept("", tuple(ids), ended_itself=False)

    def _by_template(self, past: Sequence[Message], opening: str) -> list[int]:
        """Any other order of messages, as the model's own template has it."""
        try:
            text = self.tokenizer.apply_chat_template(list(past), tokenize=False, add_generation_prompt=True)
        except (JinjaError, ValueError, IndexError) as error:
            raise BadMessages(f"the model's chat template refuses these messages: {error}") from error
        return self.tokenizer.encode(text + opening, add_special_tokens=False)


def _parted(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages before the reply, and the part of the reply that is given."""
    has_opening = messages[-1]["role"] == "assistant"
    return (messages[:-1], messages[-1]["content"]) if has_opening else (messages, "")


def _is_plain(past: Sequence[Message]) -> bool:
    roles = [message["role"] for message in past]
    expected = ["system", "user", *(["assistant", "user"] * (len(roles) // 2 - 1))]
    return len(roles) >= 2 and roles == expected


def _key(past: Sequence[Message], text: str) -> int:
    return hash((tuple((message["role"], message["content"]) for message in past), text))
