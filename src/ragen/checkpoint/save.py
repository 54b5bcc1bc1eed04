"""Saving checkpoints: whole or not at all, opened by Hugging Face.

    store = CheckpointStore.of(config, folder.path)
    store.save(200, parts)                         # global_step_200/, then the tracker, then old ones are deleted

    global_step_200/actor/                         config, weights, tokenizer: AutoModelForCausalLM opens it; or, of a
                                                   model with an adapter, that alone: peft opens it over its base
    global_step_200/actor_optimizer/               moments, counts and master weights, by parameter
    global_step_200/critic/, critic_optimizer/     the same, and value_head.safetensors
    global_step_200/trainer_state.json             the trainer's own numbers
    global_step_200/manifest.json                  see `store.manifest`

`save_contents` decides what is written: `model` the weights, `optimizer` what resuming needs, `extra` the trainer's
state, which also comes with `optimizer`. Tensors are safetensors files and everything else is JSON: reading never
unpickles. A run logs the metrics of a step before it saves: a resumed run has them.
"""

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from ragen.checkpoint.model_folder import delete, move_into_place, synced_sum, write_json, write_model
from ragen.checkpoint.parts import Parts, stored_parameters
from ragen.checkpoint.tensor_file import num_bytes, write_tensors
from ragen.config.schema import Config
from ragen.format import size_text
from ragen.store import manifest as disk
from ragen.store.fsync import sync
from ragen.store.full_disk import WriteFailed, advice, free_bytes, no_space, patiently
from ragen.store.manifest import REPLACED, FileSum, Manifest

CONTENTS = ("model", "optimizer", "extra")
STATE = "trainer_state.json"
OPTIMIZER, OPTIMIZER_NUMBERS = "optimizer.safetensors", "optimizer.json"


class SaveFailed(OSError):
    """A checkpoint that could not be written. Earlier ones are intact."""


class CheckpointStore:
    """The checkpoints of one run folder.

    `keep_actor` and `keep_critic` are how many stay, None for all. `contents` are those of the actor, and of the critic
    unless it has its own. `note` logs harmless failures.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_actor: int | None = 1,
        keep_critic: int | None = 1,
        contents: Sequence[str] = CONTENTS,
        critic_contents: Sequence[str] | None = None,
        note: Callable[[str], None] = warnings.warn,
    ):
        self.folder = Path(folder)
        self.keep = {"actor": keep_actor, "critic": keep_critic}
        self.contents = {"actor": contents, "critic": contents if critic_contents is None else critic_contents}
        self.note = note
        # The config has checked both.
        assert all("model" in listed and {*listed} <= {*CONTENTS} for listed in self.contents.values()), self.contents
        assert all(limit is None or limit > 0 for limit in self.keep.values()), self.keep

    @classmethod
    def of(
        cls, config: Config, folder: str | os.PathLike[str], note: Callable[[str], None] = warnings.warn
    ) -> "CheckpointStore":
        return cls(
            folder,
            config.trainer.max_actor_ckpt_to_keep,
            config.trainer.max_critic_ckpt_to_keep,
            config.actor_rollout_ref.actor.checkpoint.save_contents,
            config.critic.checkpoint.save_contents,
            note,
        )

    def save(self, step: int, parts: Parts, contents: Sequence[str] | None = None, keep: bool = False) -> Path:
        """Write a checkpoint, let the tracker name it, then delete what is too old.

        With `keep` it is never deleted. With `contents` it is one to inspect: kept, and not named by the tracker; if
        the step already has a resumable checkpoint, that one is kept and nothing is written.
        """
        target = self.folder / disk.checkpoint_name(step)
        tracked, there = contents is None, disk.read_manifest(target) if disk.is_whole(target) else None
        keep = keep or not tracked or (there is not None and there.keep)
        contents_by_part = self.contents if contents is None else dict.fromkeys(self.contents, contents)
        written = _Written(step, parts, contents_by_part, keep, tracked)
        try:
            if there is not None and there.tracked and not tracked:
                disk.write_manifest(target, replace(there, keep=True))
            else:
                patiently(lambda: self._write(written, target), target, written.num_bytes)
            if tracked:
                disk.write_tracker(self.folder, step)
        except (OSError, SafetensorError) as error:
            is_in_place = there is None and disk.is_whole(target)
            if is_in_place and tracked:
                disk.remove_tracker(self.folder)
            raise self._failure(written, error, is_in_place) from error
        if tracked:
            self._delete_old(step)
        return target

    # --- saving ---------------------------------------------------------------------------------------------------

    def _write(self, written: "_Written", target: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".global_step_*.part"):
            shutil.rmtree(leftover)
        for leftover in self.folder.glob(f".{disk.TRACKER}.*.part"):
            leftover.unlink()
        for replaced in self.folder.glob(f"global_step_*{REPLACED}"):
            named = replaced.with_name(replaced.name.removesuffix(REPLACED))
            if not named.exists():  # a killed run left it without its name
                os.rename(replaced, named)
        if free_bytes(self.folder) < written.num_bytes:  # not after writing for minutes
            raise no_space()
        temporary = self.folder / f".{target.name}.part"
        try:
            temporary.mkdir()
            written.write(temporary)
            move_into_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _failure(self, written: "_Written", error: Exception, is_in_place: bool) -> SaveFailed:
        if isinstance(error, WriteFailed) and isinstance(error.__cause__, OSError):
            error = error.__cause__  # its message has its own advice
        number = getattr(error, "errno", None) or errno.EIO
        latest = disk.latest(self.folder)
        kept = "there is no earlier checkpoint" if latest is None else f"{latest} is whole"
        if latest is not None and disk.is_resumable(latest):
            kept += ": run the same command to resume from it"
        needed, what = written.num_bytes, "was not written"
        if is_in_place:
            needed, what = len(f"{written.step}\n"), f"was written, but {disk.TRACKER} was not"
        return SaveFailed(
            number,
            f"the checkpoint of step {written.step} {what} ({getattr(error, 'strerror', None) or error}): it needs "
            f"{size_text(needed)}, and {size_text(free_bytes(self.folder))} are free. Fix: "
            f"{advice(number)}; {kept}",
            str(self.folder),
        )

    # --- deleting -------------------------------------------------------------------------------------------------

    def _delete_old(self, step: int) -> None:
        """Delete what is older than `step` and over the limit; never the checkpoint that the tracker names."""
        try:
            for path in self.folder.glob(f"global_step_*{REPLACED}"):
                delete(path)
            for path, names in self._too_old(step).items():
                _delete_parts(path, names)
        except OSError as error:
            self.note(f"an old checkpoint could not be deleted: {error}")

    def _too_old(self, step: int) -> dict[Path, list[str]]:
        """Which parts of which checkpoints to delete. The best one stays."""
        best = disk.best(self.folder)
        found = [(path, disk.read_manifest(path)) for path in disk.checkpoints(self.folder) if disk.is_whole(path)]
        counted = [(path, it) for path, it in found if not it.keep and it.step <= step]
        old: dict[Path, list[str]] = {}
        for name, limit in self.keep.items():
            holding = [path for path, it in counted if name in it.contents]
            for path in holding[: -limit if limit is not None else 0]:
                if path != best:
                    old.setdefault(path, []).append(name)
        return old


# --- writing --------------------------------------------------------------------------------------------------------


class _Written:
    """One checkpoint on its way to disk."""

    def __init__(
        self, step: int, parts: Parts, contents: Mapping[str, Sequence[str]], keep: bool, tracked: bool
    ) -> None:
        self.step, self.keep, self.tracked = step, keep, tracked
        self.parts, self.state = parts.by_name(), parts.state
        self.optimizers = {
            name: (part.model, part.optimizer)
            for name, part in self.parts.items()
            if part.optimizer is not None and "optimizer" in contents[name]
        }
        self.contents = {name: ["model", *(["optimizer"] if name in self.optimizers else [])] for name in self.parts}
        self.has_state = bool({"optimizer", "extra"} & set(contents["actor"]))

    @property
    def num_bytes(self) -> int:
        """About: the numbers, not the texts."""
        weights = sum(parameter.nbytes for part in self.parts.values() for parameter in stored_parameters(part))
        return weights + sum(num_bytes(optimizer.tensors(model)) for model, optimizer in self.optimizers.values())

    def write(self, folder: Path) -> None:
        sums: dict[Path, FileSum] = {}
        if self.has_state:
            write_json(folder / STATE, self.state)
        for name, part in self.parts.items():
            write_model(folder / name, part, sums)
        for name, (model, optimizer) in self.optimizers.items():
            path = folder / f"{name}_optimizer" / OPTIMIZER
            path.parent.mkdir()
            sums[path] = FileSum(*write_tensors(path, optimizer.tensors(model)))
            write_json(path.with_name(OPTIMIZER_NUMBERS), {"num_steps": optimizer.num_steps})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listed = {path.relative_to(folder).as_posix(): sums.get(path) or synced_sum(path) for path in files}
        manifest = Manifest(self.step, self.contents, self.has_state, self.keep, self.tracked, listed)
        disk.write_manifest(folder, manifest)
        for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            sync(inner)


def _delete_parts(path: Path, names: Sequence[str]) -> None:
    manifest = disk.read_manifest(path)
    left = {name: held for name, held in manifest.contents.items() if name not in names}
    if not left:
        delete(path)
        return
    gone = tuple(f"{name}{end}/" for name in names for end in ("", "_optimizer"))
    files = {name: values for name, values in manifest.files.items() if not name.startswith(gone)}
    disk.write_manifest(path, replace(manifest, contents=left, files=files))
    for folder in gone:
        shutil.rmtree(path / folder, ignore_errors=True)
