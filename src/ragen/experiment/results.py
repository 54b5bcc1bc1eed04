"""How the runs of an experiment ended, and what the summary log says about all of them.

result = judge(cell, ended, gpu="1xH100")                  # from exit status, log and folder of a run
result_line(plan.summary_fields, cell, result.values())    # its line, see `store/sweep_results.py`
closing_block(plan, latest)                                # every cell in order, and the totals
changed_settings(cell, recorded)                           # why a cell that is done has to run again
"""

import math
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.config import identity_keys
from ragen.experiment.plan import Plan
from ragen.run.interrupt import PREEMPTED
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import (
    MISSING,
    SEPARATOR,
    TIMES,
    Cell,
    Record,
    SummaryLog,
    recorded_cells,
    result_line,
    run_folder,
    status_of,
)

ERROR_LINES, ERROR_WIDTH = 2, 300


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: str
    error: str = ""
    wall_seconds: float = 0.0
    gpu: str = ""
    times: Mapping[str, float] = field(default_factory=dict)  # by field name; absent ones were not measured

    def values(self) -> dict[str, str]:
        """The fields of its line."""
        times = {name: f"{self.times[name]:.2f}s" if name in self.times else "N/A" for name in TIMES}
        return times | {"wall_time": f"{int(self.wall_seconds)}s", "gpu": self.gpu, "status": self.status}


def judge(cell: Cell, ended: Mapping[str, Any], gpu: str, log_offset: int = 0) -> Result:
    """The result of a run. Its log begins at `log_offset`; what is before belongs to an earlier attempt."""
    if "error" in ended:
        return Result("fail", str(ended["error"]), gpu=gpu)
    folder = RunFolder(run_folder(cell.log_path, log_offset) or cell.checkpoint_dir)
    code, status, error = ended["status"], "success", ""
    if code == 3:
        status = f"early_stopped:{(folder.read_finished() or {}).get('rule') or 'unknown'}"
    elif code != 0:
        output = last_lines(cell.log_path, log_offset)
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        status, error = "fail", f"{how}: {output}" if output else how
    return Result(status, error, ended["ended"] - ended["started"], gpu, measured_times(folder))


def is_preempted(ended: Mapping[str, Any]) -> bool:
    """Whether SIGTERM ended a run: it has saved, or the signal came before it could."""
    return ended.get("status") in (PREEMPTED, -signal.SIGTERM)


def last_step(cell: Cell, log_offset: int = 0) -> int:
    """The last step that a run has recorded; -1: none."""
    step = RunFolder(run_folder(cell.log_path, log_offset) or cell.checkpoint_dir).read_metrics().last_step()
    return -1 if step is None else step


def measured_times(folder: RunFolder) -> dict[str, float]:
    """Seconds by field name, from the run's own metrics."""
    metrics = folder.read_metrics()
    series = {name: [value for _, value in metrics.series(key) if math.isfinite(value)] for name, key in TIMES.items()}
    return {name: values[-1] for name, values in series.items() if values}


def last_lines(log: Path, offset: int = 0) -> str:
    """The end of a run's output, on one line."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    lines = [text for line in lines if (text := " ".join(line.split()))][-ERROR_LINES:]
    return " / ".join(line if len(line) <= ERROR_WIDTH else f"{line[: ERROR_WIDTH - 1]}…" for line in lines)


def closing_block(plan: Plan, latest: Mapping[str, str], gpu: str = "") -> list[str]:
    """Every cell in order, and the totals."""
    missing = {"status": MISSING}
    lines = [latest.get(cell.name) or result_line(plan.summary_fields, cell, missing) for cell in plan.cells]
    projects = dict.fromkeys(cell.wandb_project for cell in plan.cells)
    facts = {"project": ", ".join(projects), "steps": plan.options.steps, "gpu": gpu}
    return [
        "",
        f"=== {plan.title} Completed: {date()} ===",
        "=== Summary ===",
        SEPARATOR.join(f"{name}={value}" for name, value in facts.items() if value),
        *lines,
        totals_line(map(status_of, lines)),
    ]


def totals_line(statuses: Iterable[str]) -> str:
    """A run that a rule has stopped is a failed one; one that was preempted has not ended."""
    counts = Counter(status if status in ("success", "preempted", MISSING) else "failed" for status in statuses)
    line = f"Total: {counts.total()} | Success: {counts['success']} | Failed: {counts['failed']}"
    sometimes = {"Preempted": counts["preempted"], "Missing": counts[MISSING]}
    return line + "".join(f" | {name}: {count}" for name, count in sometimes.items() if count)


def date() -> str:
    return datetime.now().isoformat(" ", "seconds")


def write_record(plan: Plan, cells: Iterable[Cell]) -> None:
    """Record what cells were told to run. Other cells of the same experiment keep their entries."""
    with SummaryLog(plan.summary_path).locked():
        update_record(plan, cells, recorded_cells(plan.summary_path))


def update_record(plan: Plan, cells: Iterable[Cell], known: Mapping[str, Cell]) -> None:
    """The same while the summary log is locked; `known` are the cells that keep their entries."""
    order = {cell.name: index for index, cell in enumerate(plan.cells)}
    merged = {**known, **{cell.name: cell for cell in cells}}
    merged = dict(sorted(merged.items(), key=lambda item: order.get(item[0], len(order))))
    Record(plan.name, plan.title, plan.summary_path, plan.summary_fields, plan.reference, merged).write()


def changed_settings(now: Cell, before: Cell) -> list[str]:
    """The differences between a cell and its recorded namesake that may change its numbers."""
    if now.start != before.start:
        return [f"{' '.join(before.start)}, now {' '.join(now.start)}"]
    old, new = _settings(before.overrides), _settings(now.overrides)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}={old.get(key, '(unset)')}, now {new.get(key, '(unset)')}" for key in keys]


def _settings(overrides: Iterable[str]) -> dict[str, str]:
    """Those that may change the numbers of a run."""
    pairs = (override.lstrip("+~").partition("=") for override in overrides)
    ignored = (*identity_keys.WHERE, *identity_keys.HOW)
    return {key: value for key, _, value in pairs if identity_keys.changes_only(key) not in ignored}
