"""The runs on disk and their names: one way to name a run, for every command.

    named_run("pocket-sokoban")                         # ("RAGEN/pocket-sokoban", its RunFolder)
    named_run("checkpoints/RAGEN/pocket-sokoban")       # the same, by its path
    run_or_checkpoint("pocket-sokoban/global_step_20")  # a path, for commands that also take models; else None

A name is a path, the path below one of the output directories (`ROOTS`), or the end of that path.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ragen.errors import ConfigError, did_you_mean, shown
from ragen.store.run_folder import RunFolder

# Default output directories of runs, sweeps and fine-tuning (models/sft/…/lora_weights).
ROOTS = ("checkpoints", "model_saving", "models")
SKIPPED = ("episodes", "tensorboard", "wandb")  # large directories below a run
_PART = re.compile(r"(.+?)/+(global_step_\d+(?:_merged)?(?:/+actor)?)/*")


def find_runs(folders: Sequence[str] = ()) -> list[tuple[str, RunFolder]]:
    """Every run folder at or below `folders` (default `ROOTS`), named by its path below that folder."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{shown(folder)}: no such directory")
    found: dict[Path, tuple[str, RunFolder]] = {}
    for root in filter(Path.is_dir, map(Path, folders or ROOTS)):
        for directory, folders_below, files in os.walk(root):
            found_run = is_run([*files, *folders_below])  # damage may have made a directory of a file
            folders_below[:] = sorted(
                name for name in folders_below if name not in SKIPPED and not name.startswith((".", "global_step_"))
            )
            path = Path(directory)
            if found_run:
                name = path.relative_to(root).as_posix() if path != root else path.resolve().name
                found.setdefault(path.resolve(), (name, RunFolder(path)))
    return list(found.values())


def named_run(name: str, folders: Sequence[str] = (), caller: str = "") -> tuple[str, RunFolder]:
    """The run that a name means; raises if there is none, or several. A path starts from `caller`, or from here."""
    paths = (Path(caller, os.path.expanduser(name)), Path(name))
    for path in paths:
        if path.is_dir() and is_run(os.listdir(path)):
            return name.rstrip("/"), RunFolder(path)
    known = find_runs(folders)
    matches = _matches(name, known)
    if not matches and any(map(os.path.lexists, paths)):
        raise ConfigError(f"{shown(name)}: not a run directory (no {RunFolder('').metrics_path.name})")
    if not matches:
        near = did_you_mean(name, [end for other, _ in known for end in (other, other.rpartition("/")[2])])
        raise ConfigError(f"run {shown(name)}: no such run or run directory{near}")
    return matches[0]


def run_or_checkpoint(name: str) -> Path | None:
    """The directory of a run, or of a checkpoint in it, named as in `named_run`; None if no run has this name."""
    part = _PART.fullmatch(name)
    matches = _matches(part[1] if part else name, find_runs())
    return (matches[0][1].path / (part[2] if part else "")) if matches else None


def is_run(files: Sequence[str]) -> bool:
    """Metrics make a run; one that has just started, or lost them, has a config and an owner or an end."""
    folder, names = RunFolder(""), set(files)
    others = {folder.owner_path.name, folder.finished_path.name}
    return folder.metrics_path.name in names or (folder.config_path.name in names and bool(others & names))


def _matches(name: str, known: Sequence[tuple[str, RunFolder]]) -> list[tuple[str, RunFolder]]:
    """The run of this name, or the only one whose name ends so."""
    name = name.rstrip("/")
    found = [run for run in known if run[0] == name] or [run for run in known if name and run[0].endswith(f"/{name}")]
    if len(found) > 1:
        listed = ", ".join(str(folder) for _, folder in found)
        raise ConfigError(f"run {shown(name)}: several runs match; name one of {listed}")
    return found
