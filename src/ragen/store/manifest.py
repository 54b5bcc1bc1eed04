"""Checkpoints as folders on disk: which there are, whether they are whole, which is the latest. No torch in here.

    latest("checkpoints/ragen/test")               # .../global_step_200, or None
    manifest = check(path, every_byte=True)        # raises NotACheckpoint or Damaged, which say what is wrong
    manifest.is_resumable

    latest_checkpointed_iteration.txt              the tracker: the step of the latest checkpoint
    best_checkpoint.json                           the step with the highest validation success, which stays
    global_step_200/manifest.json                  every file with its size and checksum, and what the checkpoint holds
    global_step_200/actor/…                        see `checkpoint`
    .global_step_300.part/                         one that is being written, or that a killed run left behind

A checkpoint is written under a hidden name, synced and renamed, then the tracker names it. So a folder
`global_step_<N>` is whole unless something else has damaged it.
"""

import json
import os
import re
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragen.errors import ConfigError
from ragen.store.fsync import write_whole
from ragen.store.reading import Unreadable, read_bytes, read_json

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpoint.json"
MANIFEST = "manifest.json"
REPLACED = ".replaced"  # suffix of a checkpoint while another one of the same step replaces it
_NAME = re.compile(rf"global_step_([0-9]{{1,18}})({re.escape(REPLACED)})?")
_CHUNK = 1 << 24


class CheckpointError(ConfigError):
    """An unusable checkpoint. The message says which, why, and what to do."""


class NotACheckpoint(CheckpointError):
    """A folder that is not a finished checkpoint."""


class Damaged(CheckpointError):
    """A checkpoint that has been damaged."""


class OtherModel(CheckpointError):
    """A checkpoint of a different model."""


class FileSum(NamedTuple):
    size: int
    crc32: int


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest validation success so far."""

    step: int
    success: float


@dataclass(frozen=True)
class Manifest:
    step: int
    contents: dict[str, list[str]]  # by part: actor and critic, each with model and perhaps optimizer
    has_state: bool = False  # the trainer's own state
    keep: bool = False  # never deleted to make room
    tracked: bool = True  # may be the latest one; a checkpoint for looking at is not
    files: dict[str, FileSum] = field(default_factory=dict)

    @property
    def is_resumable(self) -> bool:
        """Whether training can resume from it as if it had never stopped."""
        full = all({"model", "optimizer"} <= set(held) for held in self.contents.values())
        return "actor" in self.contents and full and self.has_state


# --- reading ------------------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    return f"global_step_{step}"


def step_of(path: str | os.PathLike[str]) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise NotACheckpoint(f"{path} is not a checkpoint: its name must be global_step_<N>")
    return int(match[1])


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Every folder with the name of a checkpoint, oldest first, whole or not."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), not path.name.endswith(REPLACED)))


def check(path: str | os.PathLike[str], every_byte: bool = False) -> Manifest:
    """The manifest of a checkpoint whose files are all there, of the right size and, where asked, the right content."""
    path = Path(path)
    try:
        return _inspect(path, every_byte)
    except CheckpointError as error:
        raise type(error)(f"{error}. {_what_to_do(path)}") from None


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether every file is there and has its size."""
    try:
        _inspect(Path(path))
    except CheckpointError:
        return False
    return True


def is_resumable(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint is whole and holds all that resuming needs."""
    return is_whole(path) and read_manifest(Path(path)).is_resumable


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that the tracker names, or else, if that one is not whole, the newest one that is."""
    return find_latest(folder)[0]


def find_latest(folder: str | os.PathLike[str]) -> tuple[Path | None, str]:
    """`latest`, and what is wrong with the one that the tracker names, if anything."""
    folder = Path(folder)
    step, trouble = _read_tracker(folder / TRACKER)
    if step is not None:
        named = folder / checkpoint_name(step)
        try:
            _inspect(named)
            return named, ""
        except CheckpointError as error:
            trouble = f"{TRACKER} names step {step}, but {error}"
    for path in reversed(checkpoints(folder)):
        if is_whole(path) and (manifest := read_manifest(path)).tracked and "actor" in manifest.contents:
            return path, trouble
    return None, trouble


def best(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint with the highest validation success, where one is kept and whole."""
    found = read_best(folder)
    path = None if found is None else Path(folder) / checkpoint_name(found.step)
    return path if path is not None and is_whole(path) else None


def read_best(folder: str | os.PathLike[str]) -> Best | None:
    """What `best_checkpoint.json` says; None where there is none, or none that can be read."""
    try:
        record = read_json(Path(folder) / BEST) or {}
        return Best(int(record["step"]), float(record["success"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def read_manifest(path: Path) -> Manifest:
    """The list of what a checkpoint holds."""
    if not path.is_dir():
        raise NotACheckpoint(f"{path} is not a directory")
    if not (path / MANIFEST).exists():
        raise NotACheckpoint(f"{path} is not a checkpoint of ragen (no {MANIFEST})")
    try:
        stored = read_json(path / MANIFEST) or {}
        tree = stored["checkpoint"]
        if _tree_sum(tree) != stored["crc32"]:
            raise ValueError("its checksum differs")
        files = {name: FileSum(*values) for name, values in tree["files"].items()}
        manifest = Manifest(**tree | {"files": files})
        if not _is_sound(manifest):
            raise ValueError("an entry has the wrong type")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error})") from None
    if manifest.step != step_of(path):
        raise Damaged(f"{path} was written as {checkpoint_name(manifest.step)} and must have that name")
    return manifest


def _is_sound(manifest: Manifest) -> bool:
    """Whether a manifest that somebody else may have written holds what its types say."""
    contents = manifest.contents
    are_parts = isinstance(contents, dict) and all(
        isinstance(held, list) and all(isinstance(name, str) for name in held) for held in contents.values()
    )
    names = [Path(name) for name in manifest.files]
    are_inside = not any(name.is_absolute() or ".." in name.parts for name in names)
    are_numbers = all(isinstance(number, int) for values in manifest.files.values() for number in values)
    return are_parts and are_inside and are_numbers and type(manifest.step) is int


def _inspect(path: Path, every_byte: bool = False) -> Manifest:
    manifest = read_manifest(path)
    problems = []
    for name, wanted in manifest.files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) != wanted.size:
            problems.append(f"{name} has {size:,} bytes, not {wanted.size:,}")
        elif every_byte and file_sum(file) != wanted:
            problems.append(f"the content of {name} has changed")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise Damaged(f"checkpoint {path} is damaged: {'; '.join(problems[:3])}{more}")
    return manifest


def _what_to_do(path: Path) -> str:
    """About a checkpoint that cannot be read."""
    others = [other for other in checkpoints(path.parent) if other != path and is_whole(other)]
    if not others:
        return "Copy it again from an intact source, or start in another directory: trainer.resume_mode=disable"
    return (
        f"{others[-1]} is whole: use it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={others[-1]}, or start again with trainer.resume_mode=disable"
    )


def _read_tracker(path: Path) -> tuple[int | None, str]:
    try:
        content = read_bytes(path)
    except Unreadable as error:
        return None, str(error)
    if content is None:
        return None, ""
    text = content[:100].strip()
    if re.fullmatch(rb"[0-9]{1,18}", text):
        return int(text), ""
    return None, f"{path} does not hold the number of a step"


# --- writing ------------------------------------------------------------------------------------------------------


def write_manifest(path: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint."""
    tree = asdict(manifest)
    tree["files"] = {name: list(values) for name, values in manifest.files.items()}
    content = json.dumps({"checkpoint": tree, "crc32": _tree_sum(tree)}, indent=1)
    write_whole(path / MANIFEST, content.encode())


def write_best(folder: Path, best: Best) -> None:
    write_whole(folder / BEST, json.dumps(asdict(best)).encode())


def write_tracker(folder: Path, step: int) -> None:
    write_whole(folder / TRACKER, f"{step}\n".encode())


def remove_tracker(folder: Path) -> None:
    """Where it cannot name a checkpoint that is there: without it, the newest whole one is the latest."""
    with suppress(OSError):
        (folder / TRACKER).unlink(missing_ok=True)


def file_sum(path: Path) -> FileSum:
    """Size and checksum of a file, by reading it."""
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return FileSum(path.stat().st_size, crc32)


def _tree_sum(tree: Any) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())
