"""One way to run, for RL, fine-tuning and probes alike: claim a folder, resume, log, stop, save, report.

    with joined(config) as workers:
        with session(config, workers) as run:
            job = run.load(lambda: Trainer(config, sources, run))     # restores a checkpoint where there is one
            return run.finish(run.fit(job))                           # -> Run

A job brings its steps and what a checkpoint of it holds; everything else is here. With several workers each has a
session: they agree on the folder and on when to stop, and only the first writes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ragen.checkpoint.parts import Parts
from ragen.checkpoint.restore import restore
from ragen.checkpoint.save import CheckpointStore
from ragen.config import devices
from ragen.config.schema import Config
from ragen.distributed.workers import Workers
from ragen.env.failure import TooManyFailures
from ragen.run import memory
from ragen.run.clock import Clock, Totals
from ragen.run.interrupt import Interrupt, Preempted
from ragen.run.run_logger import NullLogger, run_logger
from ragen.run.step_line import step_line
from ragen.store import manifest
from ragen.store.fsync import append_lines, write_whole
from ragen.store.json_lines import decode, encode
from ragen.store.resume import Decision, claimed, decide


@dataclass(frozen=True)
class Run:
    """How a run ended: `finished`, `early_stopped` by a rule, `interrupted`, `preempted` by SIGTERM,
    or `environment_failed`: too often."""

    folder: Path
    report: Path | None
    num_steps: int
    status: str
    rule: str | None = None


@dataclass(frozen=True)
class Ending:
    """The last step of a run, and why it was the last."""

    status: str
    step: int
    rule: str | None = None
    explanation: str = ""


class Job(Protocol):
    """What one kind of run brings."""

    def fit(self) -> Ending:
        """All steps; usually what comes before the first one, then `Session.steps`."""

    def parts(self) -> Parts:
        """What a checkpoint holds."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adopt the state of a checkpoint whose weights are loaded; empty if it has none."""


class Steps(Protocol):
    """A job whose steps run one after the other, each logged before it is saved."""

    num_steps: int

    def state(self) -> Mapping[str, Any]:
        """Of a checkpoint, what is neither weights nor optimizer."""

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        """Everything that changes weights; returns metrics. Calls `Session.commit` before the first change."""

    def validate(self, step: int, clock: Clock) -> dict[str, float]:
        """What follows the update; returns further metrics. What takes time is within `Session.droppable`."""

    def ending(self, step: int) -> Ending | None:
        """Whether the run ends here, before its last step."""

    def save(self, step: int, now: bool) -> None:
        """Save what is due; with `now` the run ends after this step."""


AnyJob = TypeVar("AnyJob", bound=Job)
STOPS = (Preempted, TooManyFailures)  # what a step or a validation is given up for
ENVIRONMENT_FAILED = "environment_failed"
UNFINISHED = "unfinished"  # in the state of a checkpoint: the metrics of a step that is not validated yet


@contextmanager
def joined(config: Config) -> Iterator[Workers]:
    """This process among the workers of a run, with the devices that the config names."""
    with devices.visible(config.system.CUDA_VISIBLE_DEVICES):
        workers = Workers.join()
        with workers.together():
            yield workers


@contextmanager
def session(
    config: Config,
    workers: Workers,
    choose: Callable[[Config], Decision] = decide,
    checkpoints: Callable[..., CheckpointStore] | None = None,
    text_log: str = "",
) -> Iterator["Session"]:
    """A session in the folder that `choose` decides on, owned until the end.

    `checkpoints(folder, note=…)` makes its store; the default follows the config. `text_log` names a file in the folder
    that gets a line for each step.
    """
    with ExitStack() as stack:
        decision = workers.agree(stack.enter_context(claimed(config, choose)) if workers.is_first else None)
        folder = decision.folder.path
        stack.enter_context(memory.explained(config, workers.device, folder))
        log = stack.enter_context(run_logger(config, decision)) if workers.is_first else NullLogger()
        store = checkpoints(folder, note=log.note) if checkpoints else CheckpointStore.of(config, folder, log.note)
        text_log_path = folder / text_log if text_log and workers.is_first else None
        yield Session(config, workers, decision, log, store, text_log_path)


class Session:
    """A run in progress."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        decision: Decision,
        log: NullLogger,
        checkpoints: CheckpointStore,
        text_log: Path | None = None,
    ):
        self.config, self.workers, self.log, self.checkpoints = config, workers, log, checkpoints
        self.decision, self.folder, self.first_step = decision, decision.folder, decision.first_step
        self.totals = Totals()
        self.saved: Path | None = None  # the checkpoint to resume from that this process wrote last
        self._interrupt, self._text_log = Interrupt(log.note, config.trainer.preemption_seconds), text_log
        self._unfinished: Mapping[str, Any] | None = None  # the restored step that still has to be validated
        self._is_committed = False
        self._state_to_save: Mapping[str, Any] | None = None  # where it is not the job's current one
        if text_log is not None:  # the lines of earlier steps
            rows = self.folder.read_metrics().rows
            lines = [step_line(row["step"], {key: row[key] for key in row if key != "step"}) for row in rows]
            write_whole(text_log, "".join(f"{line}\n" for line in lines).encode())

    def load(self, make: Callable[[], AnyJob]) -> AnyJob:
        """A job, at the step of its checkpoint if it has one."""
        with self.log.phase("loading"):
            job = make()
            if self.decision.checkpoint is not None:
                state = restore(self.decision.checkpoint, job.parts())
                self._unfinished = state.pop(UNFINISHED, None)
                job.restore(state)
        if self.decision.reason:
            self.log.note(self.decision.reason)
        return job

    def fit(self, job: Job) -> Ending:
        """Run a job. Ctrl-C ends it after the step under way, SIGTERM as soon as nothing is lost."""
        with self._interrupt:
            try:
                return job.fit()
            except STOPS as stop:  # before the first step
                return _stopped(stop, self.first_step - 1)

    def steps(self, job: Steps) -> Ending:
        """The steps of a job from the first one on."""
        if self._unfinished is not None:
            clock = Clock(self._unfinished["seconds"])
            metrics = {name: decode(value) for name, value in self._unfinished["metrics"].items()}
            if ending := self._conclude(job, self.first_step - 1, metrics, clock):
                return ending
        for step in range(self.first_step, job.num_steps + 1):
            before, clock = deepcopy(job.state()), Clock()
            try:
                with self.droppable(), clock("step"):
                    metrics = job.step(step, clock)
            except STOPS as stop:
                self._drop(job, step, before)
                return _stopped(stop, step - 1)
            if ending := self._conclude(job, step, metrics, clock):
                return ending
        return Ending("finished", job.num_steps)

    def _conclude(self, job: Steps, step: int, metrics: dict[str, float], clock: Clock) -> Ending | None:
        """Validate, log and save a step whose updates are done; how the run ends, if it ends here."""
        seconds = dict(clock.seconds)
        try:
            with clock("step"):
                metrics = metrics | job.validate(step, clock)
        except STOPS as stop:  # save the weights of the step, and what is left to do in it
            stored = {name: encode(name, value) for name, value in metrics.items()}
            self._state_to_save = {**job.state(), UNFINISHED: {"metrics": stored, "seconds": seconds}}
            job.save(step, now=True)
            return _stopped(stop, step)
        self.log_step(step, metrics, clock)
        stopped, ending = self.stop_status(), job.ending(step)
        job.save(step, now=bool(stopped) or ending is not None)
        if ending is not None or not stopped or step >= job.num_steps:
            return ending
        return Ending(stopped, step)

    def _drop(self, job: Steps, step: int, state: Mapping[str, Any]) -> None:
        """Save weights and state of the step before, unless this one has changed the weights already."""
        self._interrupt.commit()
        if self._is_committed:  # an analysis failed between two updates: these weights belong to no step
            return
        is_saved = self.saved is not None and manifest.step_of(self.saved) >= step - 1
        if step > self.first_step and not self.workers.agree(is_saved):  # only the first worker knows
            self._state_to_save = state
            job.save(step - 1, now=True)

    def stop_status(self) -> str:
        """`interrupted` or `preempted` if any worker was asked to stop, else empty."""
        asked = self.workers.gather([self._interrupt.status])
        return next((status for status in ("preempted", "interrupted") if status in asked), "")

    def is_preempted(self) -> bool:
        return self.stop_status() == "preempted"

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Work that SIGTERM ends with `Preempted`: at once, or with several workers between two parts of it."""
        self._is_committed = False
        if self.is_preempted():
            raise Preempted
        if self.workers.size > 1:  # the others would wait for this one
            yield
        else:
            with self._interrupt.droppable():
                yield

    def commit(self) -> None:
        """The weights change from here on: the step is finished, whatever comes. Later calls change nothing."""
        self._interrupt.commit()
        if not self._is_committed and self.is_preempted():
            raise Preempted
        self._is_committed = True

    def log_step(self, step: int, metrics: Mapping[str, float], clock: Clock) -> None:
        metrics = dict(metrics) | clock.metrics() | self.totals.add(clock)
        self.log.step(step, metrics)
        if self._text_log is not None:
            append_lines(self._text_log, f"{step_line(step, metrics)}\n".encode())

    def save(
        self,
        step: int,
        parts: Parts,
        contents: Sequence[str] | None = None,
        keep: bool = False,
        best: manifest.Best | None = None,
    ) -> None:
        """Write a checkpoint; no worker continues before it is written. With `best` it stays while it is."""
        if self.workers.is_first:
            self.folder.check_present()
            if best is not None:  # first: a run killed in between validates and saves this step again
                manifest.write_best(self.folder.path, best)
            if self._state_to_save is not None:
                parts = replace(parts, state=self._state_to_save)
            with self.log.phase("checkpoint"):
                saved = self.checkpoints.save(step, parts, contents, keep)
            if contents is None:
                self.saved = saved
        self.workers.agree(None)

    def finish(self, ending: Ending) -> Run:
        """Record how the run ended, and write its report."""
        report = self.log.ended(ending.status, ending.step, ending.rule, ending.explanation)
        if ending.status in ("interrupted", "preempted"):
            self.log.note(f"{ending.status} after step {ending.step}; {self._how_to_resume()}")
        if ending.status == ENVIRONMENT_FAILED:
            # One line: an experiment shows the end of a run's output.
            self.log.error(
                f"stopped after step {ending.step}: {ending.explanation}; details in {self.folder.failures_path}; fix "
                f"the environment; {self._how_to_resume()}"
            )
        return Run(self.folder.path, report, ending.step, ending.status, ending.rule)

    def _how_to_resume(self) -> str:
        saved = self.saved or (self.decision.checkpoint if self.decision.resumes else None)
        if saved is None:
            every = self.config.trainer.save_freq
            return f"nothing was saved (trainer.save_freq={every}): the same command starts again"
        if not manifest.is_resumable(saved):
            return f"saved in {saved} without the optimizer: the same command starts again in another directory"
        return f"saved in {saved}: run the same command to resume"


def _stopped(stop: BaseException, step: int) -> Ending:
    """How a run ends whose work was given up, with `step` as its last."""
    if isinstance(stop, TooManyFailures):
        return Ending(ENVIRONMENT_FAILED, step, explanation=str(stop))
    return Ending("preempted", step)
