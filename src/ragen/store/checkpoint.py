"""Checkpoints: saved whole or not at all, opened by Hugging Face, restored bit for bit.

    store = CheckpointStore.of(config, folder.path)
    parts = Parts(part_of(loaded, optimizer), state={"early_stop": stop.state()})
    store.save(200, parts)                         # global_step_200/, then the tracker, then old ones are deleted
    state = store.restore(store.latest(), parts)   # fills modules and optimizers, gives the state back

    global_step_200/actor/                         config, weights, tokenizer: AutoModelForCausalLM opens it; or, of a
                                                   model with an adapter, that alone: peft opens it over its base
    global_step_200/actor_optimizer/               moments, counts and master weights, by parameter
    global_step_200/critic/, critic_optimizer/     the same, and value_head.safetensors
    global_step_200/trainer_state.json             the trainer's own numbers
    global_step_200/manifest.json                  see `manifest`

`save_contents` decides what is written: `model` the weights, `optimizer` what it takes to go on, `extra` the trainer's
state, which also goes with `optimizer`. Nothing that is read back is ever unpickled: tensors are safetensors files, all
else is JSON. A run records the metrics of a step before it saves: what is resumed then has them.
"""

import copy
import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from ragen.config.schema import Config
from ragen.errors import ConfigError
from ragen.model import lora
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.load import EMBEDDED, VALUE_HEAD, LoadedModel, find_model
from ragen.store import lineage
from ragen.store import manifest as disk
from ragen.store.fsync import sync
from ragen.store.locate import CHECKPOINT, is_path
from ragen.store.manifest import REPLACED, FileSum, Manifest, OtherModel
from ragen.store.tensor_file import TensorFiles, num_bytes, write_tensors
from ragen.train.optimizer import MasterAdamW

CONTENTS = ("model", "optimizer", "extra")
SHARD_BYTES = 5_000_000_000  # larger weights are cut into several files
STATE = "trainer_state.json"
_OPTIMIZER, _OPTIMIZER_NUMBERS = "optimizer.safetensors", "optimizer.json"


class SaveFailed(OSError):
    """A checkpoint that could not be written. Earlier ones are as they were."""


@dataclass(frozen=True)
class Part:
    """A trained model, as a checkpoint sees it.

    `model` is a `Decoder` or the adapter of another family; a critic has one of these as `backbone`, and its value head
    as `head`. `config` is the Hugging Face config of the weights. Of a model with an adapter only that is stored:
    `base_model` names what it belongs to, and `base_digest` tells that from other weights.
    """

    model: nn.Module
    config: Any
    tokenizer: Any = None
    optimizer: MasterAdamW | None = None
    generation_config: str = ""  # the content of a file that came with the weights
    base_model: str = ""
    base_digest: str = ""

    @property
    def backbone(self) -> Any:
        return getattr(self.model, "backbone", self.model)

    @property
    def value_head(self) -> nn.Module | None:
        return self.model.head if hasattr(self.model, "backbone") else None


@dataclass(frozen=True)
class Parts:
    """What a checkpoint holds. `state` is any tree that JSON can hold, its keys texts."""

    actor: Part
    critic: Part | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    def by_name(self) -> dict[str, Part]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})


def part_of(loaded: LoadedModel, optimizer: MasterAdamW | None = None) -> Part:
    """A loaded model as a part."""
    from transformers import AutoConfig

    folder = loaded.source.model_folder
    generation = folder / "generation_config.json"
    return Part(
        loaded.model,
        AutoConfig.from_pretrained(folder),
        loaded.tokenizer,
        optimizer,
        generation.read_text(encoding="utf-8") if generation.exists() else "",
        loaded.source.lasting_name,
        loaded.source.digest if lora.has_adapters(loaded.model) else "",
    )


class CheckpointStore:
    """The checkpoints of one run folder.

    `keep_actor` and `keep_critic` are how many stay, None for all. `contents` are those of the actor, and of the critic
    unless it has its own. `note` is told what went wrong without harm.
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
        for name, listed in self.contents.items():
            _check_contents(name, listed)
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

        With `keep` it is never deleted. With `contents` of its own it is one to look at: kept, and not named by the
        tracker; where that step was saved to go on from, it is that one which is kept, and nothing is written.
        """
        target = self.folder / disk.checkpoint_name(step)
        tracked, there = contents is None, disk.read_manifest(target) if disk.is_whole(target) else None
        keep = keep or not tracked or (there is not None and there.keep)
        contents_by_part = self.contents if tracked else dict.fromkeys(self.contents, contents)
        written = _Written(step, parts, contents_by_part, keep, tracked)
        try:
            if there is not None and there.tracked and not tracked:
                disk.write_manifest(target, replace(there, keep=True))
            else:
                self._write(written, target)
            if tracked:
                disk.write_tracker(self.folder, step)
        except (OSError, SafetensorError) as error:
            raise self._failure(written, error) from error
        if tracked:
            self._delete_old(step)
        return target

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole."""
        return disk.latest(self.folder)

    def is_resumable(self, path: str | os.PathLike[str]) -> bool:
        return disk.is_resumable(path)

    def restore(self, path: str | os.PathLike[str], parts: Parts) -> dict[str, Any]:
        """`restore`; the checkpoint may be one of another run."""
        return restore(path, parts)

    # --- saving ---------------------------------------------------------------------------------------------------

    def _write(self, written: "_Written", target: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".global_step_*.part"):
            shutil.rmtree(leftover)
        for leftover in self.folder.glob(f".{disk.TRACKER}.*.part"):
            leftover.unlink()
        for replaced in self.folder.glob(f"global_step_*{REPLACED}"):
            if not _name_of(replaced).exists():  # a killed run left it without its name
                os.rename(replaced, _name_of(replaced))
        _check_space(self.folder, written.num_bytes)
        temporary = self.folder / f".{target.name}.part"
        try:
            temporary.mkdir()
            written.write(temporary)
            _take_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _failure(self, written: "_Written", error: Exception) -> SaveFailed:
        number = getattr(error, "errno", None) or errno.EIO
        earlier = self.latest()
        kept = "there is no earlier checkpoint" if earlier is None else f"{earlier} is whole"
        if earlier is not None and self.is_resumable(earlier):
            kept += ": the same command goes on from there"
        advice = _ADVICE.get(number, "mend that")
        return SaveFailed(
            number,
            f"the checkpoint of step {written.step} was not written ({getattr(error, 'strerror', None) or error}): it "
            f"needs {size_text(written.num_bytes)}, and {size_text(_free(self.folder))} are free. To do: {advice}; "
            f"{kept}",
            str(self.folder),
        )

    # --- deleting -------------------------------------------------------------------------------------------------

    def _delete_old(self, step: int) -> None:
        """Make room. Only what is older than `step` goes: the checkpoint that the tracker names is never touched."""
        try:
            for path in self.folder.glob(f"global_step_*{REPLACED}"):
                _delete(path)
            for path, names in self._too_old(step).items():
                _delete_parts(path, names)
        except OSError as error:
            self.note(f"an old checkpoint could not be deleted and takes room: {error}")

    def _too_old(self, step: int) -> dict[Path, list[str]]:
        """Which parts of which checkpoints have had their time."""
        found = [(path, disk.read_manifest(path)) for path in disk.checkpoints(self.folder) if disk.is_whole(path)]
        counted = [(path, it) for path, it in found if not it.keep and it.step <= step]
        old: dict[Path, list[str]] = {}
        for name, limit in self.keep.items():
            holding = [path for path, it in counted if name in it.contents]
            for path in holding[: -limit if limit is not None else 0]:
                old.setdefault(path, []).append(name)
        return old


# --- what is written ----------------------------------------------------------------------------------------------


class _Written:
    """One checkpoint on its way to disk."""

    def __init__(
        self, step: int, parts: Parts, contents: Mapping[str, Sequence[str]], keep: bool, tracked: bool
    ) -> None:
        self.step, self.keep, self.tracked = step, keep, tracked
        self.parts, self.state = parts.by_name(), parts.state
        self.optimizers = {
            name: part
            for name, part in self.parts.items()
            if part.optimizer is not None and "optimizer" in contents[name]
        }
        self.contents = {name: ["model", *(["optimizer"] if name in self.optimizers else [])] for name in self.parts}
        self.has_state = bool({"optimizer", "extra"} & set(contents["actor"]))

    @property
    def num_bytes(self) -> int:
        """About: the numbers, not the texts."""
        weights = sum(parameter.nbytes for part in self.parts.values() for parameter in _stored_parameters(part))
        return weights + sum(num_bytes(part.optimizer.tensors(part.model)) for part in self.optimizers.values())

    def write(self, folder: Path) -> None:
        sums: dict[Path, FileSum] = {}
        if self.has_state:
            _write_json(folder / STATE, self.state)
        for name, part in self.parts.items():
            write_model(folder / name, part, sums)
        for name, part in self.optimizers.items():
            _write_optimizer(folder / f"{name}_optimizer", part, sums)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listed = {path.relative_to(folder).as_posix(): sums.get(path) or _sync(path) for path in files}
        manifest = Manifest(self.step, self.contents, self.has_state, self.keep, self.tracked, listed)
        disk.write_manifest(folder, manifest)
        for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            sync(inner)


def _stored_parameters(part: Part) -> list[nn.Parameter]:
    """Of a model with an adapter, that and the value head."""
    parameters = list(part.model.parameters())
    if not lora.has_adapters(part.backbone):
        return parameters
    return [parameter for parameter in parameters if parameter.requires_grad]


def write_model(folder: Path, part: Part, sums: dict[Path, FileSum]) -> None:
    """A new folder in Hugging Face's layout, or in peft's. Sizes and checksums of large files are added to `sums`."""
    folder.mkdir()
    if lora.has_adapters(part.backbone):
        _write_json(folder / lora.CONFIG, lora.adapter_config(part.backbone, part.base_model))
        if part.base_digest:
            (folder / lora.DIGEST).write_text(f"{part.base_digest}\n", encoding="utf-8")
        path = folder / lora.WEIGHTS
        sums[path] = FileSum(*write_tensors(path, lora.adapter_state(part.backbone)))
    elif isinstance(part.backbone, Decoder):
        weights = lora.base_state(part.backbone)
        config = copy.deepcopy(part.config)
        config.dtype = next(iter(weights.values())).dtype
        (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        if part.generation_config:
            (folder / "generation_config.json").write_text(part.generation_config, encoding="utf-8")
        _write_shards(folder, weights, sums)
    else:
        with _no_bars():
            part.backbone.module.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    if part.tokenizer is not None:
        part.tokenizer.save_pretrained(folder)
    if part.value_head is not None:
        path = folder / VALUE_HEAD
        sums[path] = FileSum(*write_tensors(path, part.value_head.state_dict()))


def write_model_folder(target: Path, part: Part, run: Path | None = None) -> None:
    """`write_model`, whole or not at all, and synced, with what it needs to remember its run (`lineage`). What is there
    already stays, with an error."""
    check_is_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")  # not `.part`, which a run that saves here takes for its own
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        sums: dict[Path, FileSum] = {}
        write_model(temporary, part, sums)
        for path in set(temporary.iterdir()) - set(sums):
            _sync(path)
        if run is not None:
            lineage.keep(run, temporary)
        sync(temporary)
        _take_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_is_free(target: Path) -> None:
    """That nothing is there, and that it is no part of a checkpoint, whose files are all listed."""
    if target.exists():
        raise ConfigError(f"{target} is there already, and nothing is overwritten: name another folder with --output")
    for parent in target.resolve().parents:
        if CHECKPOINT.fullmatch(parent.name) and (parent / disk.MANIFEST).exists():
            raise ConfigError(f"{target} lies within a checkpoint, {parent}: name a folder outside of it with --output")


def _write_shards(folder: Path, weights: Mapping[str, Tensor], sums: dict[Path, FileSum]) -> None:
    shards = _cut(weights)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        sums[folder / name] = FileSum(*write_tensors(folder / name, shard))
    if len(shards) > 1:
        places = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": num_bytes(weights)}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _cut(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights in order, in shards that do not exceed `SHARD_BYTES` unless a single one does."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and num_bytes(shards[-1]) + weight.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = weight
    return shards


def _write_optimizer(folder: Path, part: Part, sums: dict[Path, FileSum]) -> None:
    folder.mkdir()
    path = folder / _OPTIMIZER
    sums[path] = FileSum(*write_tensors(path, part.optimizer.tensors(part.model)))
    _write_json(folder / _OPTIMIZER_NUMBERS, {"num_steps": part.optimizer.num_steps})


def _write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def _sync(path: Path) -> FileSum:
    """Sync a file that somebody else wrote, and make it as readable as its folder: safetensors writes for its owner."""
    path.chmod(path.parent.stat().st_mode & 0o666)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return disk.file_sum(path)


def _take_place(temporary: Path, target: Path) -> None:
    """Give a written checkpoint its name; one that has it already is whole under another name until it is replaced."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        if replaced.exists():
            _delete(replaced)
        os.rename(target, replaced)
    os.rename(temporary, target)
    sync(target.parent)


def _name_of(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removesuffix(REPLACED))


def _delete(path: Path) -> None:
    """Take the name away first: half a checkpoint must not look like one."""
    hidden = path.with_name(f".{path.name}.part")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def _delete_parts(path: Path, names: Sequence[str]) -> None:
    manifest = disk.read_manifest(path)
    left = {name: held for name, held in manifest.contents.items() if name not in names}
    if not left:
        _delete(path)
        return
    gone = tuple(f"{name}{end}/" for name in names for end in ("", "_optimizer"))
    files = {name: values for name, values in manifest.files.items() if not name.startswith(gone)}
    disk.write_manifest(path, replace(manifest, contents=left, files=files))
    for folder in gone:
        shutil.rmtree(path / folder, ignore_errors=True)


# --- room and messages --------------------------------------------------------------------------------------------

_ADVICE = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within the quota",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
}


def _check_space(folder: Path, needed: int) -> None:
    """Do not fill a disk for minutes to find out that it is too small."""
    if _free(folder) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _free(folder: Path) -> float:
    """Bytes; infinite where the system does not tell."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("/"))
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else math.inf


def size_text(count: float) -> str:
    """A number of bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _check_contents(name: str, listed: Sequence[str]) -> None:
    if "model" in listed and set(listed) <= set(CONTENTS):
        return
    key = {"actor": "actor_rollout_ref.actor", "critic": "critic"}[name]
    raise ConfigError(
        f"{key}.checkpoint.save_contents={list(listed)}: must hold model, without which nothing can be opened, and may "
        f"hold optimizer and extra. To save nothing at all: trainer.save_freq=-1"
    )


# --- what is read -------------------------------------------------------------------------------------------------


def restore(path: str | os.PathLike[str], parts: Parts) -> dict[str, Any]:
    """Fill modules and optimizers from a checkpoint, and give the trainer's state back.

    Everything is checked before the first weight is changed. From a checkpoint without optimizer state an optimizer
    takes its weights and its place in the schedule; the state is empty then.
    """
    path = Path(path)
    manifest = disk.check(path, every_byte=True)
    stored = [_open(path, manifest, name, part) for name, part in parts.by_name().items()]
    for part in stored:
        part.fill()
    return json.loads((path / STATE).read_bytes()) if manifest.has_state else {}


@dataclass(frozen=True)
class _Stored:
    """One part of a checkpoint that is known to fit."""

    part: Part
    weights: Mapping[str, Tensor]
    value_head: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    num_steps: int

    def fill(self) -> None:
        optimizer = self.part.optimizer
        with nullcontext() if optimizer is None else optimizer.in_full():
            _fill(self.part.backbone, self.weights)
            if self.part.value_head is not None:
                self.part.value_head.load_state_dict(dict(self.value_head))
            if optimizer is not None:
                optimizer.load(self.part.model, self.optimizer, self.num_steps)


def _open(path: Path, manifest: Manifest, name: str, part: Part) -> _Stored:
    if name not in manifest.contents:
        raise OtherModel(f"checkpoint {path} holds no {name}: {_OTHER_MODEL}")
    folder, optimizer, num_steps = path / name, {}, manifest.step
    weights = _open_adapter(path, name, part) if lora.has_adapters(part.backbone) else _open_model(path, name, part)
    value_head: Mapping[str, Tensor] = {}
    if part.value_head is not None:
        value_head = TensorFiles([folder / VALUE_HEAD])
        _compare(path, value_head.shapes(), _shapes(part.value_head.state_dict()))
    if part.optimizer is not None and "optimizer" in manifest.contents[name]:
        optimizer = TensorFiles([path / f"{name}_optimizer" / _OPTIMIZER])
        known, found = part.optimizer.shapes(part.model), optimizer.shapes()
        _compare(path, found, {key: shape for key, shape in known.items() if key in found})
        num_steps = json.loads((path / f"{name}_optimizer" / _OPTIMIZER_NUMBERS).read_bytes())["num_steps"]
    return _Stored(part, weights, value_head, optimizer, num_steps)


def _open_model(path: Path, name: str, part: Part) -> Mapping[str, Tensor]:
    if (path / name / lora.CONFIG).exists():
        raise OtherModel(
            f"checkpoint {path} holds an adapter of the {name}, and here all weights are trained: set {_RANKS[name]} "
            f"and the alpha as they were, or train what model_path={path} gives, the adapter merged into its base"
        )
    try:
        weights, shape = _read_model(part.backbone, path / name)
    except ValueError as error:
        raise OtherModel(f"checkpoint {path} is of another model: {error}; {_OTHER_MODEL}") from error
    _compare_shape(path, shape, part.backbone.shape)
    _compare(path, _shapes(weights), _shapes(lora.base_state(part.backbone)))
    return weights


def _open_adapter(path: Path, name: str, part: Part) -> Mapping[str, Tensor]:
    if not (path / name / lora.CONFIG).exists():
        raise OtherModel(
            f"checkpoint {path} holds all weights of the {name}, and here an adapter is trained: set {_RANKS[name]}=0, "
            f"or train an adapter of it with model_path={path}"
        )
    weights, settings = TensorFiles([path / name / lora.WEIGHTS]), lora.read_config(path / name)
    base = settings["base_model_name_or_path"]
    if not _is_base(path / name, base, part):
        raise OtherModel(
            f"the adapter in {path / name} was trained above {base}, and the weights of {part.base_model} are others: "
            f"set {_MODELS[name]}={base}, with the weights that it had, {_OR_NOT}"
        )
    try:
        lora.check_settings(part.backbone, settings, path / name, _ADAPTER_KEYS[name])
        lora.check_shapes(part.backbone, weights.shapes(), path / name)
    except ConfigError as error:
        raise OtherModel(f"{error}: set it as it was when that was written, {_OR_NOT}") from None
    return weights


def _is_base(folder: Path, stored: str | None, part: Part) -> bool:
    """Whether a stored adapter belongs to the base of a part. An older checkpoint has only its name: then it is what is
    found under that, and no other where that has not been moved."""
    if (folder / lora.DIGEST).exists() or not stored or not part.base_digest or stored == part.base_model:
        return lora.is_of(folder, part.base_digest)
    if stored in EMBEDDED or Path(stored).is_dir():
        return find_model(stored).digest == part.base_digest
    return is_path(stored)


_MODELS = {"actor": "model_path", "critic": "critic.model.path"}
_RANKS = {"actor": "actor_rollout_ref.model.lora_rank", "critic": "critic.model.lora_rank"}
# The critic's follow the actor's: where only the critic differs, keys of its own were set.
_ADAPTER_KEYS = {
    "actor": lora.KEYS,
    "critic": {
        "r": "critic.model.lora_rank",
        "lora_alpha": "critic.model.lora_alpha",
        "target_modules": "critic.model.target_modules",
    },
}
_OR_NOT = "or leave it aside with trainer.resume_mode=disable"
_OTHER_MODEL = f"set model_path and the estimator as they were when it was written, {_OR_NOT}"


def _compare_shape(path: Path, found: Shape, wanted: Shape) -> None:
    for key, here in vars(wanted).items():
        if (there := getattr(found, key)) != here:
            raise OtherModel(
                f"checkpoint {path} is of another model: {key} is {there} there and {here} here; {_OTHER_MODEL}"
            )


def _compare(path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name in [*wanted, *found]:
        there, here = found.get(name), wanted.get(name)
        if there != here:
            words = ["nothing" if shape is None else " x ".join(map(str, shape)) or "1" for shape in (there, here)]
            raise OtherModel(
                f"checkpoint {path} is of another model: {name} is {words[0]} there and {words[1]} here; {_OTHER_MODEL}"
            )


# --- weights by Hugging Face's names ------------------------------------------------------------------------------


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    if isinstance(weights, TensorFiles):
        return weights.shapes()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _read_model(model: Any, folder: Path) -> tuple[Mapping[str, Tensor], Shape]:
    """The stored weights under the names of `lora.base_state`, and the shape that the stored config describes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(model, Decoder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return TensorFiles(sorted(folder.glob("model*.safetensors"))), Shape.of(config)
    # What is on disk may be cut otherwise than in the module: only they know how to put it together.
    with _no_bars():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, local_files_only=True)
    return theirs.state_dict(), type(model)(theirs).shape


@contextmanager
def _no_bars() -> Iterator[None]:
    """The progress bars of transformers would be drawn through the run's own view."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _fill(model: Any, weights: Mapping[str, Tensor]) -> None:
    if lora.has_adapters(model):
        lora.fill_adapters(model, weights)
    elif isinstance(model, Decoder):
        from_huggingface(model, weights)
    else:
        model.module.load_state_dict(dict(weights))
