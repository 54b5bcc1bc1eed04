"""An experiment while it runs: a table that stays in place in a terminal, and a line for each event elsewhere.

    with make_view(plan, total=len(plan.cells), screen=Screen()) as view:
        view.started(cell, slot="0,1", log_offset=0)
        view.refresh()                                  # reads what the runs have measured since
        view.ended(cell, "success", seconds=41.0)
        view.note("interrupted")

Everything shown comes from the runs' own metrics files. They are read as they grow, not from their beginning.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ragen.config.tree import leaves
from ragen.experiment.cell import Cell, Plan
from ragen.experiment.results import run_folder
from ragen.format import duration, percent
from ragen.report.verdict import PREFIX
from ragen.store.resume import BUDGET
from ragen.store.run_folder import RunFolder
from ragen.terminal import Screen

STYLES = {"running": "cyan", "waiting": "dim", "success": "green", "fail": "bold red", "early_stopped": "red"}
RECENT = 20  # steps whose mean time tells how long the rest takes


@dataclass
class Progress:
    """What a run has measured so far. `update` reads the lines that have come since."""

    log: Path
    log_offset: int = 0
    folder: RunFolder | None = None
    total_steps: int | None = None
    step: int | None = None
    success: float | None = None  # of the last validation, the mean over its environments
    step_seconds: list[float] = field(default_factory=list)
    _read: int = 0  # bytes of the metrics file

    def update(self) -> None:
        if self.folder is None:
            path = run_folder(self.log, self.log_offset)
            if path is None:
                return
            self.folder = RunFolder(path)
        if self.total_steps is None:
            self.total_steps = _total_steps(self.folder)
        for row in self._new_rows():
            self._take(row)

    def seconds_left(self) -> float | None:
        if not self.step_seconds or self.total_steps is None or self.step is None:
            return None
        recent = self.step_seconds[-RECENT:]
        return max(0, self.total_steps - self.step) * sum(recent) / len(recent)

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.folder.metrics_path, "rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row

    def _take(self, row: Mapping[str, Any]) -> None:
        self.step = row["step"]
        found = [value for key, value in row.items() if key.startswith(PREFIX) and key.endswith("/success")]
        found = [value for value in found if isinstance(value, (int, float)) and math.isfinite(value)]
        if found:
            self.success = sum(found) / len(found)
        seconds = row.get("timing_s/step")
        if isinstance(seconds, (int, float)) and math.isfinite(seconds):
            self.step_seconds.append(seconds)


def _total_steps(folder: RunFolder) -> int | None:
    try:
        total = leaves(folder.read_config()).get(BUDGET)
    except (OSError, ValueError, yaml.YAMLError):
        return None  # being written
    return total if isinstance(total, int) else None


@dataclass
class Row:
    cell: Cell
    status: str = "waiting"
    slot: str = ""
    progress: Progress | None = None
    began: float = 0.0
    seconds: float = 0.0  # that it took


def make_view(plan: Plan, screen: Screen | None = None) -> "View":
    """The view that suits where the output goes."""
    screen = screen or Screen()
    return LiveTable(plan, screen) if screen.is_terminal and not screen.is_dumb_terminal else Lines(plan, screen)


class View:
    """Where every cell stands."""

    def __init__(self, plan: Plan, screen: Screen, clock: Callable[[], float] = time.monotonic):
        self.plan, self._screen, self._clock = plan, screen, clock
        self.rows = {cell.name: Row(cell) for cell in plan.cells}
        self._began = clock()

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def done_before(self, name: str, status: str) -> None:
        self.rows[name].status = status

    def started(self, cell: Cell, slot: str, log_offset: int) -> None:
        self.rows[cell.name] = Row(cell, "running", slot, Progress(cell.log_path, log_offset), self._clock())

    def ended(self, cell: Cell, status: str, error: str = "") -> None:
        row = self.rows[cell.name]
        row.status, row.seconds = status, self._clock() - row.began
        row.progress.update()

    def waiting(self, cell: Cell) -> None:
        """A run that was lost waits for its turn again."""
        self.rows[cell.name] = Row(cell)

    def refresh(self) -> None:
        pass

    def note(self, text: str) -> None:
        self._screen.print(Text(text), soft_wrap=True)


class Lines(View):
    """A line for each run that starts or ends."""

    def started(self, cell: Cell, slot: str, log_offset: int) -> None:
        super().started(cell, slot, log_offset)
        self.note(f"{self._count()} start {cell.name} on {slot}: {cell.log_path}")

    def ended(self, cell: Cell, status: str, error: str = "") -> None:
        super().ended(cell, status, error)
        row = self.rows[cell.name]
        success = "" if row.progress.success is None else f", validation success {percent(row.progress.success)}"
        self.note(f"{self._count()} {status} {cell.name} ({duration(row.seconds)}{success})")
        if error:
            self.note(f"  error: {error}")

    def _count(self) -> str:
        done = sum(row.status not in ("waiting", "running", "interrupted") for row in self.rows.values())
        return f"[{done}/{len(self.rows)}]"


class LiveTable(View):
    """A table that stays in place; errors and notes scroll by above it."""

    def __init__(self, plan: Plan, screen: Screen, clock: Callable[[], float] = time.monotonic):
        super().__init__(plan, screen, clock)
        self._live = Live(
            get_renderable=self.render, console=screen, auto_refresh=False, redirect_stderr=sys.stderr.isatty()
        )

    def __enter__(self) -> "LiveTable":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def ended(self, cell: Cell, status: str, error: str = "") -> None:
        super().ended(cell, status, error)
        if error:
            self.note(f"{cell.name}: {status}: {error}")

    def refresh(self) -> None:
        for row in self.rows.values():
            if row.status == "running":
                row.progress.update()
        self._live.refresh()

    # --- what is drawn ------------------------------------------------------------------------------------------

    def render(self) -> Group:
        rows = list(self.rows.values())
        shown = self._fitting(rows)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading, how in COLUMNS.items():
            table.add_column(heading, no_wrap=True, **how)
        for row in shown:
            table.add_row(*self._cells(row))
        hidden = [Text(f"and {len(rows) - len(shown)} more", "dim")] if len(shown) < len(rows) else []
        return Group(self._heading(rows), table, *hidden)

    def _heading(self, rows: list[Row]) -> Text:
        counts = {name: sum(row.status.partition(":")[0] == name for row in rows) for name in STYLES}
        failed = counts["fail"] + counts["early_stopped"]
        done = f"{counts['success'] + failed} of {len(rows)} done"
        text = Text(f"{self.plan.title}  ", "bold").append(done, "not bold")
        text.append(f" · {counts['running']} running", "not bold")
        if failed:
            text.append(f" · {failed} failed", "red")
        return text.append(f" · {duration(self._clock() - self._began)}", "not bold dim")

    def _cells(self, row: Row) -> Iterator[Text]:
        progress = row.progress or Progress(row.cell.log_path)
        kind = row.status.partition(":")[0]
        is_running = row.status == "running"
        left = progress.seconds_left() if is_running else None
        step = "" if progress.step is None else f"{progress.step}/{progress.total_steps or '–'}"
        yield Text(row.cell.name, overflow="ellipsis")
        yield Text(row.slot)
        yield Text(step)
        yield Text("" if progress.success is None else percent(progress.success))
        yield Text(duration(row.seconds) if not is_running and row.seconds else "" if left is None else duration(left))
        yield Text(row.status, STYLES.get(kind, ""))

    def _fitting(self, rows: list[Row]) -> list[Row]:
        """As many as the terminal has lines for: those that run, then the newest of the others."""
        room = max(3, self._screen.height - 5)
        if len(rows) <= room:
            return rows
        ranks = {"running": 0, "fail": 1, "early_stopped": 1, "success": 2, "waiting": 3}
        chosen = sorted(rows, key=lambda row: ranks.get(row.status.partition(":")[0], 3))[:room]
        return [row for row in rows if any(row is other for other in chosen)]


COLUMNS: dict[str, dict[str, Any]] = {
    "cell": {},
    "slot": {},
    "step": {"justify": "right"},
    "success": {"justify": "right"},
    "left": {"justify": "right"},
    "status": {},
}
