"""Where a run writes and where it starts: at step 1, or where an earlier run with the same config stopped.

    decision = decide(config)                      # reads, changes nothing, needs no torch
    with claimed(config) as decision:              # the same, and this process owns the folder
        decision.folder.write_config(config)
        …restore(decision.checkpoint, parts), train from decision.first_step on

An earlier run in the folder resumes if it is the same run (`identity`) and its checkpoint holds all that training
needs. The budget may have grown, also after the run has used it up. An unfinished run without a checkpoint starts again
at step 1, and ends like one that was never killed. Every other run (finished, stopped early, saved without its
optimizer, another config) is left untouched, and a numbered sibling is used: `test-2` for `test`. A sibling that an
earlier call started resumes in the same way.

With `trainer.resume_mode=resume_path` a run starts after the named checkpoint, which may lack optimizer state; it
continues in that checkpoint's own folder if that run can be resumed, else in another one. With
`trainer.gradient_analysis_only` its first step is that of the checkpoint itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragen.config import derive
from ragen.config.schema import Config
from ragen.errors import ConfigError
from ragen.store import manifest as disk
from ragen.store.free_name import numbered
from ragen.store.run_folder import Metrics, RunFolder
from ragen.store.same_run import BUDGET, describe_difference, different_keys, stored_config

STOPPED = "early_stopped/"
NOT_HERE = "started elsewhere and has no checkpoint"
NO_OPTIMIZER = "was saved without its optimizer ({} holds the model only)"


@dataclass(frozen=True)
class Decision:
    """Where to write, what to load, and why, in one line for the user; the reason of a plain start is empty."""

    folder: RunFolder
    checkpoint: Path | None = None
    first_step: int = 1
    reason: str = ""

    @property
    def target(self) -> tuple[Path, Path | None, int]:
        return self.folder.path, self.checkpoint, self.first_step

    @property
    def resumes(self) -> bool:
        """Whether the folder holds the steps before the first one."""
        return self.checkpoint is not None and self.checkpoint.parent == self.folder.path


@contextmanager
def claimed(config: Config, choose: Callable[[Config], Decision] | None = None) -> Iterator[Decision]:
    """Own the folder that `choose` (or `decide`) picks, and decide again as its owner: a run may just have ended."""
    choose = choose or decide
    key = "sft.output_dir" if config.rl_or_sft == "sft" else "trainer.default_local_dir"
    while True:
        decision = choose(config)
        with decision.folder.owned(key):
            if choose(config).target == decision.target:
                # The folder becomes what it was when the checkpoint was written.
                damage = decision.folder.rewind(decision.first_step - 1 if decision.resumes else -1)
                reasons = [decision.reason] * bool(decision.reason) + damage
                yield replace(decision, reason="; ".join(reasons))
                return


def decide(config: Config, folder: str | Path | None = None) -> Decision:
    """The decision for a config; `folder` replaces `trainer.default_local_dir`."""
    base = Path(config.trainer.default_local_dir if folder is None else folder)
    origin = _named_checkpoint(config)
    untouched = ""
    for candidate in map(RunFolder, numbered(base)):
        if not _holds_run(candidate):
            return _start(config, candidate, origin, untouched)
        if config.trainer.resume_mode == "disable":
            found: Decision | str = "holds a run, and trainer.resume_mode=disable"
        else:
            found = _resume(config, candidate, origin)
        if isinstance(found, Decision):
            return found
        untouched = untouched or f"{candidate} {found}: it is left untouched, and this run writes to another directory"
    raise AssertionError("there is always another number")


def holds_finished(config: Config, folder: RunFolder) -> bool:
    """Whether a folder holds this very run, finished, whatever its number of steps."""
    is_finished = (folder.read_finished() or {}).get("status") == "finished"
    return is_finished and not different_keys(config, stored_config(folder))


def stored_steps(folder: RunFolder) -> int | None:
    """The budget of the run in a folder; None where none can be read."""
    steps = stored_config(folder).get(BUDGET)
    return steps if isinstance(steps, int) else None


def _holds_run(folder: RunFolder) -> bool:
    """Whether there is anything to lose. A config alone is a run that failed before its first step."""
    recorded = folder.metrics_path.exists() and folder.metrics_path.stat().st_size > 0  # a directory has a size too
    return recorded or folder.finished_path.exists() or bool(disk.checkpoints(folder.path))


# --- starting -----------------------------------------------------------------------------------------------------


def _start(config: Config, folder: RunFolder, origin: Path | None, why: str = "") -> Decision:
    """A run from its first step, or from the step after the checkpoint that the config names."""
    if origin is None:
        _check_analysis(config, 1)
        return Decision(folder, reason=why)
    manifest = disk.check(origin)
    first_step = manifest.step + 1
    reason = f"{folder} starts after step {manifest.step} of {origin}"
    if config.trainer.gradient_analysis_only:
        first_step = max(1, manifest.step)
        reason = f"{folder} analyses step {manifest.step} of {origin}"
    elif not manifest.is_resumable:
        reason += ", which holds no optimizer state: the optimizer starts fresh"
    _check_analysis(config, first_step)
    return Decision(folder, origin, first_step, f"{reason}; {why}" if why else reason)


def _check_analysis(config: Config, first_step: int) -> None:
    """A run that only analyses must have an analysis step."""
    trainer, last_step = config.trainer, config.trainer.total_training_steps
    if not trainer.gradient_analysis_only:
        return
    if first_step > last_step:
        raise ConfigError(
            f"{BUDGET}={last_step}: the analysis would start at step {first_step}, that of its checkpoint; set "
            f"{BUDGET}={first_step}"
        )
    if not any(derive.is_analysis_step(config, step) for step in range(first_step, last_step + 1)):
        every = trainer.gradient_analysis_every
        raise ConfigError(
            f"trainer.gradient_analysis_every={every}: an analysis is due at steps 1, {1 + every}, {1 + 2 * every}, …, "
            f"and none of them is within {first_step} … {last_step}; set trainer.gradient_analysis_every=1"
        )


def _named_checkpoint(config: Config) -> Path | None:
    """The checkpoint that `trainer.resume_from_path` names."""
    if config.trainer.resume_mode != "resume_path":
        return None
    path = Path(config.trainer.resume_from_path or "")
    whole = [found.name for found in disk.checkpoints(path.parent) if disk.is_whole(found)]
    if whole and not path.exists():
        raise disk.NotACheckpoint(f"trainer.resume_from_path={path}: not found. {path.parent} has {', '.join(whole)}")
    try:
        manifest = disk.check(path)
    except disk.CheckpointError as error:
        raise type(error)(f"trainer.resume_from_path={path}: {error}") from None
    if "actor" not in manifest.contents:
        raise ConfigError(f"trainer.resume_from_path={path}: this checkpoint no longer holds an actor")
    return path


# --- resuming -----------------------------------------------------------------------------------------------------


def _resume(config: Config, folder: RunFolder, origin: Path | None) -> Decision | str:
    """How the run in a folder resumes, or why it does not."""
    stored = stored_config(folder)
    if difference := describe_difference(config, stored):
        return difference
    checkpoint, trouble = disk.find_latest(folder.path)
    before, now = stored[BUDGET], config.trainer.total_training_steps
    if ending := _ending(folder, before, has_grown=now > before, has_checkpoint=checkpoint is not None):
        return ending
    is_same_origin = _stored_origin(stored) == _resolved(origin)
    if checkpoint is None:
        return _start_again(config, folder, origin, trouble) if is_same_origin else NOT_HERE
    if not disk.is_resumable(checkpoint):
        return NO_OPTIMIZER.format(checkpoint.name)
    if origin is not None and not is_same_origin and _resolved(checkpoint) != _resolved(origin):
        return f"is at {checkpoint.name}"
    step = disk.step_of(checkpoint)
    notes = [f"with {now} steps in all, not {before}"] * (now > before) + [trouble] * bool(trouble)
    reason = f"{folder} resumes after step {step}" + (f" ({'; '.join(notes)})" if notes else "")
    return Decision(folder, checkpoint, step + 1, reason)


def _start_again(config: Config, folder: RunFolder, origin: Path | None, trouble: str) -> Decision | str:
    for path in disk.checkpoints(folder.path):
        disk.check(path)  # raises, with what to do, for a damaged one
        return NO_OPTIMIZER.format(path.name)
    if trouble:
        raise disk.Damaged(
            f"{folder} has lost its checkpoints: {trouble}. Copy them back, or start in another directory: "
            f"trainer.resume_mode=disable"
        )
    return _start(config, folder, origin, f"{folder} holds this run without a checkpoint: it starts again")


def _ending(folder: RunFolder, budget: int, has_grown: bool, has_checkpoint: bool) -> str:
    """How the run in a folder ended; empty if it has not, or if it has a new budget."""
    record, metrics = folder.read_finished(), folder.read_metrics()
    status = None if record is None else record["status"]
    rule = (record or {}).get("rule") or _rule_in(metrics)
    if rule or status == "early_stopped":
        return f"was stopped early ({rule or 'no rule is recorded'})"
    if status == "finished" and has_grown and has_checkpoint:
        return ""
    # With a checkpoint and no record, a run was killed after its last step: it still has its report to write.
    is_complete = (metrics.last_step() or 0) >= budget and not has_checkpoint
    return "is finished" if record is not None or is_complete else ""


def _rule_in(metrics: Metrics) -> str | None:
    names = [name for name in metrics.names() if name.startswith(STOPPED)]
    held = [name for name in names if any(value == 1 for _, value in metrics.series(name))]
    return held[0].removeprefix(STOPPED) if held else None


def _stored_origin(stored: Mapping[str, Any]) -> Path | None:
    """The checkpoint that a stored run was started from."""
    if stored.get("trainer.resume_mode") != "resume_path":
        return None
    return _resolved(Path(stored.get("trainer.resume_from_path") or ""))


def _resolved(path: Path | None) -> Path | None:
    return None if path is None else path.resolve()
