"""Merging: the adapter of a checkpoint and its base as one ordinary model folder.

    planned = plan(Path("checkpoints/ragen/test/global_step_200"))      # reads, changes nothing; raises what is wrong
    print(planned)                                                      # with the size
    merge(planned)                                                      # …/global_step_200_merged, whole or not at all

The folder has the number type of the base's own files; sums are taken in float32 before they are rounded to it.
"""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ragen.checkpoint.model_folder import check_is_free, write_model_folder
from ragen.checkpoint.parts import part_of
from ragen.errors import ConfigError
from ragen.format import size_text
from ragen.model import lora
from ragen.model.load import Source, converted, find_model, load_model
from ragen.store import manifest as disk
from ragen.store.lineage import run_of


@dataclass(frozen=True)
class MergePlan:
    """What would be written."""

    source: Source
    output: Path
    dtype: torch.dtype
    num_bytes: int

    def __str__(self) -> str:
        folder, base = self.source.folder, self.source.base
        assert base is not None
        others = "" if lora.is_of(folder, base.digest) else " (not the weights that the adapter was trained on)"
        return (
            f"adapter: {folder}\n"
            f"base: {base.name}{others}\n"
            f"output: {self.output}, {size_text(self.num_bytes)} in {str(self.dtype).removeprefix('torch.')}"
        )


def plan(checkpoint: Path, output: Path | None = None, base: str | None = None) -> MergePlan:
    """What a merge would write, after all that can be checked without loading the weights.

    `base` stands for the model that the adapter itself names.
    """
    checkpoint = checkpoint.resolve()
    if checkpoint.name == "actor" and (checkpoint.parent / disk.MANIFEST).exists():
        checkpoint = checkpoint.parent
    source = _source(checkpoint, base)
    output = output or checkpoint.with_name(f"{checkpoint.name}_merged")
    check_is_free(output)
    dtype, num_parameters = _kind(source)
    planned = MergePlan(source, output, dtype, num_parameters * dtype.itemsize)
    there = next(path for path in output.absolute().parents if path.is_dir())
    if shutil.disk_usage(there).free < planned.num_bytes:
        reason = f"{os.strerror(errno.ENOSPC)}: {size_text(planned.num_bytes)} are needed"
        raise OSError(errno.ENOSPC, reason, str(there))
    return planned


def merge(planned: MergePlan) -> Path:
    """Load the base, merge the adapter into it and write the result."""
    loaded = load_model(planned.source, "cpu")  # merged there, in float32
    loaded.model.to(planned.dtype)
    write_model_folder(planned.output, part_of(loaded), run_of(planned.source.folder))
    return planned.output


def _source(checkpoint: Path, base: str | None) -> Source:
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is not a directory; give {_WANTED}")
    if (checkpoint / disk.MANIFEST).exists():
        manifest = disk.check(checkpoint, every_byte=True)
        if "actor" not in manifest.contents:
            raise ConfigError(f"{checkpoint} no longer holds an actor")
    folders = (checkpoint, checkpoint / "actor")
    if not any((folder / lora.CONFIG).exists() for folder in folders):
        if any((folder / "config.json").exists() for folder in folders):
            raise ConfigError(f"{checkpoint} holds all weights and no adapter: there is nothing to merge")
        raise ConfigError(f"{checkpoint} holds no adapter; give {_WANTED}")
    return converted(find_model(str(checkpoint), base))


_WANTED = f"a checkpoint global_step_<N> of a run with lora.rank above 0, or a folder with {lora.CONFIG}"


def _kind(source: Source) -> tuple[torch.dtype, int]:
    """The number type of the base's files, and how many parameters it has, without loading them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.model_folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return dtype, sum(parameter.numel() for parameter in model.parameters())
