"""A validation in the live view: success with its interval, on a line between random and optimal play.

shown = ShownValidation(10, "CoordSokoban", metrics)
shown.text(60), shown.gauge(60), shown.legend(60)       # lines of the panel
shown.line(named=True)                                  # the line above it, which stays
"""

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ragen.format import percent

Summary = Mapping[str, Any]

VALIDATION = "val-env/"


class ShownValidation:
    """The last validation of one environment."""

    def __init__(self, step: int, tag: str, summary: Summary):
        def read(name: str) -> float | None:
            return number(summary, f"{VALIDATION}{tag}/{name}")

        self.step, self.tag = step, tag
        self.success = read("success")
        self.low, self.high = read("success_low"), read("success_high")
        self.greedy = read("greedy_success")
        self.random, self.optimal = read("random"), read("optimal")
        self.start: float | None = None  # the success of the first validation

    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def text(self, room: int) -> Text:
        text = Text(percent(self.success), "bold green").append(self.interval())
        step = f" step {self.step}"
        return text.append(step if len(text) + len(step) <= room else f" @{self.step}", "dim")

    def legend(self, room: int) -> Text:
        full, brief = Text(style="dim"), Text(style="dim")
        for symbol, name, value in (("r", "random", self.random), ("o", "optimal", self.optimal)):
            if value is not None:
                full.append(symbol, "bold yellow").append(f" {name} {percent(value)}  ")
                brief.append(symbol, "bold yellow").append(f" {percent(value)}  ")
        full.rstrip()
        brief.rstrip()
        return full if len(full) <= room else brief

    def gauge(self, width: int) -> Text:
        """Success on a line from 0 to 100 %: ● now, ━ its interval, ○ at the start, r random and o optimal play."""
        cells: list[tuple[str, str]] = [("─", "bright_black")] * width

        def place(value: float | None) -> int | None:
            return None if value is None or not math.isfinite(value) else round(min(1.0, max(0.0, value)) * (width - 1))

        low, high = place(self.low), place(self.high)
        if low is not None and high is not None:
            cells[low : high + 1] = [("━", "green")] * (high + 1 - low)
        marks = (
            (self.random, "r", "bold yellow"),
            (self.optimal, "o", "bold yellow"),
            (self.start, "○", "green"),
            (self.success, "●", "bold green"),
        )
        for value, symbol, style in marks:
            position = place(value)
            if position is not None:
                cells[position] = (symbol, style)
        return Text.assemble(*cells)

    def line(self, named: bool) -> Text:
        """What stays in the scroll-back."""
        text = Text(f"step {self.step:>4}  ", "dim").append(f"{self.tag if named else 'validation'} ", "not dim")
        text.append(percent(self.success), "not dim bold").append(self.interval())
        if self.greedy is not None:
            text.append(f"  greedy {percent(self.greedy)}", "dim")
        return text


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    value = metrics.get(key)
    return None if value is None else float(value)
