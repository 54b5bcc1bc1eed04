"""The checkpoint that an experiment begins from: named by the user, or the newest of the runs that hold its step.

    found = find(spec, shared, scope)        # None for an experiment that begins from none
    found.value                              # Value("…/global_step_101", parts: step 101, total 101)
    found.missing                            # why it cannot be taken, and which ones are there; empty if it can

`checkpoint` in an experiment's file: `runs` the folder of the runs, `like` the pattern of their names, `usual` the name
that is meant where none is there, `made_by` the command that makes one. Its options are `resume-from-path`,
`checkpoint-root` and `checkpoint-step`; the path overrides root and step.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError
from ragen.experiment.spec import Spec
from ragen.experiment.template import Scope
from ragen.experiment.values import Value
from ragen.store.manifest import checkpoint_name, checkpoints, is_whole, step_of

NAME = re.compile(r"global_step_(\d+)")
MOST_LISTED = 20


@dataclass(frozen=True)
class Found:
    value: Value
    missing: str = ""


def find(spec: Spec, shared: Mapping[str, Any], scope: Scope) -> Found | None:
    """What the experiment's options point to. Raises `ConfigError` for a path or a step that cannot be one."""
    if not spec.checkpoint:
        return None
    rule = {key: scope.fill(template) for key, template in spec.checkpoint.items()}
    named, root = str(shared["resume_from_path"]), str(shared["checkpoint_root"])
    if named:
        _check_name(named)
        return _given(Path(named))
    name = checkpoint_name(_step(str(shared["checkpoint_step"])))
    return _given(Path(root) / name) if root else _newest(rule, name)


def _check_name(path: str) -> None:
    if not NAME.fullmatch(Path(path).name):
        raise ConfigError(f"--resume-from-path {path}: must name a folder global_step_<N>")


def _step(text: str) -> int:
    if int(text) < 0:
        raise ConfigError(f"--checkpoint-step {text}: must be 0 or more")
    return int(text)


def _given(path: Path) -> Found:
    if path.is_dir():
        return _found(path)
    return _found(path, f"{path} is not there; {_listed(path.parent, checkpoints(path.parent))}")


def _newest(rule: Mapping[str, str], name: str) -> Found:
    """Of the runs whose checkpoint of that step is whole, the one that was saved last."""
    runs = Path(rule["runs"])
    siblings = [run for run in runs.glob(rule["like"]) if run.is_dir()]
    holding = [run / name for run in siblings if is_whole(run / name)]
    if holding:
        return _found(max(holding, key=lambda path: (path.stat().st_mtime_ns, path)))
    others = [path for run in siblings for path in checkpoints(run)]
    why = f"no run {runs / rule['like']} holds a whole {name}; {_listed(runs, others)}"
    return _found(runs / rule["usual"] / name, f"{why}. A run that saves them: {rule['made_by']}")


def _found(path: Path, missing: str = "") -> Found:
    step = step_of(path)
    return Found(Value(str(path), {"step": str(step), "total": str(max(step, 1))}), missing)


def _listed(folder: Path, others: Iterable[Path]) -> str:
    """Those that are there, one a line."""
    paths = sorted(
        (path for path in others if NAME.fullmatch(path.name)), key=lambda path: (path.parent, step_of(path))
    )
    if not paths:
        return f"{folder} holds no checkpoint"
    more = f"\n  and {len(paths) - MOST_LISTED} more" if len(paths) > MOST_LISTED else ""
    return "there are\n" + "\n".join(f"  {path}" for path in paths[:MOST_LISTED]) + more
