"""Run an expanded experiment: every cell as a child process in a slot, placed by Ray, until all have had their turn.

    status = run(expand("kl_sweep", Options(gpus=("cpu", "cpu"), model="pocket", steps=3)))      # 0, 1 or 130

- The next cell starts in the first slot that is free. A run that fails never stops the others.
- How a run ended is its exit status: 0 success, 3 stopped early by a rule, anything else fail. See `results`.
- A run whose watcher or node is lost waits for its turn again; it goes on from its checkpoint, or begins again.
- Ctrl-C (or SIGTERM) asks every run to end after its step; a second Ctrl-C kills them. Nothing is left running, and
  `--resume` goes on from there.
- Cells of one batch run together, the next batch follows when all of it has ended.

Exit status: 0 all cells have succeeded, 1 some have not, 130 interrupted; what cannot start raises a ConfigError.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ragen import invocation_dir
from ragen.errors import ConfigError, RunFailed
from ragen.experiment import child, slots, wandb_sync
from ragen.experiment.cell import CPU, Cell, Plan, words
from ragen.experiment.cluster import connected
from ragen.experiment.device_pool import Slot, check_devices, check_sizes
from ragen.experiment.live import View, make_view
from ragen.experiment.locks import held
from ragen.experiment.nodes import Fleet
from ragen.experiment.results import (
    Result,
    SummaryLog,
    changed_settings,
    closing_block,
    date,
    judge,
    latest_lines,
    recorded_cells,
    result_line,
    run_folder,
    status_of,
    totals_line,
    write_record,
)
from ragen.run.interrupt import Interrupt
from ragen.run.sinks import WANDB_ID
from ragen.store.fsync import write_whole
from ragen.store.run_folder import RunFolder

PAUSE = 0.5  # seconds between two looks at the runs
MOST_LOSSES = 3  # of one run; after so many it counts as failed
OWNER_PATIENCE = 30.0  # seconds after which nothing of a lost node is alive
NODE_PATIENCE = 20.0  # seconds until Ray knows whether the node of a lost run is lost too

Command = Callable[[Cell, tuple[str, ...]], list[str]]


def train_command(cell: Cell, devices: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "ragen", "train", *cell.start, *words(cell, devices)]


def run(plan: Plan, command: Command = train_command, grace: float = child.GRACE) -> int:
    """Run the cells of a plan that are not done yet.

    `command` makes the command of a cell on its devices; a run that is interrupted has `grace` seconds to end.
    """
    address = plan.options.ray_address or os.environ.get("RAY_ADDRESS")
    address = None if address in ("", "local") else address
    devices = _devices(plan, address)
    with held([cell.result_path for cell in plan.cells], plan.name) as locks, ExitStack() as stack:
        log = SummaryLog(plan.summary_path)
        done, notes = _done(plan, log)
        for cell in plan.cells:
            if cell.name in done:
                locks.release(cell.result_path)
        if len(done) == len(plan.cells):
            return _close(plan, log)
        gpu_names = _gpu_names(devices) if address is None else {}
        with connected(address, max(1, len(devices))) as cluster:
            fleet = Fleet(plan, cluster, devices, gpu_names)
            notes += stack.enter_context(_opened(plan, log, done, fleet))
            with make_view(plan) as view:
                for name, status in done.items():
                    view.done_before(name, status)
                for note in notes:
                    view.note(note)
                todo = [cell for cell in plan.cells if cell.name not in done]
                is_complete = Sweep(plan, command, grace, log, view, fleet).run(todo)
        return _close(plan, log, fleet.gpu) if is_complete else _interrupted(plan, log)


# --- before -------------------------------------------------------------------------------------------------------


def _devices(plan: Plan, address: str | None) -> tuple[str, ...]:
    """The devices of each node; none where a cluster is to tell which it has."""
    if address is not None and plan.options.gpus is None:
        return ()
    devices = plan.options.gpus or slots.discover()
    slots.cut(devices, plan.options.gpus_per_exp or 1)
    check_sizes(plan.cells, devices)
    return devices


def _gpu_names(devices: Sequence[str]) -> dict[str, str]:
    """What the GPUs of this machine are called; one that torch does not find stops everything."""
    if CPU in devices:
        return {}
    try:
        names = child.gpu_names(sys.executable, devices)
    except OSError as error:
        raise ConfigError(f"--gpus {','.join(devices)}: torch cannot be asked about them: {error}") from None
    check_devices(devices, names)
    return dict(zip(devices, names, strict=True))


def _done(plan: Plan, log: SummaryLog) -> tuple[dict[str, str], list[str]]:
    """The cells that a resumed experiment leaves as they are, with their statuses; and what there is to say."""
    if not plan.options.resume:
        return {}, []
    latest = latest_lines(plan.cells, plan.summary_fields, log.text())
    before = recorded_cells(plan.summary_path)
    done, notes = {}, []
    for cell in plan.cells:
        status = status_of(latest.get(cell.name, ""))
        if status.partition(":")[0] not in plan.options.done_statuses:
            continue
        changed = changed_settings(cell, before[cell.name]) if cell.name in before else []
        if changed:
            notes.append(f"{cell.name} is done with other settings ({'; '.join(changed[:3])}): it runs again")
        else:
            done[cell.name] = status
    return done, notes


@contextmanager
def _opened(plan: Plan, log: SummaryLog, done: Mapping[str, str], fleet: Fleet) -> Iterator[list[str]]:
    """Begin the summary log and the record, which stay ours; yields what there is to say."""
    wants_fresh = not plan.options.resume and not plan.append_summary
    with log.shared(wants_fresh) as is_alone:
        is_fresh = wants_fresh and is_alone
        notes = []
        if wants_fresh and not is_alone:
            notes.append(f"others are writing to {plan.summary_path}: it is added to")
        word = "Resumed" if log.text() else "Started"
        skipped = [f"Skipping: {name} (status={status})" for name, status in done.items()]
        opening = [f"=== {plan.title} {word}: {date()} ===", *plan.header, fleet.words(), *notes, *skipped, ""]
        log.append(["", *opening] if log.text() else opening)
        known = {} if is_fresh else recorded_cells(plan.summary_path)
        write_record(plan, [cell for cell in plan.cells if cell.name not in known], is_fresh)
        yield notes


# --- after --------------------------------------------------------------------------------------------------------


def _close(plan: Plan, log: SummaryLog, gpu: str | None = None) -> int:
    """The totals, also into the summary log where something has run; returns the exit status."""
    latest = latest_lines(plan.cells, plan.summary_fields, log.text())
    block = closing_block(plan, latest, gpu or "")
    if gpu is not None:
        log.append(block)
    print("\n".join(block[1:]))
    print(f"summary: {plan.summary_path}\nreport: ./ragen report {plan.summary_path}", flush=True)
    statuses = {status_of(latest.get(cell.name, "")) for cell in plan.cells}
    return 0 if statuses == {"success"} else 1


def _interrupted(plan: Plan, log: SummaryLog) -> int:
    latest = latest_lines(plan.cells, plan.summary_fields, log.text())
    totals = totals_line(status_of(latest.get(cell.name, "")) for cell in plan.cells)
    log.append(["", f"=== {plan.title} Interrupted: {date()} | {totals} ==="])
    print(f"interrupted: {totals}; {how_to_go_on(plan)} goes on from there", flush=True)
    return 130


def how_to_go_on(plan: Plan) -> str:
    return "the same command" if plan.append_summary else "the same command with --resume"


# --- while it runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    cell: Cell
    slot: Slot
    log_offset: int


@dataclass
class Loss:
    """A run whose watcher was lost."""

    host: str
    at: float
    times: int = 0


@dataclass
class Sweep:
    """The cells that wait, those that run, and what is done with each that ends."""

    plan: Plan
    command: Command
    grace: float
    log: SummaryLog
    view: View
    fleet: Fleet
    running: dict[Any, Running] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)
    interrupt: Interrupt = field(init=False)

    def __post_init__(self) -> None:
        self.interrupt = Interrupt(self.view.note)

    def run(self, todo: Sequence[Cell]) -> bool:
        """All of them, batch by batch; False if interrupted."""
        groups = set()
        with self.interrupt:
            for number, batch in enumerate(batches(self.plan, todo)):
                if number and self._pauses_between_batches and not self._pause():
                    return False
                heading = self.plan.headings.get(batch[0].group)
                if heading and batch[0].group not in groups:
                    self._write([heading])
                    groups.add(batch[0].group)
                before = wandb_sync.offline_runs()
                if not self._run_batch(batch):
                    return False
                if self.plan.sync_wandb:
                    self._sync(batch, before)
        return True

    @property
    def _pauses_between_batches(self) -> bool:
        return self.plan.sync_wandb or len(self.plan.batches) > 1

    @property
    def _cooldown(self) -> float:
        return self.plan.options.cooldown or 0.0

    def _run_batch(self, batch: Sequence[Cell]) -> bool:
        queue = deque(batch)
        while queue or self.running:
            if self.interrupt.is_set:
                self._stop(queue)
                return False
            if self.fleet.cluster.is_gone():
                raise RunFailed(
                    "Ray was ended from outside, and all runs with it; the same command with --resume goes on"
                )
            for note in self.fleet.look():
                self.view.note(note)
            self._start(queue)
            self._collect(queue)
            self.view.refresh()
        return True

    def _start(self, queue: deque[Cell]) -> None:
        """Cells in their order, for as long as there is room. One that was lost may have to wait a little."""
        most = self.plan.options.max_parallel
        while queue and (most is None or len(self.running) < most):
            cell = next((cell for cell in queue if self._may_start(cell)), None)
            slot = self.fleet.take(cell, time.monotonic()) if cell is not None else None
            if cell is None or slot is None:
                return
            queue.remove(cell)
            self._start_one(cell, slot)

    def _start_one(self, cell: Cell, slot: Slot) -> None:
        adds = self.plan.options.resume or self.plan.append_summary or cell.name in self.losses
        with self._told():
            cell.log_path.parent.mkdir(parents=True, exist_ok=True)
            cell.result_path.unlink(missing_ok=True)
        offset = cell.log_path.stat().st_size if adds and cell.log_path.exists() else 0
        devices = tuple(device.name for device in slot)
        command = self.command(cell, devices)
        adds = offset > 0 or self._began_log(cell)
        job = child.job(command, cell.log_path, self._environment(cell, devices), adds, self.grace)
        self.running[self.fleet.cluster.start(job, slot)] = Running(cell, slot, offset)
        self.view.started(cell, ",".join(devices), offset)

    def _began_log(self, cell: Cell) -> bool:
        """Whether the log has a head, to which the run adds."""
        if not cell.log_head:
            return False
        with self._told() as problems:
            title = f"=== {self.plan.title}: {date()} ==="
            cell.log_path.write_text("".join(f"{line}\n" for line in (title, *cell.log_head)))
        return not problems

    def _environment(self, cell: Cell, devices: tuple[str, ...]) -> dict[str, str]:
        environment = child_environment(self.plan, devices)
        if CPU in devices:
            environment.setdefault("OMP_NUM_THREADS", str(self.fleet.threads(cell)))
        return environment

    def _collect(self, queue: deque[Cell]) -> None:
        """Take in the runs that have ended. Once interrupted, only those count that had come to their own end."""
        for handle in self.fleet.cluster.wait(list(self.running), PAUSE) or self._nap():
            one = self.running.pop(handle)
            ended = self.fleet.cluster.result(handle)
            self.fleet.pool.give_back(one.slot, time.monotonic() + self._pause_after(ended))
            if self.interrupt.is_set and (ended is None or ended.get("status") not in (0, 3)):
                self.view.ended(one.cell, "interrupted")
            elif ended is None:
                self._lost(one, queue)
            else:
                self._finish(one.cell, judge(one.cell, ended, self.fleet.label(one.slot), one.log_offset))

    def _pause_after(self, ended: Mapping[str, Any] | None) -> float:
        """How long the devices of a run stay empty."""
        if ended is None and not self.fleet.cluster.is_own:
            return NODE_PATIENCE
        return 0.0 if self._pauses_between_batches else self._cooldown

    def _nap(self) -> tuple[()]:
        if not self.running:  # all wait for a pause to pass or for a node to come
            time.sleep(PAUSE)
        return ()

    def _finish(self, cell: Cell, result: Result) -> None:
        """Its line, its result file and its place in the record."""
        line = result_line(self.plan.summary_fields, cell, result.values())
        lines = [line] + ([f"  error: {result.error}"] if result.error else [])
        if self._write([*lines, ""] if "name" in self.plan.summary_fields else lines):
            with self._told():
                write_whole(cell.result_path, f"{line}\n".encode())
                write_record(self.plan, [cell])
        self.view.ended(cell, result.status, result.error)

    def _write(self, lines: Sequence[str]) -> bool:
        """Whether the summary log could take them."""
        with self._told() as problems:
            self.log.append(lines)
        return not problems

    @contextmanager
    def _told(self) -> Iterator[list[OSError]]:
        """A full disk is told and stops nothing."""
        problems: list[OSError] = []
        try:
            yield problems
        except OSError as error:
            problems.append(error)
            self.view.note(f"{error.filename or self.log.path} cannot be written: {error.strerror}")

    def _sync(self, batch: Iterable[Cell], before: set) -> None:
        """Upload what this batch has left, not what others leave meanwhile."""
        folders = [run_folder(cell.log_path) or cell.checkpoint_dir for cell in batch]
        ids = {path.read_text().strip() for folder in folders if (path := folder / WANDB_ID).exists()}
        new = {run for run in wandb_sync.offline_runs() - before if run.name.rpartition("-")[2] in ids}
        lines = wandb_sync.sync(new)
        self._write([*lines, ""])
        for line in lines[:1]:
            self.view.note(line)

    def _pause(self) -> bool:
        """Between two batches; False if interrupted."""
        until = time.monotonic() + self._cooldown
        while time.monotonic() < until and not self.interrupt.is_set:
            time.sleep(min(PAUSE, self._cooldown))
            self.view.refresh()
        return not self.interrupt.is_set

    # --- interrupted and lost -----------------------------------------------------------------------------------

    def _stop(self, queue: deque[Cell]) -> None:
        """Let the runs end, and kill those that do not, or all if asked once more."""
        cluster = self.fleet.cluster
        deadline = time.monotonic() + self.grace + 10.0
        try:
            cluster.stop(list(self.running))
            while self.running and time.monotonic() < deadline and not cluster.is_gone():
                self._collect(queue)
                self.view.refresh()
        except KeyboardInterrupt:
            self.view.note("interrupted again: the runs are killed")
        cluster.stop(list(self.running), at_once=True)

    def _lost(self, one: Running, queue: deque[Cell]) -> None:
        node = self.fleet.nodes[one.slot[0].node]
        for note in self.fleet.update():
            self.view.note(note)
        loss = self.losses.setdefault(one.cell.name, Loss(node.host, 0.0))
        loss.host, loss.at, loss.times = node.host, time.monotonic(), loss.times + 1
        if loss.times >= MOST_LOSSES:
            error = f"its watcher was lost {loss.times} times, the last time on {node.host}"
            self._finish(one.cell, Result("fail", error, gpu=self.fleet.label(one.slot)))
            return
        self.view.waiting(one.cell)
        self.view.note(f"{one.cell.name} was lost with its watcher on {node.host}: it waits for its turn again")
        queue.appendleft(one.cell)

    def _may_start(self, cell: Cell) -> bool:
        """A run that was lost starts again once nothing of it is alive."""
        loss = self.losses.get(cell.name)
        if loss is None:
            return True
        folder = RunFolder(run_folder(cell.log_path) or cell.checkpoint_dir)
        owner = folder.live_owner()
        if owner is None:
            return True
        if time.monotonic() - loss.at < OWNER_PATIENCE:
            return False
        if owner["host"] == loss.host != socket.gethostname():
            folder.owner_path.write_text("")  # its node is gone, and nobody else can know
        return True


def child_environment(plan: Plan, devices: tuple[str, ...]) -> dict[str, str]:
    """The variables of a process on these devices."""
    environment = {**os.environ, **plan.train_environment}
    environment.pop(invocation_dir.VARIABLE, None)
    if environment.get("PYTHONPATH"):
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths)
    if plan.wandb_mode is not None:
        environment["WANDB_MODE"] = plan.wandb_mode
    environment["CUDA_VISIBLE_DEVICES"] = "" if CPU in devices else ",".join(devices)
    return environment


def batches(plan: Plan, todo: Sequence[Cell]) -> list[list[Cell]]:
    """The cells that are still to run, in batches as large as the planned ones that never span groups."""
    if not todo:
        return []
    most = max(len(batch) for batch in plan.batches)
    planned = {index: number for number, batch in enumerate(plan.batches) for index in batch}
    keys = {cell.name: (planned[index], cell.group) for index, cell in enumerate(plan.cells)}
    found: list[list[Cell]] = []
    for cell in sorted(todo, key=lambda cell: keys[cell.name][0]):
        if not found or len(found[-1]) == most or found[-1][-1].group != cell.group:
            found.append([])
        found[-1].append(cell)
    return found
