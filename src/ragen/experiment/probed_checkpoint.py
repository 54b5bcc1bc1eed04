"""The checkpoint that an experiment begins from: named by the user, or the newest of the runs that hold its step.

    found = find(spec, variables)            # None for an experiment that begins from none
    found.value                              # Value("…/global_step_101", parts: step 101, total 101)
    found.missing                            # why it cannot be used, and which ones exist; empty if it can

The options are `resume-from-path`, `checkpoint-root` and `checkpoint-step`; the path overrides root and step.
"""

import re
from collections.abc import Iterable
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
    return Found(path, f"{path} is not there; {_listed(path.parent, checkpoints(path.parent))}")


def _newest(rule: Checkpoint, variables: Variables, name: str) -> Found:
    """Of the runs whose checkpoint of that step is whole, the one that was saved last."""
    runs, like, usual, made_by = (variables.fill(part) for part in (rule.runs, rule.like, rule.usual, rule.made_by))
    siblings = [run for run in Path(runs).glob(like) if run.is_dir()]
    holding = [run / name for run in siblings if is_whole(run / name)]
    if holding:
        return Found(max(holding, key=lambda path: (path.stat().st_mtime_ns, path)))
    others = [path for run in siblings for path in checkpoints(run)]
    why = f"no run {runs}/{like} holds a whole {name}; {_listed(Path(runs), others)}"
    return Found(Path(runs) / usual / name, f"{why}. A run that saves them: {made_by}")


def _listed(folder: Path, others: Iterable[Path]) -> str:
    """The checkpoints that exist, one a line."""
    named = (path for path in others if NAME.fullmatch(path.name))
    paths = sorted(named, key=lambda path: (path.parent, step_of(path)))
    if not paths:
        return f"{folder} holds no checkpoint"
    more = f"\n  and {len(paths) - MOST_LISTED} more" if len(paths) > MOST_LISTED else ""
    return "there are\n" + "\n".join(f"  {path}" for path in paths[:MOST_LISTED]) + more
