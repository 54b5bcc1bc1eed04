"""The checkpoint that an experiment begins from: named by the user, or the newest of the runs that hold its step.

    found = find(spec, variables)            # None for an experiment that begins from none
    found.value                              # Value("…/global_step_101", parts: step 101, total 101)
    found.missing                            # why it cannot be used, and which ones exist; empty if it can

The options are `resume-from-path`, `checkpoint-root` and `checkpoint-step`; the path overrides root and step.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ragen.errors import ConfigError
from ragen.experiment.spec import Checkpoint, Spec
from ragen.experiment.template import Value, Variables
from ragen.store.manifest import checkpoint_name, checkpoints, is_whole, step_of

NAME = re.compile(r"global_step_(\d+)")
MOST_LISTED = 20


class Found(NamedTuple):
    path: Path
    missing: str = ""

    @property
    def value(self) -> Value:
        step = step_of(self.path)
        return Value(str(self.path), {"step": str(step), "total": str(max(step, 1))})

    def notes(self, steps: int | None) -> list[str]:
        unused = [] if steps is None else [f"--steps {steps} has no effect: nothing is trained"]
        return unused + ([] if self.missing else [f"checkpoint: {self.path}"])


def find(spec: Spec, variables: Variables) -> Found | None:
    """The checkpoint of the experiment's options. Raises `ConfigError` for a path or a step that cannot be one."""
    if spec.checkpoint is None:
        return None
    named, root, step = (str(variables[name]) for name in ("resume_from_path", "checkpoint_root", "checkpoint_step"))
    if named:
        if not NAME.fullmatch(Path(named).name):
            raise ConfigError(f"--resume-from-path {named}: must name a directory global_step_<N>")
        return _given(Path(named))
    if int(step) < 0:
        raise ConfigError(f"--checkpoint-step {step}: must be 0 or more")
    name = checkpoint_name(int(step))
    return _given(Path(root) / name) if root else _newest(spec.checkpoint, variables, name)


def _given(path: Path) -> Found:
    if path.is_dir():
        return Found(path)
    return Found(path, f"{path} is not there; {_existing(path.parent, checkpoints(path.parent))}")


def _newest(rule: Checkpoint, variables: Variables, name: str) -> Found:
    """Of the runs whose checkpoint of that step is whole, the one that was saved last."""
    runs, like, usual, made_by = (variables.fill(part) for part in (rule.runs, rule.like, rule.usual, rule.made_by))
    siblings = [run for run in Path(runs).glob(like) if run.is_dir()]
    holding = [run / name for run in siblings if is_whole(run / name)]
    if holding:
        return Found(max(holding, key=lambda path: (path.stat().st_mtime_ns, path)))
    why = f"no run {runs}/{like} holds a whole {name}"
    others = [path for run in siblings for path in checkpoints(run)]
    return Found(Path(runs) / usual / name, f"{why}; {_existing(Path(runs), others)}. A run that saves them: {made_by}")


def _existing(folder: Path, expected: Iterable[Path]) -> str:
    """The checkpoints that exist, one a line: those of the runs that were meant, or else those of other runs."""
    if paths := _ordered(expected):
        return f"there are{_listed(paths)}"
    if paths := _ordered(path for run in folder.glob("*") if run.is_dir() for path in checkpoints(run)):
        how = "choose one with --resume-from-path, and its model with --model"
        return f"other runs in {folder} hold{_listed(paths)}\n({how})"
    return f"{folder} holds no checkpoint"


def _ordered(paths: Iterable[Path]) -> list[Path]:
    named = (path for path in paths if NAME.fullmatch(path.name))
    return sorted(named, key=lambda path: (path.parent, step_of(path)))


def _listed(paths: Sequence[Path]) -> str:
    more = f"\n  and {len(paths) - MOST_LISTED} more" if len(paths) > MOST_LISTED else ""
    return "".join(f"\n  {path}" for path in paths[:MOST_LISTED]) + more
