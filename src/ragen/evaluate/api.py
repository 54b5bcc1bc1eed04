"""An engine for models behind an OpenAI-compatible server.

    engine = ServerEngine(Client("http://127.0.0.1:8000/v1", key), "pocket", max_prompt_tokens=3200)
    engine.run(conversations, sampling)

A server gives no token ids, so `CharacterChat` stands in for a tokenizer: a character is a token, and the roles are
tokens that no text contains. Window modes, forced opening and parsing then work as with every other engine, and the
tokens of a prompt are read back as messages.

The forced opening of a reply is sent as a trailing assistant message (prefill), with the two fields by which servers
continue it. `</answer>` is sent as a stop text together with the field that keeps it in the reply. A server that
refuses or ignores one of these no longer gets it: a repeated opening is removed from its replies, and they are cut at
the stop text. Once a server has answered with it, only a refusal that names it takes it away.
"""

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ragen.agent.parse import TAGS
from ragen.engine.base import Conversation, Sampled, Sampling
from ragen.errors import ConfigError
from ragen.evaluate.client import WRONG_KEY, BudgetSpent, Client, Refused, TransientError, Unanswered, run_async

LAST_CHARACTER = 0x10FFFF
SYSTEM, USER, ASSISTANT, END, CUT = range(LAST_CHARACTER + 1, LAST_CHARACTER + 6)
ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}
ANSWER_START, ANSWER_END = TAGS[-2:]

PREFILL_FIELDS = {"add_generation_prompt": False, "continue_final_message": True}
STOP_FIELDS = {"stop": [ANSWER_END], "include_stop_str_in_output": True}
PREFILL_WORDS = (*PREFILL_FIELDS, "prefill", "assistant", "last message", "final message")
STOP_WORDS = tuple(STOP_FIELDS)

Features = tuple[bool, bool, str]  # prefill, stop text, the name of the limit of tokens
CUT_OFF = ("length", "max_tokens")  # why a reply ended, as servers name it; other names are a normal end
NO_REPLY = ("content_filter", "tool_calls", "function_call")
BROKEN_OFF = ("error", "abort")

TOO_LONG = ("context_length_exceeded", "context length", "context size", "too many tokens")
SERVER_LIMIT = re.compile(r"context(?: length| size)?(?: is| of)? \(?(\d+)")  # in a refusal
CHARACTERS_A_TOKEN = 3  # where a server does not count: rather too many tokens than too few
MAX_COUNT_DIGITS = 12  # a longer count is nonsense


@dataclass(frozen=True)
class Answer:
    """What is used of a server's answer. Counts are None where the server gives none."""

    text: str
    reason: str | None  # why it ended
    stopped_at: str | None  # the stop text that ended it
    tells_stop: bool  # whether the server says which stop text it was
    num_prompt_tokens: int | None
    num_reply_tokens: int | None
    num_tokens: int | None


def read_answer(answer: Mapping[str, Any]) -> Answer:
    """Raises `TransientError` where it cannot be read."""
    choices = answer.get("choices")
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise TransientError("the answer has no message")
    text, reason = _text(message.get("content")), choice.get("finish_reason")
    if reason in BROKEN_OFF or (reason is None and not text):
        raise TransientError(f"a reply that ended by {reason}")
    usage = answer.get("usage")
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = [_count(usage.get(name)) if isinstance(usage, dict) else None for name in names]
    return Answer(text, reason, choice.get("stop_reason"), "stop_reason" in choice, *counts)


def _text(content: Any) -> str:
    """A text, or the parts of one."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    if content is not None and not isinstance(content, str):
        raise TransientError("the content of the answer is not text")
    return content or ""


def _count(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) <= MAX_COUNT_DIGITS else None


class CharacterChat:
    """Does for a server what `agent.chat_template.ChatTemplate` does for a model with a tokenizer."""

    end_of_turn_id = END
    special_tokens: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> "CharacterChat":
        return self

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(id_) for id_ in ids if id_ <= LAST_CHARACTER)

    def opening_ids(self, system_text: str, user_text: str, reply_prefix: str) -> list[int]:
        return [SYSTEM, *map(ord, system_text), END, *self.delta_ids(user_text, reply_prefix)]

    def delta_ids(self, user_text: str, reply_prefix: str) -> list[int]:
        return [USER, *map(ord, user_text), END, ASSISTANT, *map(ord, reply_prefix)]

    def closing_ids(self) -> list[int]:
        return [END]


def messages_of(ids: Sequence[int]) -> list[dict[str, str]]:
    """The messages that tokens of a `CharacterChat` stand for; the last one is the opening of the reply."""
    starts = [index for index, id_ in enumerate(ids) if id_ in ROLES]
    decode = CharacterChat().decode
    return [
        {"role": ROLES[ids[start]], "content": decode(ids[start:stop])} for start, stop in pairwise([*starts, len(ids)])
    ]


class ServedConversation(Conversation, Protocol):
    """A conversation that can also end without a reply."""

    def fail(self, reason: str) -> None:
        """It cannot be completed."""

    def cut(self) -> None:
        """The last prompt was longer than the context allows."""

    def count(self, num_tokens: int | None) -> None:
        """The number of tokens of the next reply, as the server counts."""


class ServerEngine:
    """Runs `concurrency` conversations at a time, each an asyncio task."""

    def __init__(self, client: Client, model: str, max_prompt_tokens: int, concurrency: int = 16, prefill: bool = True):
        self.client, self.model = client, model
        self.max_prompt_tokens, self.concurrency = max_prompt_tokens, concurrency
        self.prefill, self.stops, self.limit_name = prefill, True, "max_tokens"
        self.was_refused: list[str] = []  # features that the server does not have
        self.num_left = 0  # conversations that the budget did not allow
        self.has_played = False  # whether this server has completed episodes before
        self._has_answered = self._heeds_prefill = self._heeds_stops = False

    def run(
        self,
        conversations: Sequence[ServedConversation],
        sampling: Sampling,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        slots = asyncio.Semaphore(self.concurrency)

        async def run_one(conversation: ServedConversation) -> None:
            async with slots:
                try:
                    await self._carry(conversation, sampling)
                    on_finished(1)
                except BudgetSpent:
                    self.num_left += 1

        async def run_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for conversation in conversations:
                    tasks.create_task(run_one(conversation))

        try:
            run_async(run_all())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _carry(self, conversation: ServedConversation, sampling: Sampling) -> None:
        held: list[int] = []
        num_known = 0  # the next prompt has at least this many tokens
        while (prompt := conversation.prompt()) is not None:
            held = [*held, *prompt.ids] if prompt.continues else list(prompt.ids)
            num_known = num_known if prompt.continues else 0
            messages = messages_of(held)
            try:
                answer = await self._ask(messages, prompt.draw_key, sampling)
            except Unanswered as error:
                return conversation.fail(str(error))
            except Refused as error:
                if any(phrase in str(error).lower() for phrase in TOO_LONG):
                    return self._end_too_long(conversation, str(error), num_known, sampling)
                self._stop_if_hopeless(error)
                return conversation.fail(str(error))
            num_known = answer.num_tokens or 0
            if (answer.num_prompt_tokens or 0) > self.max_prompt_tokens:
                return conversation.cut()
            if answer.reason in NO_REPLY:
                return conversation.fail(f"a reply that ended by {answer.reason}")
            reply = self._reply(answer, messages[-1]["content"], sampling)
            conversation.count(answer.num_reply_tokens)
            conversation.take(reply)
            held += reply.ids
        return None

    def _end_too_long(self, conversation: ServedConversation, said: str, num_known: int, sampling: Sampling) -> None:
        """A prompt beyond our limit ends the episode. A server with a lower one would drop only the long episodes."""
        ours = self.max_prompt_tokens + sampling.max_tokens
        found = SERVER_LIMIT.search(said.lower())
        if num_known > self.max_prompt_tokens or (found and int(found[1]) >= ours):
            return conversation.cut()
        size = f"has a context of {found[1]} tokens" if found else f"has too little context ({said})"
        raise ConfigError(
            f"{self.client.base} {size}, and an episode may take {ours} (actor_rollout_ref.rollout.max_model_len): "
            f"start the server with {ours} or more (`ragen serve --max-model-len {ours}`), or end episodes earlier "
            f"with actor_rollout_ref.rollout.max_model_len={found[1] if found else 'N'}"
        )

    def _stop_if_hopeless(self, error: Refused) -> None:
        """Raise what every other conversation would meet too."""
        if error.status in WRONG_KEY:
            raise ConfigError(f"{self.client.base} refuses the key: {error}; see --api-key-env") from error
        if error.status == 404 or not (self._has_answered or self.has_played):
            raise ConfigError(f"{self.client.base} refuses the request for model {self.model}: {error}") from error

    async def _ask(self, messages: list[dict[str, str]], draw_key: int, sampling: Sampling) -> Answer:
        """The server's answer. A feature that it refuses is not sent again."""
        guesses = False
        while True:
            features = (False, False, self.limit_name) if guesses else self._features
            body = self._body(messages, draw_key, sampling, features)
            try:
                answer = await self.client.post("/chat/completions", body, read_answer)
            except Refused as error:
                guesses = self._guesses_after(error, features, guesses)
                continue
            guesses = False
            self.client.budget.num_tokens += num_tokens(body["messages"], answer)
            if not self._has_answered:  # the server refuses what its first answer came without
                self._has_answered = True
                self._drop(not features[0], not features[1])
            if not self._was_ignored(answer, messages[-1]["content"], sampling, features):
                return answer

    @property
    def _features(self) -> Features:
        return self.prefill, self.stops, self.limit_name

    def _body(
        self, messages: list[dict[str, str]], draw_key: int, sampling: Sampling, features: Features
    ) -> dict[str, Any]:
        prefill, stops, limit_name = features
        body = {
            "model": self.model,
            "messages": messages if prefill else messages[:-1],
            limit_name: sampling.max_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "seed": draw_key - (1 << 64) if draw_key >= 1 << 63 else draw_key,
        }
        if sampling.top_k >= 1 and not sampling.greedy:
            body["top_k"] = sampling.top_k
        if prefill:
            body |= PREFILL_FIELDS
        if sampling.stop_at_answer and stops:
            body |= STOP_FIELDS
        return body

    def _guesses_after(self, error: Refused, tried: Features, guessed: bool) -> bool:
        """Drop the features that it names; if none, whether to try without any. Raises it if they cannot be why."""
        text = str(error).lower()
        if error.status not in (400, 422) or any(phrase in text for phrase in TOO_LONG):
            raise error
        refuses_prefill = tried[0] and any(word in text for word in PREFILL_WORDS)
        refuses_stops = tried[1] and any(word in text for word in STOP_WORDS)
        refuses_limit = tried[2] == "max_tokens" and "max_completion_tokens" in text
        if refuses_prefill or refuses_stops or refuses_limit:
            self._drop(refuses_prefill, refuses_stops)
            self.limit_name = "max_completion_tokens" if refuses_limit else self.limit_name
            return guessed
        if guessed or not any(tried[:2]) or (self._has_answered and tried == self._features):
            raise error
        return not self._has_answered  # else another conversation has found out

    def _drop(self, prefill: bool, stops: bool) -> None:
        self.was_refused += ["prefill"] * (self.prefill and prefill) + ["stop text"] * (self.stops and stops)
        self.prefill &= not prefill
        self.stops &= not stops

    def _was_ignored(self, answer: Answer, opening: str, sampling: Sampling, tried: Features) -> bool:
        """Whether the server ignores a feature, as its first replies show; then the request is repeated."""
        if tried[:2] != (self.prefill, self.stops):
            return True  # another conversation has found out
        ignores_prefill = ignores_stops = False
        if self.prefill and answer.text.strip() and not self._heeds_prefill:  # an empty reply shows nothing
            ignores_prefill = answer.text.lstrip().startswith(opening)
            self._heeds_prefill = not ignores_prefill
        if self.stops and sampling.stop_at_answer and not self._heeds_stops:
            # A reply that ends inside its answer has lost the stop text, unless the server says why it stopped.
            self._heeds_stops = ANSWER_END in answer.text or answer.tells_stop
            is_open = ANSWER_START in opening + answer.text and answer.reason not in (*CUT_OFF, *NO_REPLY)
            ignores_stops = is_open and not self._heeds_stops
        self._drop(ignores_prefill, ignores_stops)
        return ignores_prefill or ignores_stops

    def _reply(self, answer: Answer, opening: str, sampling: Sampling) -> Sampled:
        """The reply as characters, and why it ended."""
        text = answer.text
        if not self.prefill and text.lstrip().startswith(opening):
            text = text.lstrip().removeprefix(opening)
        stopped_by = "length" if answer.reason in CUT_OFF else "end_of_turn"
        if sampling.stop_at_answer and ANSWER_END in text:
            stopped_by = "answer"
            if answer.stopped_at != ANSWER_END:
                text = text[: text.index(ANSWER_END) + len(ANSWER_END)]
        ids = [*map(ord, text)] + [END] * (stopped_by == "end_of_turn") or [CUT]
        return Sampled(tuple(ids), (0.0,) * len(ids), stopped_by)


def num_tokens(messages: Sequence[Mapping[str, str]], answer: Answer) -> int:
    """Of prompt and reply, as the server counts, or estimated from the length of the texts."""
    if answer.num_tokens:
        return answer.num_tokens
    texts = [*(message["content"] for message in messages), answer.text]
    return math.ceil(sum(map(len, texts)) / CHARACTERS_A_TOKEN)
