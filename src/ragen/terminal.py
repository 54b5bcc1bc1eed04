"""Text for a terminal: frames that replace each other, long texts page by page, tables that fit the window.

    screen = Screen()
    with screen.taken_over():                          # restores the previous contents at the end
        screen.show([board, "reward +1.0"], footer=in_lines(["u undo", "q quit"], screen.width))
        screen.page(prompt, typed)
    for line in table([{"tag": "Bandit", "success": "50 %"}], {"tag": "tag", "success": "random"}, screen.width):
        screen.print(line, soft_wrap=True)

Outside `taken_over`, and without a terminal, everything is printed one after the other.
"""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from ragen.format import harmless

ESCAPE = "\x1b"
SEPARATOR = " · "
FIRST_COLUMN = 8  # characters of a table's first column that always stay


class Screen(Console):
    """A console that prints text as it is: no markup, and no control codes but its own.

    A broken pipe is left to the caller.
    """

    def __init__(self, stderr: bool = False):
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        self._is_taken = False
        self._last_frame: Sequence[RenderableType] = ()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = harmless(renderable)
        elif isinstance(renderable, Text) and renderable.plain != (plain := harmless(renderable.plain)):
            renderable = renderable.copy()
            renderable.plain = plain
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    @property
    def line_width(self) -> int | None:
        """None in a pipe: lines are as long as they need to be, unless COLUMNS is set."""
        return self.width if self.is_terminal or os.environ.get("COLUMNS") else None

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """Use the terminal's second screen, to keep frames out of its history; the last frame is printed at the end."""
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
        """Draw a frame. The footer is not part of what stays at the end."""
        self._last_frame = frame
        with self:  # one write, to avoid flicker
            if self._is_taken:
                self.clear()
            else:
                self.print()
            self.print(*frame, sep="\n")
            if footer:
                # A line end after the last row would scroll the first one out.
                self.print(footer, style="dim", soft_wrap=True, end="" if self._is_taken else "\n")

    def fits(self, frame: Sequence[RenderableType], footer: str = "") -> bool:
        return len(self.render_lines(Group(*frame, footer), pad=False)) <= self.height

    def page(self, text: Text, typed: Iterator[str]) -> None:
        """Show a text of any length, one screen at a time."""
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
    """Items in as few lines as possible; breaks only between items."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(item) <= width:
            lines[-1] += SEPARATOR + item
        else:
            lines.append(item)
    return "\n".join(lines)


def table(
    rows: Sequence[Mapping[str, str]],
    headings: Mapping[str, str],
    width: int | None,
    right: Collection[str] = (),
    dropped: Sequence[str] = (),
    keep: float = math.inf,
    style: Callable[[str, str], str] = lambda column, text: "",
) -> list[Text]:
    """A heading and one line for each row; `headings` maps columns to their titles, `right` are right-aligned.

    To fit the width, columns are dropped in the order of `dropped` until the first column would keep at least `keep`
    characters (by default all of them); then the first column is cut.
    """
    columns = list(headings)
    widths = {key: max(len(row[key]) for row in (headings, *rows)) for key in columns}
    first = columns[0]

    def excess() -> float:
        return sum(widths[key] + 2 for key in columns) - 2 - (math.inf if width is None else width)

    for key in dropped:
        if key in columns and excess() > max(0, widths[first] - keep):
            columns.remove(key)
    if excess() > 0:
        widths[first] = max(min(widths[first], FIRST_COLUMN), widths[first] - int(excess()))
    lines = []
    for row in (headings, *rows):
        line = Text(style="dim" if row is headings else "")
        for key in columns:
            text = shortened(row[key], widths[key])
            cell = text.rjust(widths[key]) if key in right else text.ljust(widths[key])
            line.append("  " if line else "").append(cell, "" if row is headings else style(key, row[key]))
        line.rstrip()
        lines.append(line)
    return lines


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
