"""What an experiment is once it is expanded: an ordered list of runs, each ready to be started.

    plan = expand("kl_sweep", Options(gpus=("0", "1")))
    for cell in plan.cells:
        [*cell.start, *words(cell, slot)]    # what `ragen train` gets in that slot

Nothing here starts anything: `plan.py` makes these values, `scheduler.py` runs them.
"""

from dataclasses import dataclass, field
from pathlib import Path

CPU = "cpu"  # a device of a slot that has no GPU


@dataclass(frozen=True)
class Options:
    """What every experiment can be told. None stands for the experiment's own default until it is expanded."""

    gpus: tuple[str, ...] | None = None  # device numbers in order, or "cpu" once a slot; None: found when it starts
    gpus_per_exp: int = 1
    steps: int | None = None
    cooldown: float | None = None  # seconds between two runs of a slot; smoke: between two batches
    model: str | None = None  # a hub name, a folder, or pocket
    seeds: int | None = None  # None: one run a cell, with the recipe's seed and no -s<k> in its name
    resume: bool = False  # skip what the summary log has as done
    only: tuple[str, ...] = ()  # names, labels or groups; empty: all
    dry_run: bool = False
    ray_address: str | None = None
    ray_num_cpus: int | None = 16  # of a run's own ray_kwargs; never of the scheduler
    retry: tuple[str, ...] = ()  # statuses that a resumed experiment runs again: early_stopped, success
    skip_statuses: tuple[str, ...] = ("success",)  # what a resumed experiment skips; see `done_statuses`
    evaluate_turns: tuple[int, ...] | None = None  # played after the last run, see `evaluation.py`; (): nothing is
    max_parallel: int | None = None  # at most so many at once; None: one for each slot
    settings: tuple[tuple[str, str], ...] = ()  # the experiment's own options: (("kl_values", "0,0.01"),)
    overrides: tuple[str, ...] = ()  # what stood after --

    @property
    def done_statuses(self) -> frozenset[str]:
        """What a resumed experiment does not run again; the part of a status before its colon counts."""
        return frozenset({*self.skip_statuses, "early_stopped"}) - set(self.retry)


@dataclass(frozen=True)
class Cell:
    """One run of an experiment, ready to be started. Paths are relative to the repository's root."""

    name: str  # the documented run name, with -s<k> where there are seeds
    label: str  # the documented directory label, `0001` for 0.001, with -s<k> where there are seeds; unique in a plan
    group: str  # group of the smoke test or of the search, else ""
    start: tuple[str, ...]  # what `ragen train` gets first: ("--config-name", "_2_sokoban") or ("sokoban",)
    overrides: tuple[str, ...]  # every key=value word but the device list, in order
    num_gpus: int  # consecutive devices that it needs
    seed: int | None  # k of -s<k>
    log_path: Path
    result_path: Path
    checkpoint_dir: Path  # trainer.default_local_dir
    wandb_project: str
    fields: tuple[tuple[str, str], ...]  # the part of its summary line that is known beforehand
    log_head: tuple[str, ...] = ()  # the first lines of its log, below the title


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
    reference: str | None = None  # label of the cell that the others are compared with, without -s<k>
    headings: dict[str, str] = field(default_factory=dict)  # group -> its line in the summary log
    append_summary: bool = False  # False: an older summary is kept as .log.1, unless options.resume
    wandb_mode: str | None = None  # "offline", or None: as the environment says
    sync_wandb: bool = False  # one `wandb sync` of the new offline runs after each batch
    assumed: dict[str, str] = field(default_factory=dict)  # what a dry run took for lack of earlier results
    built_on: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)  # start -> config values in its names
    train_environment: dict[str, str] = field(default_factory=dict)  # variables of every run besides
    notes: tuple[str, ...] = ()  # what was decided for the user
    missing: str = ""  # what has to be there before a run can start; a dry run only says so


def words(cell: Cell, slot: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides of a cell in a slot, with its device list: `("0", "1")`, or `("cpu",)` for none."""
    devices = "" if slot == (CPU,) else ",".join(slot)
    return (*cell.overrides, f"system.CUDA_VISIBLE_DEVICES='{devices}'")
