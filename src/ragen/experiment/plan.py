"""What an experiment is once it is expanded: an ordered list of runs (cells), each ready to be started.

    plan = expand("kl_sweep", Options(gpus=("0", "1")))
    for cell in plan.cells:
        [*cell.start, *overrides_on(cell, ("0",))]    # what `ragen train` gets on GPU 0

`expand.py` makes plans, `scheduler.py` runs them.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ragen.errors import ConfigError
from ragen.store.sweep_results import Cell, SummaryLog, latest_lines, status_of

CPU = "cpu"  # a device of a slot that has no GPU


@dataclass(frozen=True)
class Options:
    """The options of every experiment. None is the experiment's default until it is expanded."""

    gpus: tuple[str, ...] | None = None  # device numbers in order, or "cpu" once a slot; None: found when it starts
    gpus_per_exp: int = 1
    steps: int | None = None
    cooldown: float | None = None  # seconds between two runs of a slot; smoke: between two batches
    model: str | None = None  # a hub name, a directory, or pocket
    seeds: int | None = None  # None: one run a cell, with the recipe's seed and no -s<k> in its name
    resume: bool = False  # skip what the summary log has as done
    only: tuple[str, ...] = ()  # names, labels or groups; empty: all
    dry_run: bool = False
    ray_address: str | None = None
    ray_num_cpus: int | None = 16  # of a run's own ray_kwargs; never of the scheduler
    retry: tuple[str, ...] = ()  # statuses that a resumed experiment runs again: early_stopped, success
    skip_statuses: tuple[str, ...] = ("success", "early_stopped")  # what a resumed experiment skips
    evaluate_turns: tuple[int, ...] | None = None  # played after the last run, see `evaluation.py`; (): no evaluation
    max_parallel: int | None = None  # runs at once; None: one for each slot
    settings: tuple[tuple[str, str], ...] = ()  # the experiment's own options, by variable: (("kl", "0,0.01"),)
    overrides: tuple[str, ...] = ()  # what stood after --

    def __post_init__(self) -> None:
        if self.cooldown is not None and not 0 <= self.cooldown < math.inf:
            raise ConfigError(f"--cooldown {self.cooldown:g}: takes seconds, 0 or more")

    @property
    def done_statuses(self) -> frozenset[str]:
        """What a resumed experiment does not run again; the part of a status before its colon counts."""
        return frozenset(self.skip_statuses) - set(self.retry)


@dataclass(frozen=True)
class Plan:
    """An expanded experiment."""

    name: str  # top_p_sweep, kl_sweep, …
    title: str  # "KL sweep: Qwen2.5-3B", for the head of the summary log and of the report
    header: tuple[str, ...]  # the lines below the title: values, steps, resources
    cells: tuple[Cell, ...]
    batches: tuple[tuple[int, ...], ...]  # indices that may run together; a batch starts when the one before has ended
    summary_path: Path
    summary_fields: tuple[str, ...]  # order of a summary line; the value of `name` stands bare, without `name=`
    options: Options  # with the defaults of the experiment filled in
    source: str = ""  # what `expand` was asked for: a name or a file
    all_cells: tuple[Cell, ...] = ()  # also those that --only skips
    reference: str | None = None  # label of the cell that the others are compared with, without -s<k>
    headings: dict[str, str] = field(default_factory=dict)  # group -> its line in the summary log
    append_summary: bool = False  # False: an older summary is kept as .log.1, unless options.resume
    wandb_mode: str | None = None  # None: as the environment says; "offline" syncs the new runs after each batch
    assumed: dict[str, str] = field(default_factory=dict)  # what a dry run took for lack of earlier results
    built_on: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)  # start -> config values in its names
    train_environment: dict[str, str] = field(default_factory=dict)  # additional variables of every run
    notes: tuple[str, ...] = ()  # what was decided for the user
    missing: str = ""  # what has to exist before a run can start; a dry run only reports it

    @property
    def is_offline(self) -> bool:
        return self.wandb_mode == "offline"

    @property
    def how_to_resume(self) -> str:
        return "the same command" if self.append_summary else "the same command with --resume"

    def statuses(self) -> dict[str, str]:
        """Cell name -> its latest status in the summary log, or `missing`; also of cells that --only skips."""
        cells = self.all_cells or self.cells
        latest = latest_lines(cells, self.summary_fields, SummaryLog(self.summary_path).text())
        return {cell.name: status_of(latest.get(cell.name, "")) for cell in cells}


def cluster_address(options: Options) -> str | None:
    """The existing cluster to run on; None for this machine."""
    address = options.ray_address or os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def in_batches(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Consecutive cells of one group, at most `size` together."""
    groups = [list(group) for _, group in groupby(cells, key=lambda cell: cell.group)]
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


def overrides_on(cell: Cell, slot: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides of a cell in a slot, with its device list: `("0", "1")`, or `("cpu",)` for none."""
    devices = "" if slot == (CPU,) else ",".join(slot)
    return (*cell.overrides, f"system.CUDA_VISIBLE_DEVICES='{devices}'")
