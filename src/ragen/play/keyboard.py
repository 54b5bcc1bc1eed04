"""What a player types: single keys in a terminal, lines without one. Both are iterators that end with the input.

with answers(interactive=True) as typed:
    next(typed, "q")      # "a", or "\\x1b[A" for the arrow up
key_name("\\x1b[1;5A")     # "Ctrl+arrow up"
"""

import contextlib
import os
import re
import select
import sys
from collections.abc import Callable, Iterator

from ragen.terminal import ESCAPE

END_OF_INPUT = ("", "\x04")
SECONDS_WITHIN_A_SEQUENCE = 0.05
LONGEST_SHOWN = 40

_CHARACTERS = {ESCAPE: "Esc", "\n": "Enter", "\r": "Enter", "\t": "Tab", " ": "Space", "\x7f": "Backspace"}
_FINALS = {"A": "arrow up", "B": "arrow down", "C": "arrow right", "D": "arrow left", "H": "Home", "F": "End"}
_FINALS |= {"P": "F1", "Q": "F2", "R": "F3", "S": "F4"}
_NUMBERS = {1: "Home", 2: "Insert", 3: "Delete", 4: "End", 5: "Page Up", 6: "Page Down", 7: "Home", 8: "End"}
_FUNCTION_KEYS = (11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 23, 24)  # what F1 to F12 send before the `~`
_NUMBERS |= {number: f"F{index}" for index, number in enumerate(_FUNCTION_KEYS, start=1)}
_MODIFIERS = {4: "Ctrl+", 2: "Alt+", 1: "Shift+"}


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


def key_name(key: str) -> str:
    """What is written on a key, or the typed text in quotes."""
    if key in _CHARACTERS:
        return _CHARACTERS[key]
    if key.isprintable():
        return repr(key if len(key) <= LONGEST_SHOWN else f"{key[:LONGEST_SHOWN]}…")
    if len(key) == 1 and key < " ":
        return f"Ctrl+{chr(ord(key) + 64)}"
    if len(key) == 2 and key[0] == ESCAPE and key[1].isprintable():
        return f"Alt+{key[1]}"
    sequence = re.fullmatch(r"\x1b\[(\d{0,3})(?:;(\d{1,2}))?([@-~])", key)
    if sequence is None:
        return "this key"
    number, modifiers, final = int(sequence[1] or 1), int(sequence[2] or 1) - 1, sequence[3]
    name = _NUMBERS.get(number) if final == "~" else _FINALS.get(final)
    return "".join(word for bit, word in _MODIFIERS.items() if modifiers & bit) + name if name else "this key"


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
