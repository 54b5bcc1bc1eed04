"""The boundary to an environment's code: whatever goes wrong there becomes one error that names the level.

    state = call(lambda: env.reset(7, "val"), level("NumberLine", 7, "val"), limit=60)

    EnvironmentFailed: NumberLine, val level 7, turn 2: the environment raised ValueError: boom (line.py:33, in step)

| reason       | the environment's code                                                                    |
|--------------|-------------------------------------------------------------------------------------------|
| `raised`     | raised an exception                                                                       |
| `exited`     | called `sys.exit` or ended in a similar way                                               |
| `timeout`    | took longer than `es_manager.env_timeout`                                                 |
| `bad_reward` | returned a reward that is not a finite number                                             |
| `bad_result` | returned a value of the wrong type, such as a tuple for a `Transition`                    |

Ctrl-C and our own signals pass. The time limit is an alarm signal, which only the main thread of a Unix process can
receive: in another thread, and on Windows, there is no limit. It interrupts Python code, sleeping and waiting. It
cannot interrupt a library call that never returns to Python.
"""

import math
import signal
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from ragen.env.base import Transition
from ragen.errors import RunFailed

T = TypeVar("T")

REASONS = ("raised", "exited", "timeout", "bad_reward", "bad_result")
MAX_REWARD = 3.4e38  # the learner's numbers are float32
LIMIT_OF_A_LEVEL = 60.0  # seconds, where no config is at hand
AGAIN = 1.0  # seconds after which the alarm rings again: code may have caught the first one
MAX_FRAMES, MAX_TRACE, MAX_DETAIL = 8, 4_000, 300


class EnvironmentFailed(RunFailed):
    """An environment failed on a level."""

    status = 4

    def __init__(self, reason: str, where: str, detail: str, trace: str = ""):
        super().__init__(reason, where, detail, trace)  # all of them, so that it can be pickled
        self.reason, self.where, self.detail, self.trace = reason, where, detail, trace

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


class TooManyFailures(RunFailed):
    """The environment failed so often that it has to be fixed first."""

    status = 4


class WrongValue(ValueError):
    """What an environment returned breaks its contract."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return self.detail


class _TimeUp(BaseException):
    """Not an `Exception`: environments catch those."""


def level(tag: str, seed: int, split: str) -> str:
    """A level in a message."""
    return f"{tag}, {split} level {seed}"


def call(
    code: Callable[[], T], where: str, limit: float | None = None, passes: tuple[type[BaseException], ...] = ()
) -> T:
    """Run an environment's code. Its failures, except those that pass, become `EnvironmentFailed`.

    `limit` is in seconds; None or 0 means none.
    """
    try:
        return _limited(code, limit) if limit else code()
    except passes:
        raise
    except EnvironmentFailed:  # of a call within this one
        raise
    except WrongValue as error:
        raise EnvironmentFailed(error.reason, where, error.detail) from error
    except _TimeUp as error:
        detail = f"the environment took longer than {limit:g} s (es_manager.env_timeout)"
        raise _failed("timeout", where, f"{detail}{_place(error)}", error) from error
    except Exception as error:
        raise _failed("raised", where, f"the environment raised {_said(error)}{_place(error)}", error) from error
    except BaseException as error:
        # A signal handler of ours raises in whatever code runs at that moment.
        if isinstance(error, KeyboardInterrupt) or type(error).__module__.partition(".")[0] == "ragen":
            raise
        detail = f"the environment tried to end the program with {_said(error)}{_place(error)}"
        raise _failed("exited", where, detail, error) from error


def checked_reward(transition: Any) -> float:
    """The reward of a step whose result has the right type."""
    if not isinstance(transition, Transition):
        raise WrongValue("bad_result", f"step returned {_kind(transition)}, not a Transition")
    reward = transition.reward
    if type(reward) is not float:
        reward = _as_float(reward)
    if not abs(reward) <= MAX_REWARD:  # also for nan
        raise WrongValue("bad_reward", f"step returned the reward {reward}, which is not a finite number")
    return reward


def checked_text(text: Any) -> str:
    """An observation."""
    if not isinstance(text, str):
        raise WrongValue("bad_result", f"render returned {_kind(text)}, not a str")
    return text


def _as_float(reward: Any) -> float:
    """Whole numbers, and the numbers of numpy and torch."""
    wrong = WrongValue("bad_reward", f"step returned {_kind(reward)} as the reward, not a number")
    if isinstance(reward, (str, bytes, bytearray)):
        raise wrong
    try:
        return float(reward)
    except OverflowError:
        return math.inf
    except Exception as error:  # whatever its own __float__ raises
        raise wrong from error


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- what is said about a failure -----------------------------------------------------------------------------------


def _failed(reason: str, where: str, detail: str, error: BaseException) -> EnvironmentFailed:
    trace = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))[-MAX_TRACE:]
    return EnvironmentFailed(reason, where, detail, trace)


def _said(error: BaseException) -> str:
    """`ValueError: boom`, on one line, of limited length, and without control characters."""
    try:
        text = str(error)
    except Exception:  # its own __str__ failed
        text = "(no text)"
    words = " ".join(text.split())
    if len(words) > MAX_DETAIL:
        words = f"{words[:MAX_DETAIL]}…"
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in said)


def _place(error: BaseException) -> str:
    """Where it was raised: the last line that is not of this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return ""
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}, in {frames[-1].name})"


# --- the time limit -------------------------------------------------------------------------------------------------


def _limited(code: Callable[[], T], limit: float) -> T:
    """Run code with an alarm. The handler and the timer from before are there again afterwards."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return code()
    has_rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        has_rung = True
        raise _TimeUp

    started, handler, timer = time.monotonic(), signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)

    def restore() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if timer[0]:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, timer[0] - (time.monotonic() - started)), timer[1])

    try:
        try:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, limit, AGAIN)
            result = code()
        finally:
            restore()
    except _TimeUp:
        restore()  # it may have rung in the middle of the first time
        raise
    if has_rung:  # and the code caught it
        raise _TimeUp
    return result
