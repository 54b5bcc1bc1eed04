"""HTTP for one model: `/v1/chat/completions` (whole or as a stream), `/v1/models`, `/v1/models/NAME`, `/health`.

    with Server(loaded, "pocket", "127.0.0.1", 8000) as server:
        server.base                                        # http://127.0.0.1:8000/v1

Errors are OpenAI error objects. A field that would change the reply and is not supported is refused by name; nothing is
ignored in silence. Besides OpenAI's fields: `top_k`, `include_stop_str_in_output`, and `add_generation_prompt` with
`continue_final_message`, by which clients say what is done here anyway: a trailing assistant message is continued.
"""

import json
import re
import secrets
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ragen.engine.base import Sampling
from ragen.errors import ConfigError, nearest_of
from ragen.evaluate.models import max_positions
from ragen.model.load import LoadedModel
from ragen.prng import bits
from ragen.serve import base_of
from ragen.serve.batch import Batcher
from ragen.serve.chat import BadMessages, LockedTokenizer, Renderer
from ragen.serve.engine import NO_LIMIT, Reply, StreamingEngine, Token

MAX_BODY_BYTES = 32_000_000
ROLES = ("system", "user", "assistant")
# Fields that have no bearing on the reply.
HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields that are refused unless they say what happens anyway.
ONLY = {
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_p": (0, 0.0, None),
    "top_logprobs": (0, None),
    "logit_bias": ({}, None),
    "tools": ([], None),
    "functions": ([], None),
    "tool_choice": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "continue_final_message": (False, True, None),
    "add_generation_prompt": (False, True, None),
    "echo": (False, None),
}
FIELDS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "stream", "stop",
    "seed", "logprobs", "include_stop_str_in_output", "stream_options",
)  # fmt: skip
MAX_CHOICES = 128
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # how byte-level tokenizers spell bytes
GOODBYE_S = 5  # for telling a client that the server stops
UNKNOWN_LENGTH = 4096  # tokens, of a model that does not say for how many it was made


class BadRequest(Exception):
    """What the client is told, as an OpenAI error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Server:
    def __init__(
        self, loaded: LoadedModel, name: str, host: str = "127.0.0.1", port: int = 0, max_model_len: int | None = None
    ):
        self.name, self.tokenizer = name, LockedTokenizer(loaded.tokenizer)
        self.names = {name, loaded.source.name}
        self.renderer = Renderer(self.tokenizer)
        self.limit = max_model_len or max_positions(loaded.source.model_folder) or UNKNOWN_LENGTH
        self.created = int(time.time())
        engine = StreamingEngine(loaded.model, loaded.tokenizer, self.renderer.chat.end_of_turn_id)
        self.batcher = Batcher(engine)
        self.answering: set[threading.Thread] = set()
        try:
            self._web = (_Web6 if ":" in host else _Web)(
                (host, port), type("Handler", (_Handler,), {"server_of_model": self})
            )
        except OSError as error:
            raise ConfigError(f"--port {port}: {host}:{port} cannot be taken: {error.strerror or error}") from error
        self.base = base_of(host, self._web.server_address[1])
        self._thread = threading.Thread(target=self._web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "Server":
        self._stack = ExitStack()
        self._stack.enter_context(self.batcher)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._stack.close()
        for thread in list(self.answering):  # else it could end with the process, its answer unsent
            thread.join(GOODBYE_S)

    def wait(self) -> None:
        """Until interrupted."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    # --- requests -----------------------------------------------------------------------------------------------

    def model(self) -> dict[str, Any]:
        one = {"id": self.name, "object": "model", "created": self.created, "owned_by": "ragen"}
        return one | {"max_model_len": self.limit}

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model()]}

    def begin(self, body: Any, has_left: Callable[[], bool]) -> "Completion":
        """Check a request and hand it to the model. `has_left` tells whether the client is gone."""
        asked = _Asked(body, self.names)
        try:
            ids = tuple(self.renderer.ids(asked.messages))
        except BadMessages as error:
            raise BadRequest(str(error), "messages") from error
        room = self.limit - len(ids)
        if room < 1 or (asked.max_tokens or 1) > room:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens, and with the {asked.max_tokens or 1} of the reply that is more "
                f"than this model's context of {self.limit}",
                "messages",
                "context_length_exceeded",
            )
        replies = [Reply(ids, key, asked.max_tokens or room, asked.stops, self.tokenizer) for key in asked.draw_keys()]
        self.batcher.submit(replies, asked.sampling)
        return Completion(self, asked, replies, has_left)


class _Asked:
    """The fields of a request, checked."""

    def __init__(self, body: Any, names: set[str]):
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        self._check_fields(body)
        self.model = _typed(body, "model", str, None)
        if self.model not in names:
            raise BadRequest(f"there is no model {self.model!r}; this server has {sorted(names)[0]!r}", "model",
                             "model_not_found", 404)  # fmt: skip
        self.messages = _messages(body.get("messages"))
        if self.messages[-1]["role"] != "assistant" and body.get("add_generation_prompt") is False:
            raise BadRequest("without a trailing assistant message, add_generation_prompt must be true", "messages")
        if self.messages[-1]["role"] == "assistant" and body.get("continue_final_message") is False:
            raise BadRequest("a trailing assistant message is continued: continue_final_message=false is not supported "
                             "with one", "continue_final_message", "unsupported_parameter")  # fmt: skip
        self.max_tokens = _limit(body)
        self.stream = _typed(body, "stream", bool, False)
        self.usage_in_stream = _typed(_typed(body, "stream_options", dict, {}), "include_usage", bool, False)
        self.logprobs = _typed(body, "logprobs", bool, False)
        self.keeps_stop = _typed(body, "include_stop_str_in_output", bool, False)
        self.stops = _stops(body.get("stop"))
        self.num_choices = _number(body, "n", int, 1, 1, MAX_CHOICES)
        self.seed = _number(body, "seed", int, None, -(1 << 63), (1 << 63) - 1)
        temperature = _number(body, "temperature", float, 1.0, 0.0, 100.0)
        self.sampling = Sampling(
            temperature=temperature or 1.0,
            top_p=_number(body, "top_p", float, 1.0, 1e-9, 1.0),
            top_k=_number(body, "top_k", int, -1, -1, 1 << 31),
            greedy=temperature == 0,
            max_tokens=NO_LIMIT,
            stop_at_answer=False,
        )

    def _check_fields(self, body: Mapping[str, Any]) -> None:
        for name, value in body.items():
            if name in ONLY:
                if not any(
                    (value == allowed and type(value) is not bool) or value is allowed for allowed in ONLY[name]
                ):
                    raise BadRequest(
                        f"{name}={json.dumps(value)[:100]} is not supported", name, "unsupported_parameter"
                    )
            elif name not in FIELDS and name not in HARMLESS:
                near = nearest_of(name, FIELDS)
                raise BadRequest(f"unknown field {name!r}{near}", name, "unknown_parameter")

    def draw_keys(self) -> list[int]:
        """64 bits for each choice: the first of a seed is the seed itself."""
        if self.seed is None:
            return [secrets.randbits(64) for _ in range(self.num_choices)]
        first = self.seed % (1 << 64)
        return [first, *(bits("serve", first, index, num_bits=64) for index in range(1, self.num_choices))]


# --- replies ------------------------------------------------------------------------------------------------------


class Completion:
    """One answer on its way."""

    def __init__(self, server: Server, asked: _Asked, replies: Sequence[Reply], has_left: Callable[[], bool]):
        self.server, self.asked, self.replies, self.has_left = server, asked, replies, has_left
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": server.name,
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(self.replies):
            tokens = list(self._tokens(reply))
            self._check(reply)
            text = self._finish(reply)
            choice = {"index": index, "message": {"role": "assistant", "content": text}, **self._end(reply)}
            choices.append(choice | {"logprobs": self._log_probs(tokens) if self.asked.logprobs else None})
        return self.head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The parts of a stream: one choice after the other, each token by token."""
        for index, reply in enumerate(self.replies):
            yield self._chunk(index, {"role": "assistant", "content": ""})
            ids: list[int] = []
            sent, unsent = "", []
            for token in self._tokens(reply):
                ids.append(token.id)
                unsent.append(token)
                text = self._safe(ids, len(sent))
                if len(text) > len(sent) and text.startswith(sent):
                    yield self._chunk(index, {"content": text[len(sent) :]}, unsent)
                    sent, unsent = text, []
            self._check(reply)
            text = self._finish(reply)
            if text[len(sent) :] or unsent:
                yield self._chunk(index, {"content": text[len(sent) :]}, unsent)
            yield self._chunk(index, {}, (), self._end(reply))
        if self.asked.usage_in_stream:
            yield self.head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _tokens(self, reply: Reply) -> Iterator[Token]:
        while (token := reply.arrivals.get()) is not None:
            if self.has_left():
                raise ConnectionResetError("nobody listens any more")
            yield token

    def cancel(self) -> None:
        """What is not done yet need not be."""
        for reply in self.replies:
            reply.is_cancelled = True

    def _chunk(
        self, index: int, delta: Mapping[str, str], tokens: Sequence[Token] = (), end: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": dict(delta), "finish_reason": None} | dict(end or {})
        if self.asked.logprobs:
            choice["logprobs"] = self._log_probs(tokens) if tokens else None
        return self.head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _check(self, reply: Reply) -> None:
        if reply.is_cancelled:  # half a reply must not pass for a whole one
            raise BadRequest("the server is stopping", status=503)
        if reply.error is not None:
            raise BadRequest(f"the model failed: {reply.error}", status=500)

    def _decode(self, ids: Sequence[int]) -> str:
        if ids and ids[-1] == self.server.renderer.chat.end_of_turn_id:
            ids = ids[:-1]
        return self.server.tokenizer.decode(ids, skip_special_tokens=False)

    def _safe(self, ids: Sequence[int], num_sent: int) -> str:
        """What can be sent: no half of a character, and nothing that is or may become a stop text."""
        text = self._decode(ids).rstrip("\ufffd")
        if not self.asked.stops or self.asked.keeps_stop:
            return text
        for start in range(num_sent, len(text)):
            if any(stop.startswith(text[start:]) or text[start:].startswith(stop) for stop in self.asked.stops):
                return text[:start]
        return text

    def _finish(self, reply: Reply) -> str:
        """The text of a reply that has ended; it is remembered as the ids that it is."""
        sampled = reply.sampled
        text = self._decode(sampled.ids)
        if reply.stop_text is not None and not self.asked.keeps_stop:
            text = text.partition(reply.stop_text)[0]
        else:
            self.server.renderer.remember(
                self.asked.messages, sampled.ids, text, ended_itself=sampled.stopped_by == "end_of_turn"
            )
        return text

    def _end(self, reply: Reply) -> dict[str, Any]:
        reason = "length" if reply.sampled.stopped_by == "length" else "stop"
        return {"finish_reason": reason, "stop_reason": reply.stop_text}

    def _log_probs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = []
        for token in tokens:
            text = self.server.tokenizer.decode([token.id], skip_special_tokens=False)
            entry = {"token": text, "logprob": token.log_prob, "bytes": self._bytes(token.id, text), "top_logprobs": []}
            content.append(entry)
        return {"content": content, "refusal": None}

    def _bytes(self, id_: int, text: str) -> list[int] | None:
        """Those of a token. A part of a character has no text: its bytes are what the vocabulary spells, if it does."""
        if "\ufffd" not in text:
            return list(text.encode())
        spelt = self.server.tokenizer.convert_ids_to_tokens(id_)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", spelt)
        found = bytes.fromhex(byte[1]) if byte else bytes(BYTES[letter] for letter in spelt if letter in BYTES)
        return list(found) if found.decode(errors="replace") == text else None

    def _usage(self) -> dict[str, int]:
        prompt = len(self.replies[0].prompt_ids)
        completion = sum(len(reply.sampled.ids) for reply in self.replies)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# --- fields -------------------------------------------------------------------------------------------------------


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        if default is None:
            raise BadRequest(f"{name} is missing", name)
        return default
    if not isinstance(value, kind):
        raise BadRequest(f"{name}={json.dumps(value)[:100]}: must be a {kind.__name__}", name)
    return value


def _number(body: Mapping[str, Any], name: str, kind: type, default: Any, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    is_right = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not is_right or (kind is int and not isinstance(value, int)):
        raise BadRequest(
            f"{name}={json.dumps(value)[:100]}: must be {'a whole number' if kind is int else 'a number'} between "
            f"{low:g} and {high:g}",
            name,
        )
    return kind(value)


def _limit(body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(names) == 2 and body[names[0]] != body[names[1]]:
        raise BadRequest("max_tokens and max_completion_tokens say the same thing: keep one of them", names[0])
    return _number(body, names[0], int, None, 1, 1 << 31) if names else None


def _stops(value: Any) -> tuple[str, ...]:
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(text, str) and text for text in listed):
        raise BadRequest("stop must be a text or a list of texts, none of them empty", "stop")
    return tuple(listed)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: Any, name: str) -> dict[str, str]:
    role = item.get("role") if isinstance(item, dict) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise BadRequest(f"{name}.role must be one of {', '.join(ROLES)}", name)
    content = item.get("content")
    if isinstance(content, list):  # parts
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise BadRequest(f"{name}.content must be text: this model reads nothing else", name)
    return {"role": role, "content": content}


def _failed(error: Exception) -> BadRequest:
    return BadRequest(f"the server failed: {type(error).__name__}: {error}", status=500)


# --- HTTP ---------------------------------------------------------------------------------------------------------


class _Web(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


class _Web6(_Web):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server_of_model: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ragen", ""
    timeout = 600

    def do_GET(self) -> None:
        server = self.server_of_model
        by_name = {f"/v1/models/{name}": server.model for name in server.names}
        self._answer({"/v1/models": server.models, "/health": lambda: {"status": "ok"}} | by_name)

    def do_POST(self) -> None:
        thread, answering = threading.current_thread(), self.server_of_model.answering
        answering.add(thread)
        try:
            self._answer({"/v1/chat/completions": self._complete})
        finally:
            answering.discard(thread)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a request is no news."""

    def _answer(self, routes: Mapping[str, Any]) -> None:
        path = unquote(self.path.partition("?")[0]).rstrip("/")
        try:
            if path not in routes:
                known = ", ".join(("POST /v1/chat/completions", "GET /v1/models", "GET /health"))
                raise BadRequest(f"{self.command} {path}: there is only {known}", code="not_found", status=404)
            answer = routes[path]()
            if answer is not None:
                self._send(200, answer)
        except BadRequest as error:
            self.close_connection = True  # a body may be left that nobody has read
            self._send(error.status, error.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:  # a client that hears nothing would ask again and again
            traceback.print_exc()
            self.close_connection = True
            self._send(500, _failed(error).body)

    def _complete(self) -> dict[str, Any] | None:
        completion = self.server_of_model.begin(self._body(), self._has_left)
        try:
            if not completion.asked.stream:
                return completion.whole()
            self._stream(completion)
        finally:
            completion.cancel()
        return None

    def _has_left(self) -> bool:
        """Whether the client has closed the connection."""
        watched = select.poll()
        watched.register(self.connection, select.POLLIN)
        return bool(watched.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def _stream(self, completion: Completion) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for chunk in completion.chunks():
                self._event(json.dumps(chunk))
            self._event("[DONE]")
        except BadRequest as error:  # too late for a status
            self._event(json.dumps(error.body))
        except OSError:
            pass  # nobody listens any more
        except Exception as error:
            traceback.print_exc()
            self._event(json.dumps(_failed(error).body))

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _body(self) -> Any:
        kind = self.headers.get("Content-Type", "")
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", size):
            raise BadRequest(f"Content-Length must be given as a number, not {size[:100]!r}")
        if int(size) > MAX_BODY_BYTES:
            raise BadRequest(f"Content-Length must be at most {MAX_BODY_BYTES}", status=413)
        content = self.rfile.read(int(size))
        if kind.partition(";")[0].strip() != "application/json":  # a web page elsewhere cannot send this unasked
            raise BadRequest("Content-Type must be application/json", status=415)
        try:
            body = json.loads(content)
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("a text of the body holds half of a character, a lone surrogate such as \\ud83d") from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        return body

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
