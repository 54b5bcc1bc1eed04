"""Replies as OpenAI's JSON: one whole answer, or the chunks of a stream.

completion = Completion("pocket", renderer, request, replies)
await completion.whole()
async for chunk in completion.chunks(): …
"""

import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ragen.serve.chat import Renderer
from ragen.serve.engine import Reply, Token
from ragen.serve.limits import ApiError
from ragen.serve.request import ChatRequest

BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # how byte-level tokenizers spell bytes


class Completion:
    def __init__(self, name: str, renderer: Renderer, request: ChatRequest, replies: Sequence[Reply]):
        self.renderer, self.request, self.replies = renderer, request, replies
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(self.replies):
            tokens = [token async for token in reply.tokens()]
            choice = {"index": index, "message": {"role": "assistant", "content": self._finish(reply)}}
            choices.append(choice | _end(reply) | {"logprobs": self._log_probs(tokens)})
        return self.head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """One choice after the other, each token by token. They add up to `whole`."""
        for index, reply in enumerate(self.replies):
            yield self._chunk(index, {"role": "assistant", "content": ""})
            ids: list[int] = []
            sent, unsent = "", []
            async for token in reply.tokens():
                ids.append(token.id)
                unsent.append(token)
                text = self._safe(ids, len(sent))
                if len(text) > len(sent) and text.startswith(sent):
                    yield self._chunk(index, {"content": text[len(sent) :]}, unsent)
                    sent, unsent = text, []
            text = self._finish(reply)
            if text[len(sent) :] or unsent:
                yield self._chunk(index, {"content": text[len(sent) :]}, unsent)
            yield self._chunk(index, {}, **_end(reply))
        if self.request.stream_options.get("include_usage"):
            yield self.head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def cancel(self) -> None:
        """Unfinished replies end with their next token."""
        for reply in self.replies:
            reply.is_cancelled = True

    def _chunk(self, index: int, delta: dict[str, str], tokens: Sequence[Token] = (), **end: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None} | end
        if self.request.logprobs:
            choice["logprobs"] = self._log_probs(tokens) if tokens else None
        return self.head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _finish(self, reply: Reply) -> str:
        """The text of a reply that has ended. The renderer remembers its ids."""
        if reply.is_cancelled:  # half a reply must not pass for a whole one
            raise ApiError("the server is stopping", status=503)
        if reply.error is not None:
            raise ApiError(f"the model failed: {reply.error}", status=500)
        sampled, text = reply.sampled, self._decode(reply.sampled.ids)
        if reply.stop_text is not None and not self.request.include_stop_str_in_output:
            return text.partition(reply.stop_text)[0]
        self.renderer.remember(self.request.messages, sampled.ids, text, sampled.stopped_by == "end_of_turn")
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] == self.renderer.chat.end_of_turn_id else ids
        return self.renderer.tokenizer.decode(ids, skip_special_tokens=False)

    def _safe(self, ids: Sequence[int], num_sent: int) -> str:
        """What can be sent: no half of a character, and nothing that is or may become a stop text."""
        text = self._decode(ids).rstrip("\ufffd")
        if not self.request.include_stop_str_in_output:
            for start in range(num_sent, len(text)):
                rest = text[start:]
                if any(stop.startswith(rest) or rest.startswith(stop) for stop in self.request.stop):
                    return text[:start]
        return text

    def _log_probs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        content = []
        for token in tokens:
            text = self.renderer.tokenizer.decode([token.id], skip_special_tokens=False)
            bytes_ = token_bytes(self.renderer.tokenizer, token.id, text)
            content.append({"token": text, "logprob": token.log_prob, "bytes": bytes_, "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.replies[0].prompt_ids)
        completion = sum(len(reply.sampled.ids) for reply in self.replies)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _end(reply: Reply) -> dict[str, Any]:
    reason = "length" if reply.sampled.stopped_by == "length" else "stop"
    return {"finish_reason": reason, "stop_reason": reply.stop_text}


def token_bytes(tokenizer: Any, id_: int, text: str) -> list[int] | None:
    """The bytes of a token. A part of a character has no text: its bytes are what the vocabulary spells, if it does."""
    if "\ufffd" not in text:
        return list(text.encode())
    spelt = tokenizer.convert_ids_to_tokens(id_)
    byte = re.fullmatch("<0x([0-9A-F]{2})>", spelt)
    found = bytes.fromhex(byte[1]) if byte else bytes(BYTES[letter] for letter in spelt if letter in BYTES)
    return list(found) if found.decode(errors="replace") == text else None
