"""Where a run writes and where it begins: at the start, where an earlier run of the same config was, or beside one.

    decision = decide(config)                      # reads, changes nothing, needs no torch
    with claimed(config) as decision:              # the same, and the folder is ours and ready to be written
        decision.folder.write_config(config)
        …restore(decision.checkpoint, parts), train from decision.first_step on

An earlier run in the folder goes on if its stored config is equal, devices and the whereabouts of a model that its own
fine-tuning wrote aside, and its checkpoint holds all that training needs. The budget may have grown, also after the run
has used it up. Without any checkpoint an unfinished run begins again at step 0, and ends like one that was never
killed. Every other run, whether finished, stopped early, saved without its optimizer or of another config, is left as
it is, and a numbered sibling is taken: `test-2` for `test`. A sibling that an earlier call began goes on in the same
way.

With `trainer.resume_mode=resume_path` a run begins after the named checkpoint, which may be one without its optimizer;
it goes on in that checkpoint's own folder if that run could, and else in a folder of its own.

With `trainer.gradient_analysis_only` it looks at the named checkpoint: its first step is that of the checkpoint itself.
"""

import filecmp
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.errors import ConfigError, shown
from ragen.store import manifest as disk
from ragen.store.run_folder import Metrics, RunFolder

BUDGET = "trainer.total_training_steps"
STOPPED = "early_stopped/"
NOT_HERE = "began elsewhere and has no checkpoint"
NO_OPTIMIZER = "was saved without its optimizer ({} holds the model only)"
# Where and on what a run happens, and what was asked about resuming: not what it computes.
ASIDE = (
    "system.",
    "ray_kwargs.",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.total_epochs",
    BUDGET,
)


@dataclass(frozen=True)
class Decision:
    """Where to write, what to load, and why, in one line for the user; the reason of a plain start is empty."""

    folder: RunFolder
    checkpoint: Path | None = None
    first_step: int = 1
    reason: str = ""

    @property
    def resumes(self) -> bool:
        """Whether the folder holds the steps before the first one."""
        return self.checkpoint is not None and self.checkpoint.parent == self.folder.path

    def prepare(self) -> None:
        """Make the folder as it was when the checkpoint was written. To be called by the folder's owner."""
        self.folder.rewind(self.first_step - 1 if self.resumes else -1)


@contextmanager
def claimed(config: Config, choose: Callable[[Config], Decision] | None = None) -> Iterator[Decision]:
    """Own the folder that `choose` (or `decide`) decides for, looked at again under ownership: a run may just have
    ended there."""
    choose = choose or decide
    key = "sft.output_dir" if config.rl_or_sft == "sft" else "trainer.default_local_dir"
    while True:
        decision = choose(config)
        with decision.folder.owned(key):
            if _place(choose(config)) == _place(decision):
                decision.prepare()
                yield decision
                return


def _place(decision: Decision) -> tuple:
    return decision.folder.path, decision.checkpoint, decision.first_step


def decide(config: Config, folder: str | Path | None = None, aside: tuple[str, ...] = ()) -> Decision:
    """The decision for a config; `folder` stands for `trainer.default_local_dir`.

    `aside` are beginnings of keys that do not matter to this kind of run, besides those that never do.
    """
    base = Path(config.trainer.default_local_dir if folder is None else folder)
    origin = _named_checkpoint(config)
    left_alone = ""
    for candidate in _siblings(base):
        if not _holds_run(candidate):
            return _begin(config, candidate, origin, left_alone)
        if config.trainer.resume_mode == "disable":
            found: Decision | str = "holds a run, and trainer.resume_mode=disable"
        else:
            found = _go_on(config, candidate, origin, aside)
        if isinstance(found, Decision):
            return found
        left_alone = left_alone or f"{candidate} {found}: it stays as it is, and this run has a folder of its own"
    raise AssertionError("there is always another number")


def holds_finished(config: Config, folder: RunFolder, aside: tuple[str, ...] = ()) -> bool:
    """Whether a folder holds this very run, brought to its end; how many steps that took is not asked."""
    is_finished = (folder.read_finished() or {}).get("status") == "finished"
    return is_finished and not _different_keys(leaves(config), _stored_config(folder), aside)


def stored_steps(folder: RunFolder) -> int | None:
    """The budget of the run in a folder; None where there is none that can be read."""
    steps = _stored_config(folder).get(BUDGET)
    return steps if isinstance(steps, int) else None


def _begin(config: Config, folder: RunFolder, origin: Path | None, why: str = "") -> Decision:
    """A run from its first step: that after the checkpoint it was told to begin from, if any."""
    if origin is None:
        _check_analysis(config, 1)
        return Decision(folder, reason=why)
    manifest = disk.check(origin)
    first_step = manifest.step + 1
    told = f"{folder} begins after step {manifest.step} of {origin}"
    if config.trainer.gradient_analysis_only:
        first_step = max(1, manifest.step)
        told = f"{folder} looks at step {manifest.step} of {origin}"
    elif not manifest.is_resumable:
        told += ", which holds no optimizer state: the optimizer begins anew"
    _check_analysis(config, first_step)
    return Decision(folder, origin, first_step, f"{told}; {why}" if why else told)


def _check_analysis(config: Config, first_step: int) -> None:
    """A run that does nothing but analyse has at least one step in which it does."""
    trainer, last_step = config.trainer, config.trainer.total_training_steps
    if not trainer.gradient_analysis_only:
        return
    if first_step > last_step:
        raise ConfigError(
            f"{BUDGET}={last_step}: the analysis would begin at step {first_step}, that of its checkpoint; set "
            f"{BUDGET}={first_step}"
        )
    if not any(derive.is_analysis_step(config, step) for step in range(first_step, last_step + 1)):
        every = trainer.gradient_analysis_every
        raise ConfigError(
            f"trainer.gradient_analysis_every={every}: an analysis is due at steps 1, {1 + every}, {1 + 2 * every}, …, "
            f"and none of them is within {first_step} … {last_step}; set trainer.gradient_analysis_every=1"
        )


def _named_checkpoint(config: Config) -> Path | None:
    """The checkpoint that the config names to begin from."""
    if config.trainer.resume_mode != "resume_path":
        return None
    path = Path(config.trainer.resume_from_path or "")
    there = [found.name for found in disk.checkpoints(path.parent) if disk.is_whole(found)]
    if there and not path.exists():
        raise disk.NotACheckpoint(
            f"trainer.resume_from_path={path}: {path} is no folder. In {path.parent} {', '.join(there)} "
            f"{'is' if len(there) == 1 else 'are'} whole: name one of these"
        )
    try:
        manifest = disk.check(path)
    except disk.CheckpointError as error:
        raise type(error)(f"trainer.resume_from_path={path}: {error}") from None
    if "actor" not in manifest.contents:
        raise ConfigError(f"trainer.resume_from_path={path}: this checkpoint no longer holds an actor")
    return path


def _siblings(base: Path) -> Iterator[RunFolder]:
    yield RunFolder(base)
    number = 2
    while True:
        yield RunFolder(base.with_name(f"{base.name}-{number}"))
        number += 1


def _holds_run(folder: RunFolder) -> bool:
    """Whether there is anything to lose. A config alone is a run that failed before it began."""
    recorded = folder.metrics_path.exists() and folder.metrics_path.stat().st_size > 0
    return recorded or folder.finished_path.exists() or bool(disk.checkpoints(folder.path))


# --- going on -----------------------------------------------------------------------------------------------------


def _go_on(config: Config, folder: RunFolder, origin: Path | None, aside: tuple[str, ...]) -> Decision | str:
    """How the run in a folder goes on, or why it is left alone."""
    stored = _stored_config(folder)
    if difference := _difference(config, stored, aside):
        return difference
    checkpoint, trouble = disk.find_latest(folder.path)
    before, now = stored[BUDGET], config.trainer.total_training_steps
    if ending := _ending(folder, before, has_grown=now > before, has_checkpoint=checkpoint is not None):
        return ending
    is_same_origin = _stored_origin(stored) == _resolved(origin)
    if checkpoint is None:
        return _begin_again(config, folder, origin, trouble) if is_same_origin else NOT_HERE
    if not disk.is_resumable(checkpoint):
        return NO_OPTIMIZER.format(checkpoint.name)
    if origin is not None and not is_same_origin and _resolved(checkpoint) != _resolved(origin):
        return f"is at {checkpoint.name}"
    step = disk.step_of(checkpoint)
    notes = [f"with {now} steps in all, not {before}"] * (now > before) + [trouble] * bool(trouble)
    reason = f"{folder} goes on after step {step}" + (f" ({'; '.join(notes)})" if notes else "")
    return Decision(folder, checkpoint, step + 1, reason)


def _begin_again(config: Config, folder: RunFolder, origin: Path | None, trouble: str) -> Decision | str:
    for path in disk.checkpoints(folder.path):
        disk.check(path)  # raises, with what to do, for one that is damaged
        return NO_OPTIMIZER.format(path.name)
    if trouble:
        raise disk.Damaged(
            f"{folder} has lost its checkpoints: {trouble}. Copy them back, or start anew beside it: "
            f"trainer.resume_mode=disable"
        )
    return _begin(config, folder, origin, f"{folder} holds this run without a checkpoint: it begins again")


def _ending(folder: RunFolder, budget: int, has_grown: bool, has_checkpoint: bool) -> str:
    """In words, how the run in a folder has ended; nothing if it has not, or if it has a new budget to go on with."""
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


# --- equal configs ------------------------------------------------------------------------------------------------


def _stored_config(folder: RunFolder) -> dict[str, Any]:
    """Flat; empty where there is none that can be read."""
    try:
        return leaves(folder.read_config())
    except (ValueError, yaml.YAMLError):
        return {}


def _difference(config: Config, stored: Mapping[str, Any], aside: tuple[str, ...]) -> str:
    """In words, how the stored config differs in what it computes; nothing if it does not."""
    if not isinstance(stored.get(BUDGET), int):
        return "holds a run without a readable config"
    here = leaves(config)
    different = _different_keys(here, stored, aside)
    if different:
        first, more = different[0], len(different) - 1
        there, now = (shown(tree[first]) if first in tree else "nothing" for tree in (stored, here))
        return f"holds a run with {first}={there}, not {now}" + (f", and {more} more differences" if more else "")
    if stored[BUDGET] > here[BUDGET]:
        return f"holds a run with the longer budget {BUDGET}={stored[BUDGET]}, not {here[BUDGET]}"
    return ""


def _different_keys(here: Mapping[str, Any], stored: Mapping[str, Any], aside: tuple[str, ...]) -> list[str]:
    missing = object()
    keys = [key for key in {**here, **stored} if not key.startswith((*ASIDE, *aside))]
    different = [key for key in keys if stored.get(key, missing) != here.get(key, missing)]
    output = str(here["sft.output_dir"])
    return [
        key
        for key in different
        if key not in derive.MODELS or not _is_same_model(str(stored.get(key)), str(here.get(key)), output)
    ]


def _is_same_model(one: str, other: str, output_dir: str) -> bool:
    """Whether two paths name one model that the run's own fine-tuning has written: below `sft.output_dir`.

    A path may have been stored as seen from the current folder, and the whole may have been moved or copied since.
    """
    below = re.compile(rf"(?:.*/)?({re.escape(str(PurePath(output_dir)))}(?:-\d+)?/.+)")
    found = [below.fullmatch(path) for path in (one, other)]
    if not all(found) or found[0][1] != found[1][1]:
        return False
    return not (Path(one).exists() and Path(other).exists()) or _are_equal_models(Path(one), Path(other))


def _are_equal_models(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights; files of one age and size are not read."""
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name) for name in names[0])


def _stored_origin(stored: Mapping[str, Any]) -> Path | None:
    """The checkpoint that a stored run was told to begin from."""
    if stored.get("trainer.resume_mode") != "resume_path":
        return None
    return _resolved(Path(stored["trainer.resume_from_path"]))


def _resolved(path: Path | None) -> Path | None:
    return None if path is None else path.resolve()
