"""Requests to an OpenAI-compatible server that survive what passes, within a budget.

client = Client("http://127.0.0.1:8000/v1", key, budget=Budget(max_requests=1000))
client.post("chat/completions", {…})
"""

import email.utils
import json
import random
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

from ragen.errors import ConfigError, RunFailed

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
AWAY = {429, 502, 503, 504, 529}  # what is said for a server that is not there, or has no time for anybody
WRONG_KEY = {401, 403}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
NOT_SENT = (ConnectionRefusedError, socket.gaierror)
TELL_EVERY = 60.0  # seconds between two lines about the same trouble
CHUNK = 1 << 16


def plain(text: str) -> str:
    """What a server says as one line, without what a terminal or a table would take for its own."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class Refused(RunFailed):
    """The server will not do this, however often it is asked."""

    def __init__(self, status: int, text: str):
        super().__init__(plain(text))
        self.status = status


class Passing(Exception):
    """An error that may be gone the next time. `is_there`: it came from the server itself."""

    def __init__(self, text: str, is_there: bool = True, retry_after: float | None = None):
        super().__init__(plain(text))
        self.is_there, self.retry_after = is_there, retry_after


class Unanswered(RunFailed):
    """No answer to this request within the patience, from a server that is there."""


class ServerGone(RunFailed):
    """The server could not be reached within the patience, by any request."""


class BudgetSpent(RunFailed):
    """The requests or tokens that were allowed are used up."""


class Stopped(RunFailed):
    """The evaluation is being stopped."""


@dataclass
class Budget:
    """What may be used, and what was; None is no limit. One for all models of a call.

    A request is taken before it is sent, and so is each of its repetitions; only one that found no server to go to is
    given back. Tokens are known when an answer is there: those under way by then may go beyond the limit.
    """

    max_requests: int | None = None
    max_tokens: int | None = None  # of prompts and replies
    num_requests: int = 0
    num_tokens: int = 0
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def take(self) -> None:
        """One request more. Raises `BudgetSpent`."""
        with self.lock:
            self._check()
            self.num_requests += 1

    def give_back(self) -> None:
        with self.lock:
            self.num_requests -= 1

    def spend(self, tokens: int) -> None:
        with self.lock:
            self.num_tokens += tokens

    def _check(self) -> None:
        for used, limit, what in (
            (self.num_requests, self.max_requests, "requests"),
            (self.num_tokens, self.max_tokens, "tokens"),
        ):
            if limit is not None and used >= limit:
                raise BudgetSpent(f"{limit} {what} are used up")


class Client:
    """Posts JSON, and does so again after errors that pass: with growing, jittered pauses, or as long as told to."""

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
        self.base, self.key = base.rstrip("/"), key
        self.patience_s, self.timeout_s = patience_s, timeout_s
        self.budget = Budget() if budget is None else budget
        self.note, self.jitter = note, jitter
        self.stopping = threading.Event()
        self.num_retries = 0
        self._lock = threading.Lock()
        self._outage: float | None = None  # since when nothing was answered
        self._told_of: float | None = None  # the outage that was told last
        self._told: dict[str, float] = {}  # kind of trouble -> when it was told
        self._opener = _opener(self.base)

    def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], Any] = lambda answer: answer
    ) -> Any:
        """The answer, as `read` makes it of the JSON; where that raises `Passing`, it is asked for again.

        Raises `Refused`, `Unanswered`, `ServerGone`, `BudgetSpent`, `Stopped` or `ConfigError`.
        """
        first_failure, attempt = None, 0
        while True:
            if self.stopping.is_set():
                raise Stopped("stopped")
            self.budget.take()
            try:
                answer = read(self._once(path, body))
            except Passing as trouble:
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                with self._lock:
                    self._outage = outage = now if self._outage is None else self._outage
                pause = max(self._pause(attempt), trouble.retry_after or 0.0)
                # An error that stays is waited for once, and not once by every episode.
                since = min(first_failure, outage) if trouble.is_there else first_failure
                if now + pause > since + self.patience_s:
                    is_gone = outage <= first_failure and not trouble.is_there
                    raise (ServerGone if is_gone else Unanswered)(self._given_up(trouble)) from None
                self._tell(trouble, outage, now)
                attempt += 1
                self.num_retries += 1
                if self.stopping.wait(pause):
                    raise Stopped("stopped") from None
                continue
            with self._lock:
                self._outage = None
            return answer

    def _given_up(self, trouble: Passing) -> str:
        asked = trouble.retry_after or 0.0
        why = f"tried for {self.patience_s:g} s"
        if asked > self.patience_s:
            why = f"the server asks to wait {asked:.0f} s, which is beyond --patience {self.patience_s:g}"
        return f"{self.base}: {trouble} ({why})"

    def _pause(self, attempt: int) -> float:
        """Half of it is certain, half of it is chance: clients that failed together do not come back together."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + 0.5 * self.jitter())

    def _tell(self, trouble: Passing, outage: float, now: float) -> None:
        """One line an outage, not one a request; and of the same kind no more than one a minute."""
        kind = str(trouble).partition(":")[0]
        with self._lock:
            if outage == self._told_of or now - self._told.get(kind, -TELL_EVERY) < TELL_EVERY:
                return
            self._told_of, self._told[kind] = outage, now
        self.note(f"{self.base}: {trouble}; waiting, for up to {self.patience_s:g} s")

    def _once(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "User-Agent": "ragen"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                content = _content(response, deadline)
        except (HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, NOT_SENT):
                self.budget.give_back()
            if isinstance(reason, ssl.SSLCertVerificationError) or "WRONG_VERSION_NUMBER" in str(reason):
                raise ConfigError(f"--api-base {self.base}: {plain(str(reason))}") from None
            raise Passing(f"no connection: {reason or type(error).__name__}", is_there=False) from None
        if 300 <= response.status < 400:
            there = plain(response.headers.get("Location", "elsewhere")).removesuffix(path)
            raise ConfigError(f"{self.base} points to {there}: name that with --api-base, if it may have the key")
        if response.status >= 400:
            raise _of_status(response, content)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise Passing("an answer that is no JSON") from None
        if not isinstance(answer, dict):
            raise Passing("an answer that is no JSON object")
        if answer.get("error"):
            raise Passing(f"an error in place of an answer: {_error_text(content)}")
        return answer


def _content(response: HTTPResponse, deadline: float) -> bytes:
    """All of it: a timeout of sockets is one of silence, however long the rest takes."""
    parts = []
    while part := response.read1(CHUNK):
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        parts.append(part)
    return b"".join(parts)


def _of_status(response: HTTPResponse, content: bytes) -> Exception:
    status, text = response.status, _error_text(content)
    said = f"HTTP {status}{f': {text}' if text else ''}"
    if status in RETRIED and "insufficient_quota" not in text:
        return Passing(said, status not in AWAY, retry_after(response.headers.get("Retry-After"), time.time()))
    return Refused(status, said)


def retry_after(header: str | None, now: float) -> float | None:
    """The seconds that a server asks to wait: a number, or a date."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, TypeError):
        return None


def _error_text(content: bytes) -> str:
    """The message of an OpenAI error object, its code included, or the beginning of whatever came."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return plain(content.decode(errors="replace"))[:300]
    if not isinstance(error, dict):
        return str(error)[:300]
    return " ".join(str(error[key]) for key in ("message", "code") if error.get(key))[:500]


class _AsItCame(urllib.request.HTTPErrorProcessor):
    """Every status is an answer. No redirect is followed: the key is for this server, and a POST would become a GET."""

    def http_response(self, request: urllib.request.Request, response: HTTPResponse) -> HTTPResponse:
        return response

    https_response = http_response


def _opener(base: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment does not lead to this machine itself."""
    is_here = urllib.parse.urlsplit(base).hostname in ("localhost", "127.0.0.1", "::1")
    return urllib.request.build_opener(_AsItCame, urllib.request.ProxyHandler({} if is_here else None))
