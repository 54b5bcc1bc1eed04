"""A place to draw: in a terminal a frame replaces the one before and a long text comes page by page.

    screen = Screen()
    with screen.taken_over():                          # what was there before comes back at the end
        screen.show([board, "reward +1.0"], footer=in_lines(["u undo", "q quit"], screen.width))
        screen.page(prompt, typed)

Outside `taken_over`, and where there is no terminal, everything is printed one after the other.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ragen.play.keyboard import ESCAPE

SEPARATOR = " · "


class Screen(Console):
    """Plain text stays plain: what a player types is not markup. A reader that went away is the caller's business."""

    def __init__(self, stderr: bool = False):
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        self._is_taken = False
        self._last_frame: Sequence[RenderableType] = ()

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """The terminal's second screen, so that frames do not fill its history; the last of them stays on the first."""
        if not self.is_terminal or self.is_dumb_terminal:
            yield
            return
        self._is_taken = True
        self.set_alt_screen(True)
        try:
            yield
        finally:
            self._is_taken = False
            self.set_alt_screen(False)
        self.print(*self._last_frame, sep="\n")

    def show(self, frame: Sequence[RenderableType], footer: str = "") -> None:
        """One frame; the footer belongs to the moment, and is not what stays at the end."""
        self._last_frame = frame
        with self:  # one write: nothing flickers
            if self._is_taken:
                self.clear()
            else:
                self.print()
            self.print(*frame, sep="\n")
            if footer:
                # No line end behind the last row: it would push the first one out.
                self.print(footer, style="dim", soft_wrap=True, end="" if self._is_taken else "\n")

    def fits(self, frame: Sequence[RenderableType], footer: str = "") -> bool:
        return len(self.render_lines(Group(*frame, footer), pad=False)) <= self.height

    def page(self, text: Text, typed: Iterator[str]) -> None:
        """A text of any length, broken between words, a screen at a time."""
        rows = text.wrap(self, self.width)
        size = max(1, self.height - 1)
        pages = [rows[start : start + size] for start in range(0, len(rows), size)]
        for number, page in enumerate(pages, start=1):
            is_last = number == len(pages)
            keys = ["any key: back"] if is_last else [f"page {number} of {len(pages)}", "any key: more", "q back"]
            with self:
                self.clear()
                self.print(*page, sep="\n")
                self.print(in_lines(keys, self.width), style="dim", soft_wrap=True, end="")
            if next(typed, "q") in ("q", ESCAPE):
                return


def in_lines(items: Iterable[str], width: int) -> str:
    """Items in as few lines as they need, never broken within one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(item) <= width:
            lines[-1] += SEPARATOR + item
        else:
            lines.append(item)
    return "\n".join(lines)
