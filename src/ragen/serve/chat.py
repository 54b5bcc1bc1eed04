"""Messages to token ids, so that a conversation continues exactly where the model left it.

    renderer = Renderer(SharedTokenizer(tokenizer))
    ids = renderer.ids(messages)                          # a trailing assistant message is the opening of the reply
    renderer.remember(messages, reply_ids, reply_text, ended_itself)

A client sends past replies as text, and tokenising a text again can give other tokens than those that were sampled. The
ids of recent replies are therefore kept, and found again by their text. Text of a client never becomes a special token.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateError as JinjaError

from ragen.agent.chat_template import ChatTemplate
from ragen.serve.limits import ApiError
from ragen.serve.request import Message

MAX_REMEMBERED = 20_000  # replies


class _Kept(NamedTuple):
    opening: str  # what was given of the reply
    ids: tuple[int, ...]  # what was sampled
    ended_itself: bool


class SharedTokenizer:
    """A tokenizer for several threads, without a lock.

    Whether special tokens are read in a text is a setting, which must not change while another thread encodes. So each
    setting has its own copy.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._plain = tokenizer, deepcopy(tokenizer)
        for is_plain in (False, True):
            self.encode("", split_special_tokens=is_plain)  # the first call changes the setting, here in one thread

    def encode(self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        tokenizer = self._plain if split_special_tokens else self._tokenizer
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Renderer:
    def __init__(self, tokenizer: SharedTokenizer):
        self.tokenizer = tokenizer
        self.chat = ChatTemplate(tokenizer)
        self.max_token_length = max(map(len, tokenizer.get_vocab()))
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens before the reply."""
        past, opening = _split(messages)
        return self._exact(past, opening) if _is_plain(past) else self._by_template(past, opening)

    def min_tokens(self, messages: Sequence[Message]) -> int:
        """How many tokens these messages have at least. Cheap, however long they are."""
        return sum(len(message["content"]) for message in messages) // self.max_token_length

    def remember(self, messages: Sequence[Message], sampled: Sequence[int], text: str, ended_itself: bool) -> None:
        """Keep a reply to these messages: its text without the opening, and its ids."""
        past, opening = _split(messages)
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
        ids = self._opened(partial(self.chat.opening_ids, system["content"], first["content"]), openings[0])
        for item, (_, user), next_opening in zip(kept, turns, openings[1:], strict=True):
            ids += item.ids if item.ended_itself else (*item.ids, *self.chat.closing_ids())
            ids += self._opened(partial(self.chat.delta_ids, user["content"]), next_opening)
        return ids

    def _opened(self, ids_with: Callable[[str], list[int]], opening: str) -> list[int]:
        """`ids_with(opening)`, but an opening that spells a special token is taken as plain text."""
        tail = self.chat.tail
        if self._special(self._encode(tail + opening)) == self._special(self._encode(tail)):
            return ids_with(opening)
        return ids_with("") + self._encode(opening, is_plain=True)

    def _find(self, past: Sequence[Message], text: str) -> _Kept:
        """A reply as it was sampled; one of another conversation with the same text; or the text in tokens."""
        with self._lock:
            for key in (_key(past, text), _key((), text)):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        return _Kept("", tuple(self._encode(text, is_plain=True)), ended_itself=False)

    def _by_template(self, past: Sequence[Message], opening: str) -> list[int]:
        """Any other order of messages, as the model's own template renders it."""
        ids = self._encode(self._render(past) + opening)
        # Rendered again around placeholders, it shows which special tokens are the template's. If the text has others,
        # a client has spelt them: then the contents are encoded separately, as plain text.
        marked = [message | {"content": f"CONTENT{index}PLACEHOLDER"} for index, message in enumerate(past)]
        scaffold = re.split(r"CONTENT(\d+)PLACEHOLDER", self._render(marked))
        pieces = [past[int(part)]["content"] if index % 2 else part for index, part in enumerate(scaffold)]
        encoded = [self._encode(piece, index % 2 == 1) for index, piece in enumerate([*pieces, opening])]
        if self._special(ids) == [id_ for piece in encoded[::2] for id_ in self._special(piece)]:
            return ids
        return [id_ for piece in encoded for id_ in piece]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (JinjaError, ValueError, IndexError) as error:
            raise ApiError(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _encode(self, text: str, is_plain: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=is_plain)

    def _special(self, ids: Sequence[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self.chat.special_ids]


def _split(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages before the reply, and the part of the reply that is given."""
    has_opening = messages[-1]["role"] == "assistant"
    return (messages[:-1], messages[-1]["content"]) if has_opening else (messages, "")


def _is_plain(past: Sequence[Message]) -> bool:
    roles = [message["role"] for message in past]
    return len(roles) >= 2 and roles == ["system", "user", *["assistant", "user"] * (len(roles) // 2 - 1)]


def _key(past: Sequence[Message], text: str) -> int:
    return hash((tuple((message["role"], message["content"]) for message in past), text))
