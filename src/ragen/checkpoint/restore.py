"""Restoring a checkpoint, bit for bit: everything is checked before the first weight changes.

state = restore(path, parts)       # fills modules and optimizers, returns the trainer's state
"""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ragen.checkpoint.model_folder import no_progress_bars
from ragen.checkpoint.parts import Part, Parts
from ragen.checkpoint.save import OPTIMIZER, OPTIMIZER_NUMBERS, STATE
from ragen.checkpoint.tensor_file import TensorFiles
from ragen.config.pocket_defaults import NAMES as EMBEDDED
from ragen.errors import ConfigError
from ragen.model import lora
from ragen.model.decoder import Decoder, Shape, TrainableModel, from_huggingface
from ragen.model.load import VALUE_HEAD, find_model
from ragen.store import manifest as disk
from ragen.store.lineage import is_path
from ragen.store.manifest import Manifest, OtherModel


def restore(path: str | os.PathLike[str], parts: Parts) -> dict[str, Any]:
    """Fill modules and optimizers from a checkpoint, and give the trainer's state back.

    Everything is checked before the first weight is changed. From a checkpoint without optimizer state an optimizer
    takes the weights and the step of its schedule; the state is empty then.
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
    folder, num_steps = path / name, manifest.step
    weights = _open_adapter(path, name, part) if lora.has_adapters(part.backbone) else _open_model(path, name, part)
    value_head: Mapping[str, Tensor] = {}
    optimizer: Mapping[str, Tensor] = {}
    if part.value_head is not None:
        value_head = TensorFiles([folder / VALUE_HEAD])
        _compare(path, value_head.shapes(), _shapes(part.value_head.state_dict()))
    if part.optimizer is not None and "optimizer" in manifest.contents[name]:
        optimizer = TensorFiles([path / f"{name}_optimizer" / OPTIMIZER])
        known, found = part.optimizer.shapes(part.model), optimizer.shapes()
        _compare(path, found, {key: shape for key, shape in known.items() if key in found})
        num_steps = json.loads((path / f"{name}_optimizer" / OPTIMIZER_NUMBERS).read_bytes())["num_steps"]
    return _Stored(part, weights, value_head, optimizer, num_steps)


def _open_model(path: Path, name: str, part: Part) -> Mapping[str, Tensor]:
    if (path / name / lora.CONFIG).exists():
        raise OtherModel(
            f"checkpoint {path} holds an adapter of the {name}, but this run trains all weights: set {_RANKS[name]} "
            f"and the alpha as they were, or start from model_path={path}, the adapter merged into its base"
        )
    try:
        weights, shape = _read_model(part.backbone, path / name)
    except ValueError as error:
        raise OtherModel(f"checkpoint {path} is of another model: {error}; {_OTHER_MODEL}") from error
    for key, here in vars(part.backbone.shape).items():
        if (there := getattr(shape, key)) != here:
            raise OtherModel(
                f"checkpoint {path} is of another model: {key} is {there} there and {here} here; {_OTHER_MODEL}"
            )
    _compare(path, _shapes(weights), _shapes(lora.base_state(part.backbone)))
    return weights


def _open_adapter(path: Path, name: str, part: Part) -> Mapping[str, Tensor]:
    if not (path / name / lora.CONFIG).exists():
        raise OtherModel(
            f"checkpoint {path} holds all weights of the {name}, but this run trains an adapter: set {_RANKS[name]}=0, "
            f"or train an adapter of it with model_path={path}"
        )
    weights, settings = TensorFiles([path / name / lora.WEIGHTS]), lora.read_config(path / name)
    base = settings["base_model_name_or_path"]
    if not _is_base(path / name, base, part):
        raise OtherModel(
            f"the adapter in {path / name} was trained on {base}, and {part.base_model} has different weights: "
            f"set {_MODELS[name]}={base}, with its original weights, {_OR_NOT}"
        )
    try:
        lora.check_settings(part.backbone, settings, path / name, _ADAPTER_KEYS[name])
        lora.check_shapes(part.backbone, weights.shapes(), path / name)
    except ConfigError as error:
        raise OtherModel(f"{error}: set it as it was when that was written, {_OR_NOT}") from None
    return weights


def _is_base(folder: Path, stored: str | None, part: Part) -> bool:
    """Whether a stored adapter belongs to the base of a part. An older checkpoint has no digest, only a name."""
    if (folder / lora.DIGEST).exists() or not stored or not part.base_digest or stored == part.base_model:
        return lora.is_of(folder, part.base_digest)
    if stored in EMBEDDED or Path(stored).is_dir():
        return find_model(stored).digest == part.base_digest
    return is_path(stored)


_MODELS = {"actor": "model_path", "critic": "critic.model.path"}
_RANKS = {"actor": "actor_rollout_ref.model.lora_rank", "critic": "critic.model.lora_rank"}
# The critic's keys follow the actor's: where only the critic differs, its own keys were set.
_CRITIC_KEYS = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}
_ADAPTER_KEYS = {
    "actor": lora.KEYS,
    "critic": {name: f"critic.model.{key}" for name, key in _CRITIC_KEYS.items()},
}
_OR_NOT = "or ignore it with trainer.resume_mode=disable"
_OTHER_MODEL = f"set model_path and the estimator as they were when it was written, {_OR_NOT}"


def _compare(path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name in [*wanted, *found]:
        there, here = found.get(name), wanted.get(name)
        if there != here:
            shapes = ["nothing" if shape is None else " x ".join(map(str, shape)) or "1" for shape in (there, here)]
            raise OtherModel(
                f"checkpoint {path} is of another model: {name} is {shapes[0]} there and {shapes[1]} here; "
                f"{_OTHER_MODEL}"
            )


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    if isinstance(weights, TensorFiles):
        return weights.shapes()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _read_model(model: TrainableModel, folder: Path) -> tuple[Mapping[str, Tensor], Shape]:
    """The stored weights under the names of `lora.base_state`, and the shape that the stored config describes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(model, Decoder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return TensorFiles(sorted(folder.glob("model*.safetensors"))), Shape.of(config)
    # What is on disk may be cut otherwise than in the module: only they know how to put it together.
    with no_progress_bars():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, local_files_only=True)
    return theirs.state_dict(), type(model)(theirs).shape


def _fill(model: TrainableModel, weights: Mapping[str, Tensor]) -> None:
    if lora.has_adapters(model):
        lora.fill_adapters(model, weights)
    elif isinstance(model, Decoder):
        from_huggingface(model, weights)
    else:
        model.module.load_state_dict(dict(weights))
