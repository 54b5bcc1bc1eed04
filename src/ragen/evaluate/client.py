"""Requests to an OpenAI-compatible server that survive what passes, within a budget.

client = Client("http://127.0.0.1:8000/v1", key, budget=Budget(max_requests=1000))
client.post("chat/completions", {…})
"""

import email.utils
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from ragen.typed import RunFailed

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
WRONG_KEY = {401, 403}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
NOT_SENT = (ConnectionRefusedError, socket.gaierror)


class Refused(RunFailed):
    """The server will not do this, however often it is asked."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Unanswered(RunFailed):
    """No answer to this request within the patience, while others got theirs."""


class ServerGone(RunFailed):
    """No answer to any request within the patience."""


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
        self._told, self._last_answer = False, 0.0
        self._opener = _opener(self.base)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises `Refused`, `Unanswered`, `ServerGone`, `BudgetSpent` or `Stopped`."""
        first_failure, attempt = None, 0
        while True:
            if self.stopping.is_set():
                raise Stopped("stopped")
            self.budget.take()
            try:
                answer = self._once(path, body)
            except _Passing as trouble:
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                pause = max(self._pause(attempt), trouble.retry_after or 0.0)
                if now + pause > first_failure + self.patience_s:
                    kind = Unanswered if self._last_answer > first_failure else ServerGone
                    raise kind(f"{self.base}: {trouble} (tried for {self.patience_s:g} s)") from None
                self._tell(trouble)
                attempt += 1
                self.num_retries += 1
                if self.stopping.wait(pause):
                    raise Stopped("stopped") from None
                continue
            self._told, self._last_answer = False, time.monotonic()
            return answer

    def _pause(self, attempt: int) -> float:
        """Half of it is certain, half of it is chance: clients that failed together do not come back together."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + 0.5 * self.jitter())

    def _tell(self, trouble: "_Passing") -> None:
        """One line an outage, not one a request."""
        if not self._told:
            self._told = True
            self.note(f"{self.base}: {trouble}; waiting, for up to {self.patience_s:g} s")

    def _once(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "User-Agent": "ragen"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            raise _of_status(error) from None
        except (urllib.error.URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, NOT_SENT):
                self.budget.give_back()
            raise _Passing(f"no connection: {reason or type(error).__name__}") from None
        try:
            answer = json.loads(content)
        except ValueError:
            raise _Passing("an answer that is no JSON") from None
        if not isinstance(answer, dict):
            raise _Passing("an answer that is no JSON object")
        return answer


class _Passing(Exception):
    """An error that may be gone the next time."""

    def __init__(self, text: str, retry_after: float | None = None):
        super().__init__(text)
        self.retry_after = retry_after


def _of_status(error: urllib.error.HTTPError) -> Exception:
    with error:
        text = _error_text(error.read().decode(errors="replace"))
    said = f"HTTP {error.code}{f': {text}' if text else ''}"
    if error.code in RETRIED and "insufficient_quota" not in text:
        return _Passing(said, retry_after(error.headers.get("Retry-After"), time.time()))
    return Refused(error.code, said)


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


def _error_text(content: str) -> str:
    """The message of an OpenAI error object, its code included, or the beginning of whatever came."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(content.split())[:300]
    if not isinstance(error, dict):
        return str(error)[:300]
    return " ".join(str(error[key]) for key in ("message", "code") if error.get(key))[:500]


def _opener(base: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment does not lead to this machine itself."""
    host = urllib.parse.urlsplit(base).hostname
    if host in ("localhost", "127.0.0.1", "::1"):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()
