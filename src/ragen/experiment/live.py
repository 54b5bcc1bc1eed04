"""An experiment while it runs: a table that stays in place in a terminal, and a line for each event elsewhere.

    with View(plan) as view:
        view.started(cell, slot="0,1", log_offset=0)
        view.refresh()                                  # reads what the runs have measured since
        view.ended(cell, "success")
        view.note("interrupted")

The numbers come from the runs' metrics files, which are read as they grow.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ragen.config.tree import leaves
from ragen.diagnose.history import finite
from ragen.experiment.plan import Plan
from ragen.format import duration, percent
from ragen.report.verdict import PREFIX
from ragen.store import json_lines
from ragen.store.reading import Unreadable
from ragen.store.run_folder import RunFolder, is_metrics_row
from ragen.store.same_run import BUDGET
from ragen.store.sweep_results import Cell, run_folder
from ragen.terminal import Screen

STYLES = {
    "running": "cyan",
    "waiting": "dim",
    "preempted": "yellow",
    "lost": "yellow",
    "success": "green",
    "fail": "bold red",
    "early_stopped": "red",
}
ORDER = {"running": 0, "fail": 1, "early_stopped": 1, "success": 2}  # which rows are shown where not all fit
UNFINISHED = ("waiting", "running", "interrupted", "preempted", "lost")
COLUMNS = ("cell", "slot", "step", "success", "left", "status")
NUMBERS = ("step", "success", "left")  # columns
RECENT = 20  # steps whose mean time predicts the rest


@dataclass
class LiveRow:
    """The state of a cell, and what its run has measured so far."""

    cell: Cell
    status: str = "waiting"
    slot: str = ""
    log_offset: int = 0
    began: float = 0.0
    seconds: float = 0.0  # that it took
    folder: RunFolder | None = None
    total_steps: int | None = None
    step: int | None = None
    success: float | None = None  # of the last validation, the mean over its environments
    step_seconds: list[float] = field(default_factory=list)
    _read: int = 0  # bytes of the metrics file

    @property
    def kind(self) -> str:
        return re.split("[:,]", self.status)[0]

    @property
    def seconds_left(self) -> float | None:
        if not self.step_seconds or self.total_steps is None or self.step is None:
            return None
        return max(0, self.total_steps - self.step) * fmean(self.step_seconds[-RECENT:])

    def update(self) -> None:
        """Read the metrics that were added since the last call."""
        if self.folder is None:
            path = run_folder(self.cell.log_path, self.log_offset)
            if path is None:
                return
            self.folder = RunFolder(path)
        if self.total_steps is None:
            self.total_steps = _total_steps(self.folder)
        for row in self._new_metrics(self.folder):
            numbers = {key: number for key in row if (number := finite(row, key)) is not None}
            found = [n for key, n in numbers.items() if key.startswith(PREFIX) and key.endswith("/success")]
            self.step = row["step"]
            self.success = fmean(found) if found else self.success
            self.step_seconds += [numbers["timing_s/step"]] if "timing_s/step" in numbers else []

    def _new_metrics(self, folder: RunFolder) -> Iterator[dict[str, Any]]:
        try:
            with open(folder.metrics_path, "rb") as file:
                file.seek(self._read)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            row = json_lines.parsed(line)
            if row is not None and is_metrics_row(row):
                yield row


def _total_steps(folder: RunFolder) -> int | None:
    try:
        total = leaves(folder.read_config()).get(BUDGET)
    except Unreadable:
        return None  # being written
    return total if isinstance(total, int) else None


class View:
    """The state of every cell, shown on a screen."""

    def __init__(self, plan: Plan, screen: Screen | None = None, clock: Callable[[], float] = time.monotonic):
        self.plan, self._screen, self._clock = plan, screen or Screen(), clock
        self.rows = {cell.name: LiveRow(cell) for cell in plan.cells}
        self._began = clock()
        self._live: Live | None = None
        if self._screen.is_terminal and not self._screen.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self._screen,
                auto_refresh=False,
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> "View":
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def started(self, cell: Cell, slot: str, log_offset: int) -> None:
        self.rows[cell.name] = LiveRow(cell, "running", slot, log_offset, self._clock())
        if not self._live:
            self.note(f"{self._count()} start {cell.name} on {slot}: {cell.log_path}")

    def ended(self, cell: Cell, status: str, error: str = "") -> None:
        row = self.rows[cell.name]
        row.status, row.seconds = status, self._clock() - row.began
        row.update()
        if self._live:
            if error:
                self.note(f"{cell.name}: {status}: {error}")
            return
        success = "" if row.success is None else f", validation success {percent(row.success)}"
        self.note(f"{self._count()} {status} {cell.name} ({duration(row.seconds)}{success})")
        if error:
            self.note(f"  error: {error}")

    def waiting(self, cell: Cell, why: str) -> None:
        """A run that was preempted or lost waits for its turn again."""
        self.rows[cell.name] = LiveRow(cell, f"{why}, waiting")

    def note(self, text: str) -> None:
        self._screen.print(Text(text), soft_wrap=True)

    def refresh(self) -> None:
        if self._live:
            for row in self.rows.values():
                if row.status == "running":
                    row.update()
            self._live.refresh()

    def _count(self) -> str:
        done = sum(row.kind not in UNFINISHED for row in self.rows.values())
        return f"[{done}/{len(self.rows)}]"

    def render(self) -> Group:
        """The table: as many rows as fit, running ones first, then those that have ended."""
        rows = list(self.rows.values())
        ranked = sorted(range(len(rows)), key=lambda index: ORDER.get(rows[index].kind, 3))
        shown = sorted(ranked[: max(3, self._screen.height - 5)])
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in COLUMNS:
            table.add_column(heading, no_wrap=True, justify="right" if heading in NUMBERS else "left")
        for index in shown:
            table.add_row(*_texts(rows[index]))
        hidden = [Text(f"and {len(rows) - len(shown)} more", "dim")] if len(shown) < len(rows) else []
        return Group(self._heading(rows), table, *hidden)

    def _heading(self, rows: list[LiveRow]) -> Text:
        kinds = [row.kind for row in rows]
        failed = kinds.count("fail") + kinds.count("early_stopped")
        done = f"{kinds.count('success') + failed} of {len(rows)} done · {kinds.count('running')} running"
        return Text.assemble(
            (f"{self.plan.title}  ", "bold"),
            done,
            (f" · {failed} failed" if failed else "", "bold red"),
            (f" · {duration(self._clock() - self._began)}", "dim"),
        )


def _texts(row: LiveRow) -> Iterator[Text]:
    seconds = row.seconds_left if row.status == "running" else row.seconds or None
    yield Text(row.cell.name, overflow="ellipsis")
    yield Text(row.slot)
    yield Text("" if row.step is None else f"{row.step}/{row.total_steps or '–'}")
    yield Text("" if row.success is None else percent(row.success))
    yield Text("" if seconds is None else duration(seconds))
    yield Text(row.status, STYLES.get(row.kind, ""))
