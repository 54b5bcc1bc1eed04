"""Run an expanded experiment: every cell as a child process in a slot, started by Ray, until all have had their turn.

    status = run(expand("kl_sweep", Options(gpus=("cpu", "cpu"), model="pocket", steps=3)))      # 0, 1 or 130

- The next cell starts in the first slot that is free. A run that fails never stops the others.
- The exit status of a run is its result: 0 success, 3 stopped early by a rule, 143 preempted, anything else fail. See
  `results`.
- A run that is preempted, or whose guard, watcher or node is lost, waits for its turn again; it resumes from its
  checkpoint, or begins again. Its slot is free once nothing of it is alive. After `MOST_SETBACKS` in a row without a
  further step it has failed.
- Ctrl-C asks every run to end after its step; a second Ctrl-C kills them. SIGTERM is passed on: every run saves and
  ends. Nothing is left running, and `--resume` continues.
- Cells of one batch run together, the next batch follows when all of it has ended.

Exit status: 0 all cells have succeeded, 1 some have not, 130 interrupted, 143 terminated; what cannot start raises a
ConfigError.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragen import invocation_dir, lifeline
from ragen.command_hint import hint
from ragen.errors import ConfigError, RunFailed
from ragen.experiment import devices, results, run_process, wandb_sync
from ragen.experiment.cluster import Slot, connected
from ragen.experiment.devices import Nodes
from ragen.experiment.live import View
from ragen.experiment.plan import CPU, Plan, cluster_address, in_batches, overrides_on
from ragen.format import harmless
from ragen.run.interrupt import PREEMPTED, Interrupt
from ragen.run.sinks import WANDB_ID
from ragen.store.fsync import write_whole
from ragen.store.lock import is_locked
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import (
    Cell,
    SummaryLog,
    any_held,
    held,
    keep_older,
    latest_lines,
    recorded_cells,
    result_line,
)

PAUSE = 0.5  # seconds between two looks at the runs
MOST_SETBACKS = 3  # of one run in a row without a further step; then it counts as failed
OWNER_PATIENCE = 30.0  # seconds after which nothing of a lost node is alive
WAS_PREEMPTED = "it was preempted"
NODE_PATIENCE = 20.0  # seconds until Ray knows whether the node of a lost run is lost too

Command = Callable[[Cell, tuple[str, ...]], list[str]]


def train_command(cell: Cell, slot: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "ragen", "train", *cell.start, *overrides_on(cell, slot)]


def run(plan: Plan, command: Command = train_command, grace: float = run_process.GRACE) -> int:
    """Run the cells that are not done yet, each with its `command`. Interrupted, they have `grace` seconds to end."""
    address = cluster_address(plan.options)
    listed = _devices(plan, address)
    with held(plan.cells, plan.name) as locks:
        log = SummaryLog(plan.summary_path)
        done, notes = _done(plan)
        print("".join(f"{line}\n" for line in _skipping(done)), end="", flush=True)
        for name in done:
            locks.pop(name).release()
        if len(done) == len(plan.cells):
            return _close(plan, log)
        gpu_names = _gpu_names(listed) if address is None else {}
        with connected(address, max(1, len(listed))) as cluster:
            nodes = Nodes(plan, cluster, listed, gpu_names)
            notes += _open(plan, log, done, nodes)
            with View(plan) as view:
                for name, status in done.items():
                    view.rows[name].status = status
                for note in notes:
                    view.note(note)
                todo = [cell for cell in plan.cells if cell.name not in done]
                _wait_for_earlier_runs(todo, view)
                stopped = Sweep(plan, command, grace, log, view, nodes).run(todo)
        return _stopped(plan, log, stopped) if stopped else _close(plan, log, nodes.gpu)


# --- before -------------------------------------------------------------------------------------------------------


def _devices(plan: Plan, address: str | None) -> tuple[str, ...]:
    """The devices of each node; none where the cluster lists its own."""
    if address is not None and plan.options.gpus is None:
        return ()
    listed = plan.options.gpus or devices.discover()
    devices.check(listed, plan.options.gpus_per_exp, plan.cells)
    return listed


def _gpu_names(listed: Sequence[str]) -> dict[str, str]:
    """The names of this machine's GPUs; one that torch does not find stops everything."""
    if CPU in listed:
        return {}
    try:
        return devices.named(listed, run_process.gpu_names(sys.executable, listed))
    except OSError as error:
        raise ConfigError(f"--gpus {','.join(listed)}: torch does not list them: {error}") from None


def _done(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """The cells that a resumed experiment skips, with their statuses; and notes for the user."""
    done: dict[str, str] = {}
    notes: list[str] = []
    if not plan.options.resume:
        return done, notes
    statuses, before = plan.statuses(), recorded_cells(plan.summary_path)
    for cell in plan.cells:
        status = statuses[cell.name]
        if status.partition(":")[0] not in plan.options.done_statuses:
            continue
        changed = results.changed_settings(cell, before.get(cell.name, cell))
        if changed:
            notes.append(f"{cell.name} is done with other settings ({'; '.join(changed[:3])}): it runs again")
        else:
            done[cell.name] = status
    return done, notes


def _skipping(done: Mapping[str, str]) -> list[str]:
    return [f"Skipping: {name} (status={status})" for name, status in done.items()]


def _open(plan: Plan, log: SummaryLog, done: Mapping[str, str], nodes: Nodes) -> list[str]:
    """Begin the summary log and the record, and keep older ones as .log.1 and .json.1; returns notes for the user."""
    starts_over, notes = not plan.options.resume and not plan.append_summary, []
    try:
        with log.locked():
            mine, known = {cell.name for cell in plan.cells}, {}
            with nullcontext() if not starts_over else suppress(ConfigError):  # a damaged record is replaced
                known = recorded_cells(plan.summary_path)
            if starts_over and any_held(cell for name, cell in known.items() if name not in mine):
                notes.append(f"another process is writing to {plan.summary_path}: lines are appended")
            elif starts_over:
                known = {}
                if log.text():
                    keep_older(log.path)
            before = log.text()
            opening = [f"=== {plan.title} {'Resumed' if before else 'Started'}: {results.date()} ===", *plan.header]
            log.write([*([""] if before else []), *opening, nodes.description(), *notes, *_skipping(done), ""])
            results.update_record(plan, [cell for cell in plan.cells if cell.name not in known], known)
    except OSError as error:
        raise ConfigError(f"{log.path}: cannot be written ({error.strerror}): the summary goes there") from None
    return notes


def _wait_for_earlier_runs(todo: Sequence[Cell], view: View) -> None:
    """The runs of a sweep that was killed take a moment to end."""
    since = time.monotonic()
    for cell in todo:
        lock = run_process.lock_path(cell.log_path)
        if is_locked(lock):
            view.note(f"waiting for the end of an earlier run of {cell.name}")
        while is_locked(lock):
            if time.monotonic() - since > OWNER_PATIENCE:
                raise ConfigError(f"an earlier run of {cell.name} has not ended: it holds {lock}; end it first")
            time.sleep(PAUSE)


# --- after --------------------------------------------------------------------------------------------------------


def _close(plan: Plan, log: SummaryLog, gpu: str | None = None) -> int:
    """Print the totals, and append them to the summary log if something has run; returns the exit status."""
    latest = latest_lines(plan.cells, plan.summary_fields, log.text())
    block = results.closing_block(plan, latest, gpu or "")
    if gpu is not None:
        log.append(block)
    print(harmless("\n".join(block[1:])))
    print(f"summary: {plan.summary_path}\nreport: {hint('report', plan.summary_path)}", flush=True)
    statuses = plan.statuses()
    return 0 if all(statuses[cell.name] == "success" for cell in plan.cells) else 1


def _stopped(plan: Plan, log: SummaryLog, how: str) -> int:
    """`how`: interrupted or preempted."""
    statuses = plan.statuses()
    totals = results.totals_line(statuses[cell.name] for cell in plan.cells)
    log.append(["", f"=== {plan.title} {how.capitalize()}: {results.date()} | {totals} ==="])
    print(f"{how}: {totals}; run {plan.how_to_resume} to resume", flush=True)
    return PREEMPTED if how == "preempted" else 130


# --- while it runs ------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    cell: Cell
    slot: Slot
    log_offset: int
    job: run_process.Job


class Setback(NamedTuple):
    """The last time that a run was preempted or lost."""

    host: str
    at: float
    times: int  # in a row without a further step
    step: int  # the furthest so far


@dataclass
class Sweep:
    """The cells that run, and what happens when they end."""

    plan: Plan
    command: Command
    grace: float
    log: SummaryLog
    view: View
    nodes: Nodes
    running: dict[Any, Running] = field(default_factory=dict)
    ending: list[Running] = field(default_factory=list)  # lost: they may still be alive
    setbacks: dict[str, Setback] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.interrupt = Interrupt(self.view.note)
        self.pauses_between_batches = self.plan.is_offline or len(self.plan.batches) > 1
        self.cooldown = self.plan.options.cooldown or 0.0

    def run(self, todo: Sequence[Cell]) -> str:
        """All of them, batch by batch; returns why it stopped before the end: interrupted, preempted or empty."""
        headings = dict(self.plan.headings)
        with self.interrupt:
            for number, batch in enumerate(in_batches(todo, max(map(len, self.plan.batches)))):
                if number and self.pauses_between_batches and not self._pause():
                    return self.interrupt.status
                if batch[0].group in headings:
                    self._write([headings.pop(batch[0].group)])
                before = wandb_sync.offline_runs()
                if not self._run_batch(batch):
                    return self.interrupt.status
                if self.plan.is_offline:
                    self._sync(batch, before)
        return ""

    def _run_batch(self, batch: Sequence[Cell]) -> bool:
        queue = deque(batch)
        while queue or self.running or self.ending:
            if self.interrupt.is_set:
                self._stop(queue)
                return False
            if self.nodes.cluster.is_gone():
                how = f"run {self.plan.how_to_resume} to resume"
                raise RunFailed(f"Ray was stopped from outside, and all runs with it; {how}")
            for note in self.nodes.look():
                self.view.note(note)
            self._settle()
            self._start(queue)
            self._collect(queue)
            self.view.refresh()
        return True

    def _start(self, queue: deque[Cell]) -> None:
        """Cells in their order, while there is room. One that was lost may have to wait a little."""
        most = self.plan.options.max_parallel
        while queue and (most is None or len(self.running) < most):
            cell = next((cell for cell in queue if self._may_start(cell)), None)
            slot = self.nodes.pool.take(cell.num_gpus, time.monotonic()) if cell is not None else None
            if cell is None or slot is None:
                return
            queue.remove(cell)
            self._start_one(cell, slot)

    def _start_one(self, cell: Cell, slot: Slot) -> None:
        appends = self.plan.options.resume or self.plan.append_summary or cell.name in self.setbacks
        with self._tolerated():
            cell.log_path.parent.mkdir(parents=True, exist_ok=True)
            cell.result_path.unlink(missing_ok=True)
        offset = cell.log_path.stat().st_size if appends and cell.log_path.exists() else 0
        names = tuple(device.name for device in slot)
        command = self.command(cell, names)
        appends = offset > 0 or self._began_log(cell)
        environment = child_environment(self.plan, names)
        if CPU in names:
            environment.setdefault("OMP_NUM_THREADS", str(self.nodes.threads()))
        job = run_process.job(command, cell.log_path, environment, appends, self.grace)
        self.running[self.nodes.cluster.start(job, slot)] = Running(cell, slot, offset, job)
        self.view.started(cell, ",".join(names), offset)

    def _began_log(self, cell: Cell) -> bool:
        """Whether the log has a head, which the run appends to."""
        if not cell.log_head:
            return False
        with self._tolerated() as problems:
            title = f"=== {self.plan.title}: {results.date()} ==="
            cell.log_path.write_text("".join(f"{line}\n" for line in (title, *cell.log_head)))
        return not problems

    def _collect(self, queue: deque[Cell]) -> None:
        """Take in the runs that have ended. Once interrupted, only those count that had come to their own end."""
        if not self.running:  # all wait for a pause to pass or for a node to join
            time.sleep(PAUSE)
        for handle in self.nodes.cluster.wait(list(self.running), PAUSE):
            one = self.running.pop(handle)
            ended = self.nodes.cluster.result(handle)
            if self.interrupt.is_set and (ended is None or ended.get("status") not in (0, 3, 4)):
                self._cut_short(one, ended)
            elif ended is None or ended.get("lost"):
                self._lost(one, "its watcher was lost" if ended is None else "its guard was killed", queue)
            else:
                self.nodes.pool.give_back(one.slot, time.monotonic() + self._pause_of_a_slot())
                if results.is_preempted(ended):
                    self._set_back(one, WAS_PREEMPTED, queue)
                else:
                    self._finish(one.cell, results.judge(one.cell, ended, self.nodes.label(one.slot), one.log_offset))

    def _pause_of_a_slot(self) -> float:
        return 0.0 if self.pauses_between_batches else self.cooldown

    def _cut_short(self, one: Running, ended: Mapping[str, Any] | None) -> None:
        """A run that has ended because the sweep stops. After SIGTERM its line says so."""
        if self.interrupt.is_preempted:
            seconds = ended["ended"] - ended["started"] if ended and "status" in ended else 0.0
            self._finish(one.cell, results.Result("preempted", "", seconds, self.nodes.label(one.slot)))
        else:
            self.view.ended(one.cell, "interrupted")

    def _finish(self, cell: Cell, result: results.Result) -> None:
        """Its line, its result file and its entry in the record."""
        line = result_line(self.plan.summary_fields, cell, result.values())
        lines = [line] + ([f"  error: {result.error}"] if result.error else [])
        if self._write([*lines, ""] if "name" in self.plan.summary_fields else lines):
            with self._tolerated():
                write_whole(cell.result_path, f"{line}\n".encode())
                results.write_record(self.plan, [cell])
        self.view.ended(cell, result.status, result.error)

    def _write(self, lines: Sequence[str]) -> bool:
        """Append to the summary log; returns whether it worked."""
        with self._tolerated() as problems:
            self.log.append(lines)
        return not problems

    @contextmanager
    def _tolerated(self) -> Iterator[list[OSError]]:
        """A full disk is reported and stops nothing."""
        problems: list[OSError] = []
        try:
            yield problems
        except OSError as error:
            problems.append(error)
            self.view.note(f"{error.filename or self.log.path} cannot be written: {error.strerror}")

    def _sync(self, batch: Iterable[Cell], before: set) -> None:
        """Upload the runs of this batch, not those that others add meanwhile."""
        ids = {path.read_text().strip() for cell in batch if (path := cell.run_folder / WANDB_ID).exists()}
        new = {run for run in wandb_sync.offline_runs() - before if run.name.rpartition("-")[2] in ids}
        lines = wandb_sync.sync(new)
        self._write([*lines, ""])
        self.view.note(lines[0])

    def _pause(self) -> bool:
        """Between two batches; False if interrupted."""
        until = time.monotonic() + self.cooldown
        while time.monotonic() < until and not self.interrupt.is_set:
            time.sleep(min(PAUSE, self.cooldown))
            self.view.refresh()
        return not self.interrupt.is_set

    def _stop(self, queue: deque[Cell]) -> None:
        """Let the runs end, and kill those that do not, or all after a second Ctrl-C."""
        cluster = self.nodes.cluster
        deadline = time.monotonic() + self.grace + 10.0
        requests = [Path(one.job["terminate"]) for one in self.running.values() if self.interrupt.is_preempted]
        with self._tolerated():
            for request in requests:
                request.touch()
        try:
            cluster.stop(list(self.running))
            while self.running and time.monotonic() < deadline and not cluster.is_gone():
                self._collect(queue)
                self.view.refresh()
        except KeyboardInterrupt:
            self.view.note("interrupted again: the runs are killed")
        finally:
            for request in requests:
                request.unlink(missing_ok=True)
        cluster.stop(list(self.running), at_once=True)
        for one in self.running.values():
            self._cut_short(one, None)

    def _lost(self, one: Running, how: str, queue: deque[Cell]) -> None:
        for note in self.nodes.update():
            self.view.note(note)
        if self.nodes.cluster.is_own:
            lifeline.kill_marked(one.job["mark"])
        self.ending.append(one)
        self._set_back(one, how, queue)

    def _settle(self) -> None:
        """Slots of lost runs are free once nothing of these is alive, as far as this machine can know."""
        for one in list(self.ending):
            at = self.setbacks[one.cell.name].at
            is_far = not self.nodes.cluster.is_own
            if is_locked(Path(one.job["lock"])) and not (is_far and time.monotonic() - at > OWNER_PATIENCE):
                continue
            self.ending.remove(one)
            pause = NODE_PATIENCE if is_far else self._pause_of_a_slot()
            self.nodes.pool.give_back(one.slot, at + pause)

    def _set_back(self, one: Running, how: str, queue: deque[Cell]) -> None:
        """A run that was preempted or lost waits for its turn again, unless it does not get any further."""
        cell, host = one.cell, self.nodes.by_id[one.slot[0].node].host
        before = self.setbacks.get(cell.name, Setback("", 0.0, 0, -1))
        step = results.last_step(cell, one.log_offset)
        times = before.times + 1 if step <= before.step else 1
        self.setbacks[cell.name] = Setback(host, time.monotonic(), times, max(step, before.step))
        if times >= MOST_SETBACKS:
            error = f"{how} {times} times in a row without a further step, the last time on {host}"
            self._finish(cell, results.Result("fail", error, gpu=self.nodes.label(one.slot)))
            return
        at = f" after step {step}" if step >= 0 else ""
        note = f"Again: {cell.name} ({how}{at} on {host}): it waits for its turn again"
        self._write([note])
        self.view.waiting(cell, "preempted" if how == WAS_PREEMPTED else "lost")
        self.view.note(note)
        queue.append(cell) if how == WAS_PREEMPTED else queue.appendleft(cell)

    def _may_start(self, cell: Cell) -> bool:
        """A run that was lost starts again once nothing of it is alive."""
        if any(cell.name == one.cell.name for one in self.ending):
            return False
        loss = self.setbacks.get(cell.name)
        if loss is None:
            return True
        folder = RunFolder(cell.run_folder)
        owner = folder.live_owner()
        if owner is None:
            return True
        if time.monotonic() - loss.at < OWNER_PATIENCE:
            return False
        if owner.endswith(f" on {loss.host}") and loss.host != socket.gethostname():
            folder.owner_path.unlink(missing_ok=True)  # its node is gone, and no other process can know
        return True


def child_environment(plan: Plan, slot: tuple[str, ...]) -> dict[str, str]:
    """The environment variables of a process on these devices."""
    environment = {**os.environ, **plan.train_environment}
    environment.pop(invocation_dir.VARIABLE, None)
    if environment.get("PYTHONPATH"):
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths)
    if plan.wandb_mode is not None:
        environment["WANDB_MODE"] = plan.wandb_mode
    environment["CUDA_VISIBLE_DEVICES"] = "" if CPU in slot else ",".join(slot)
    return environment
