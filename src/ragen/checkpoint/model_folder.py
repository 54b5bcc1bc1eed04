"""A model as a folder in Hugging Face's layout, or its adapter in peft's.

write_model_folder(Path("models/mine"), part_of(loaded), run=run_folder)      # whole or not at all
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ragen.checkpoint.parts import Part
from ragen.checkpoint.tensor_file import num_bytes, write_tensors
from ragen.errors import ConfigError
from ragen.model import lora
from ragen.model.decoder import Decoder
from ragen.model.load import VALUE_HEAD
from ragen.store import lineage
from ragen.store import manifest as disk
from ragen.store.fsync import sync
from ragen.store.lineage import CHECKPOINT
from ragen.store.manifest import REPLACED, FileSum

SHARD_BYTES = 5_000_000_000  # larger weights are cut into several files


def write_model(folder: Path, part: Part, sums: dict[Path, FileSum]) -> None:
    """A new folder in Hugging Face's layout, or in peft's. Sizes and checksums of large files are added to `sums`."""
    folder.mkdir()
    if lora.has_adapters(part.backbone):
        write_json(folder / lora.CONFIG, lora.adapter_config(part.backbone, part.base_model))
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
        with no_progress_bars():
            part.backbone.module.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    if part.tokenizer is not None:
        part.tokenizer.save_pretrained(folder)
    if part.value_head is not None:
        path = folder / VALUE_HEAD
        sums[path] = FileSum(*write_tensors(path, part.value_head.state_dict()))


def write_model_folder(target: Path, part: Part, run: Path | None = None) -> None:
    """`write_model` to a new folder, whole or not at all, and synced, with the config of its run (`lineage`)."""
    check_is_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")  # not `.part`: a run that saves here removes those
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        sums: dict[Path, FileSum] = {}
        write_model(temporary, part, sums)
        for path in set(temporary.iterdir()) - set(sums):
            synced_sum(path)
        if run is not None:
            lineage.keep(run, temporary)
        sync(temporary)
        move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_is_free(target: Path) -> None:
    """Refuse an existing target, and one inside a checkpoint, whose files are all listed."""
    if target.exists():
        raise ConfigError(f"{target} exists, and nothing is overwritten: choose another directory with --output")
    for parent in target.resolve().parents:
        if CHECKPOINT.fullmatch(parent.name) and (parent / disk.MANIFEST).exists():
            raise ConfigError(
                f"{target} is inside the checkpoint {parent}: choose a directory outside it with --output"
            )


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
        write_json(folder / "model.safetensors.index.json", index)


def _cut(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights in order, in shards that do not exceed `SHARD_BYTES` unless a single one does."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and num_bytes(shards[-1]) + weight.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = weight
    return shards


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def synced_sum(path: Path) -> FileSum:
    """Sync a file written by a library, as readable as its folder: safetensors writes for its owner only."""
    path.chmod(path.parent.stat().st_mode & 0o666)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return disk.file_sum(path)


def move_into_place(temporary: Path, target: Path) -> None:
    """Give a written checkpoint its name; an existing one keeps a second name until it is replaced."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        if replaced.exists():
            delete(replaced)
        os.rename(target, replaced)
    os.rename(temporary, target)
    sync(target.parent)


def delete(path: Path) -> None:
    """Remove a checkpoint, its name first: half a checkpoint must not look like one."""
    hidden = path.with_name(f".{path.name}.part")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """The progress bars of transformers would be drawn through the run's own view."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
