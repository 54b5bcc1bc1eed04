"""Requests to an OpenAI-compatible server, with retries, a deadline for each and a budget for all.

client = Client("http://127.0.0.1:8000/v1", key, budget=Budget(max_requests=1000))
answer = run_async(client.post("/chat/completions", {…}))

All requests share one event loop: in asyncio a deadline covers a whole request, however its bytes arrive.
"""

import asyncio
import email.utils
import functools
import json
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ragen.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    import httpx

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
AWAY = {429, 502, 503, 504, 529}  # the server is not there, or has no time for anybody
WRONG_KEY = {401, 403}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
NOTE_EVERY_S = 60.0  # between two notes about the same kind of trouble
MAX_ANSWER_BYTES = 8 << 20
SHORTEST_SECRET = 8  # a shorter key is a placeholder such as EMPTY, which a reply may well contain


def plain(text: str) -> str:
    """A server's text as one line without control characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class Refused(RunFailed):
    """The server rejects this request, and would do so again."""

    def __init__(self, status: int, text: str):
        super().__init__(plain(text))
        self.status = status


class TransientError(Exception):
    """May be gone at the next attempt. `is_there`: it came from the server itself."""

    def __init__(self, text: str, is_there: bool = True, retry_after: float = 0.0):
        super().__init__(plain(text))
        self.is_there, self.retry_after = is_there, retry_after


class Unanswered(RunFailed):
    """No answer to this request within the patience, from a server that is there."""


class ServerGone(RunFailed):
    """No request reached the server within the patience."""


class BudgetSpent(RunFailed):
    """The allowed requests or tokens are used up."""


@dataclass
class Budget:
    """What may be used and what was used; None is no limit. One for all models of a call.

    Every attempt counts before it is sent; one that could not connect is given back. Tokens are known only with the
    answer, so requests under way can exceed that limit.
    """

    max_requests: int | None = None
    max_tokens: int | None = None  # of prompts and replies
    num_requests: int = 0
    num_tokens: int = 0

    def take(self) -> None:
        """Count one more request. Raises `BudgetSpent`."""
        used = ((self.num_requests, self.max_requests, "requests"), (self.num_tokens, self.max_tokens, "tokens"))
        for count, limit, what in used:
            if limit is not None and count >= limit:
                raise BudgetSpent(f"{limit} {what} are used up")
        self.num_requests += 1


class Client:
    """Posts JSON, again after transient errors: with growing, jittered pauses, or as long as the server asks for."""

    def __init__(
        self,
        base: str,
        key: str = "",
        patience_s: float = 600.0,
        timeout_s: float = 600.0,
        budget: Budget | None = None,
        note: Callable[[str], None] = lambda text: None,
        jitter: Callable[[], float] = random.random,
    ):
        import httpx

        self.base, self.key = base.rstrip("/"), key
        self.patience_s, self.timeout_s = patience_s, timeout_s
        self.budget = Budget() if budget is None else budget
        self.note, self.jitter = note, jitter
        self.sleep = asyncio.sleep
        self._outage: float | None = None  # since when nothing was answered
        self._noted_outage: float | None = None
        self._noted: dict[str, float] = {}  # kind of trouble -> time of the last note
        headers = {"Content-Type": "application/json", "User-Agent": "ragen", "Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # see `_send`
            limits=httpx.Limits(max_keepalive_connections=0),  # a kept connection may be closed when it is used again
            trust_env=urlsplit(base).hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy to this machine
            verify=ssl.create_default_context(),  # the certificates of the system
        )

    async def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], Any] = lambda answer: answer
    ) -> Any:
        """`read(answer)` of the JSON answer; where `read` raises `TransientError`, the request is sent again.

        Raises `Refused`, `Unanswered`, `ServerGone`, `BudgetSpent` or `ConfigError`.
        """
        import tenacity

        first_failure = math.inf

        def stop(state: Any) -> bool:
            nonlocal first_failure
            now = time.monotonic()
            first_failure = min(first_failure, now)
            return self._is_over(state.outcome.exception(), first_failure, now, state.upcoming_sleep)

        def wait(state: Any) -> float:
            return self._pause(state.attempt_number - 1, state.outcome.exception().retry_after)

        is_retried = tenacity.retry_if_exception_type(TransientError)
        attempts = tenacity.AsyncRetrying(retry=is_retried, wait=wait, stop=stop, sleep=self.sleep)
        answer: Any = await attempts(self._attempt, path, json.dumps(body).encode(), read)
        self._outage = None
        return answer

    def _pause(self, attempt: int, retry_after: float = 0.0) -> float:
        """Half of it is random: clients that failed together do not return together."""
        return max(min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + 0.5 * self.jitter()), retry_after)

    def _is_over(self, trouble: TransientError, first_failure: float, now: float, pause: float) -> bool:
        """False, or raises where the next attempt would be beyond the patience."""
        self._outage = outage = now if self._outage is None else self._outage
        # An error that stays is waited for once, not once by every episode.
        since = min(first_failure, outage) if trouble.is_there else first_failure
        if now + pause <= since + self.patience_s:
            self._note(trouble, outage, now)
            return False
        why = f"tried for {self.patience_s:g} s"
        if trouble.retry_after > self.patience_s:
            why = f"the server asks to wait {trouble.retry_after:.0f} s, which is beyond --patience {self.patience_s:g}"
        is_gone = outage <= first_failure and not trouble.is_there
        raise (ServerGone if is_gone else Unanswered)(f"{self.base}: {trouble} ({why})")

    def _note(self, trouble: TransientError, outage: float, now: float) -> None:
        """One note for each outage, not for each request; and at most one a minute of the same kind."""
        kind = str(trouble).partition(":")[0]
        if outage != self._noted_outage and now - self._noted.get(kind, -NOTE_EVERY_S) >= NOTE_EVERY_S:
            self._noted_outage, self._noted[kind] = outage, now
            self.note(f"{self.base}: {trouble}; retrying for up to {self.patience_s:g} s")

    async def _attempt(self, path: str, content: bytes, read: Callable[[dict[str, Any]], Any]) -> Any:
        self.budget.take()
        response, content = await self._send(path, content)
        if 300 <= response.status_code < 400:
            target = self._hide_key(plain(response.headers.get("Location", "elsewhere"))).removesuffix(path)
            raise ConfigError(f"{self.base} redirects to {target}: pass that as --api-base if it may have the key")
        try:
            answer = self._hide_key(json.loads(content, parse_int=_parse_int))
        except (ValueError, RecursionError):
            answer = self._hide_key(plain(content.decode(errors="replace")))
        if response.status_code >= 400:
            raise _status_error(response, answer)
        if not isinstance(answer, dict):
            raise TransientError("the answer is not a JSON object")
        if answer.get("error"):
            raise TransientError(f"an error instead of an answer: {_error_text(answer)}")
        return read(answer)

    async def _send(self, path: str, content: bytes) -> tuple["httpx.Response", bytes]:
        import httpx

        answer, url = bytearray(), self.base + path
        try:
            async with asyncio.timeout(self.timeout_s), self._http.stream("POST", url, content=content) as response:
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise TransientError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        except TimeoutError:
            raise TransientError("no connection: timed out", is_there=False) from None
        except httpx.TransportError as error:
            cause = _root_cause(error)
            text = self._hide_key(plain(str(cause) or type(cause).__name__))
            if isinstance(cause, ssl.SSLCertVerificationError) or "WRONG_VERSION_NUMBER" in text:
                raise ConfigError(f"--api-base {self.base}: {text}") from None
            if isinstance(error, httpx.ConnectError) and not isinstance(cause, ssl.SSLError):
                self.budget.num_requests -= 1
            raise TransientError(f"no connection: {text}", is_there=False) from None
        return response, bytes(answer)

    def _hide_key(self, value: Any) -> Any:
        """Any JSON value without the key, which a server may echo, and without lone surrogates."""
        if isinstance(value, str):
            text = value.encode(errors="replace").decode()
            return text.replace(self.key, "[API key]") if len(self.key) >= SHORTEST_SECRET else text
        if isinstance(value, list):
            return [self._hide_key(item) for item in value]
        if isinstance(value, dict):
            return {self._hide_key(name): self._hide_key(item) for name, item in value.items()}
        return value


def _status_error(response: "httpx.Response", answer: Any) -> Exception:
    status, text = response.status_code, _error_text(answer)
    message = f"HTTP {status}{f': {text}' if text else ''}"
    if status in RETRIED and "insufficient_quota" not in text:
        pause = retry_after(response.headers.get("Retry-After"), time.time())
        return TransientError(message, status not in AWAY, pause or 0.0)
    return Refused(status, message)


def _error_text(answer: Any) -> str:
    """The message and code of an OpenAI error object, or the beginning of whatever came."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict) and (error.get("message") or error.get("code")):
        return " ".join(str(error[key]) for key in ("message", "code") if error.get(key))[:500]
    return (error if isinstance(error, str) else json.dumps(error))[:300]


def retry_after(header: str | None, now: float) -> float | None:
    """The seconds that a server asks to wait: a number, or a date."""
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header or "").timestamp() - now)
    except (ValueError, TypeError):
        return None


def _parse_int(digits: str) -> float:
    return int(digits) if len(digits) < 20 else float(digits)  # Python refuses integers of thousands of digits


def _root_cause(error: Any) -> BaseException:
    while error.__cause__ or error.__context__ or isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return error


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to its end in the thread of all requests, also where an event loop runs already (a notebook)."""
    future = asyncio.run_coroutine_threadsafe(work, _event_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # after Ctrl-C


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop
