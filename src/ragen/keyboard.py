"""What a player types: single keys in a terminal, lines without one. Both are iterators that end with the input.

with answers(interactive=True) as typed:
    next(typed, "q")      # "a", or "\\x1b[A" for the arrow up
"""

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator

ESCAPE = "\x1b"
END_OF_INPUT = ("", "\x04")
SECONDS_WITHIN_A_SEQUENCE = 0.05


@contextlib.contextmanager
def answers(interactive: bool) -> Iterator[Iterator[str]]:
    if interactive:
        with _raw_terminal() as descriptor:
            yield keys(lambda: os.read(descriptor, 1).decode(errors="replace"), lambda: _is_waiting(descriptor))
    else:
        # A closed standard input is one that has ended.
        yield (line.strip() for line in sys.stdin or () if line.strip())


def keys(read: Callable[[], str], is_waiting: Callable[[], bool]) -> Iterator[str]:
    """Keys from single characters; whatever one key sends (`\\x1b[1;5A` for Ctrl and up) is one answer."""
    while (key := read()) not in END_OF_INPUT:
        yield key + _rest_of_sequence(read, is_waiting) if key == ESCAPE and is_waiting() else key


def _rest_of_sequence(read: Callable[[], str], is_waiting: Callable[[], bool]) -> str:
    """`[` or `O`, parameters, and a final character from @ to ~; both kinds of arrow keys in one spelling."""
    kind = read()
    if kind not in ("[", "O"):
        return kind
    rest = ""
    while not ("@" <= rest[-1:] <= "~") and is_waiting():
        rest += read()
    return f"[{rest}"


def _is_waiting(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], SECONDS_WITHIN_A_SEQUENCE)[0])


@contextlib.contextmanager
def _raw_terminal() -> Iterator[int]:
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
