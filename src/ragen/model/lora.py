"""LoRA: a frozen model, and two small trainable matrices for each of its linear layers.

    add_adapters(model, rank=64, alpha=32)       # y = W x + alpha / rank * B A x; only A and B can be trained now
    with adapters_off(model):                    # the model is its base
        …
    reference = BaseModel(model)                 # the base as a model, without a second set of weights
    merged_state(model)                          # W + alpha / rank * B A, under Hugging Face's names
    save_adapter(model, folder, "Qwen/Qwen2.5-0.5B")     # in peft's format: peft.PeftModel.from_pretrained opens it
    load_adapter(model, folder)                  # ours or peft's
    merge_adapters(model)                        # in place: an ordinary model again

A is initialised as in peft and B to zero, so an untrained model equals its base. Adapters belong to Hugging Face's
layers, so q, k and v have three, though the decoder computes them as one matrix; there their A are stacked in one
parameter, and so are their B. Random numbers depend only on the seed and the layer's name, so every worker has the
same. Unlike peft there is no dropout: the sampled and the trained policy must be the same.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragen.coerce import convert
from ragen.errors import ConfigError
from ragen.model.decoder import Decoder, Shape, TrainableModel, linear_layers, to_huggingface
from ragen.prng import bits
from ragen.protocols import Attend

ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's file names
DIGEST = "base_digest.txt"  # ours: the fingerprint of the base's weights, see `digest`
KEYS = {"r": "lora.rank", "lora_alpha": "lora.alpha", "target_modules": "lora.target_modules"}  # peft's name -> ours
_PREFIX = "base_model.model."  # of weight names in peft


class Linear(NamedTuple):
    """A linear layer of the model, and the Hugging Face layers that its rows belong to."""

    name: str
    module: nn.Linear
    rows: dict[str, int]  # Hugging Face's name -> number of rows


class Adapter(nn.Module):
    """What is added to the output of one linear layer; rows of layers without an adapter do not change."""

    def __init__(self, linear: Linear, wanted: Sequence[str], rank: int, scaling: float, seed: int):
        super().__init__()
        self.rows, self.wanted, self.rank, self.scaling = linear.rows, tuple(wanted), rank, scaling
        self.on = True
        weight = linear.module.weight
        self.A = nn.Parameter(torch.cat([_first_a(name, rank, weight.shape[1], seed) for name in wanted]).to(weight))
        num_rows = sum(self.rows[name] for name in wanted)
        self.B = nn.Parameter(torch.zeros(num_rows, rank, dtype=weight.dtype, device=weight.device))
        self.hook = linear.module.register_forward_hook(self.add)

    def add(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """The layer's output plus the adapter's."""
        if not self.on:
            return output
        lows = F.linear(inputs[0].flatten(0, -2), self.A).chunk(len(self.wanted), dim=-1)
        pairs = dict(zip(self.wanted, zip(lows, self._highs(), strict=True), strict=True))
        parts = [
            self._with(part, *pairs[name]) if name in pairs else part
            for name, part in zip(self.rows, output.flatten(0, -2).split([*self.rows.values()], dim=-1), strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).view_as(output)

    def _with(self, part: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.addmm(part, low, high.t(), alpha=self.scaling)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A [rank, inputs] and B [outputs, rank] of each of Hugging Face's layers; views."""
        return dict(zip(self.wanted, zip(self.A.chunk(len(self.wanted)), self._highs(), strict=True), strict=True))

    def _highs(self) -> tuple[Tensor, ...]:
        return self.B.split([self.rows[name] for name in self.wanted])


class Adapters(nn.ModuleDict):
    """All adapters of a model, by layer name, and their settings."""

    def __init__(self, adapters: Mapping[str, Adapter], rank: int, alpha: int):
        super().__init__({name.replace(".", "/"): adapter for name, adapter in adapters.items()})
        self.rank, self.alpha = rank, alpha

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: pair for adapter in self.each() for name, pair in adapter.pairs().items()}

    def each(self) -> list[Adapter]:
        return [adapter for adapter in self.values() if isinstance(adapter, Adapter)]

    def deltas(self) -> Iterator[tuple[str, Tensor]]:
        """What is added to each Hugging Face weight, in float32."""
        with torch.no_grad():
            for name, (a, b) in self.pairs().items():
                yield f"{name}.weight", self.alpha / self.rank * (b.float() @ a.float())


def _first_a(name: str, rank: int, num_inputs: int, seed: int) -> Tensor:
    """Kaiming-uniform with a = √5, as in peft and in linear layers of torch: within ±1/√inputs."""
    generator = torch.Generator().manual_seed(bits("adapter", seed, name, num_bits=64) >> 1)
    values = torch.empty(rank, num_inputs)
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


# --- adding, switching, merging -----------------------------------------------------------------------------------


def add_adapters(
    model: TrainableModel, rank: int, alpha: int, target_modules: str | Sequence[str] = ALL_LINEAR, seed: int = 0
) -> None:
    """Freeze the model and add adapters to its linear layers.

    `target_modules` are Hugging Face's names or their last parts, as a list or with commas: `q_proj,v_proj`; or, as in
    peft, a regular expression for whole names: `.*layers\\.[01]\\..*_proj`. `all-linear` is every linear layer but the
    output layer.
    """
    if has_adapters(model):
        raise ValueError("the model already has adapters: call merge_adapters first")
    if rank < 1:
        raise ConfigError(f"rank={rank}: must be at least 1")
    linears = _linears(model)
    names = _wanted_names(target_modules, linears)
    model.requires_grad_(False)
    adapters = {}
    for linear in linears:
        wanted = [name for name in linear.rows if name in names]
        if wanted:
            adapters[linear.name] = Adapter(linear, wanted, rank, alpha / rank, seed)
    model.adapters = Adapters(adapters, rank, alpha)


def has_adapters(model: TrainableModel) -> bool:
    return isinstance(getattr(model, "adapters", None), Adapters)


@contextmanager
def adapters_off(model: TrainableModel) -> Iterator[None]:
    """Inside this context the model computes as its base."""
    adapters = _adapters(model).each()
    before = [adapter.on for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.on = False
        yield
    finally:
        for adapter, on in zip(adapters, before, strict=True):
            adapter.on = on


class BaseModel:
    """A model with its adapters off, as a `LanguageModel`."""

    def __init__(self, model: TrainableModel):
        _adapters(model)
        self.model = model

    @property
    def shape(self) -> Shape:
        return self.model.shape

    @property
    def is_cacheable(self) -> bool:
        return self.model.is_cacheable

    @property
    def window(self) -> int | None:
        return self.model.window

    @torch.no_grad()
    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        with adapters_off(self.model):
            return self.model.hidden(ids, positions, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)  # the output layer has no adapter

    @property
    def head_weight(self) -> Tensor | None:
        return self.model.head_weight


def merged_state(model: TrainableModel) -> dict[str, Tensor]:
    """The weights of the equivalent model without adapters, under Hugging Face's names and in the model's type.

    The model does not change; weights without an adapter are shared, not copied.
    """
    state = base_state(model)
    for name, delta in _adapters(model).deltas():
        state[name] = (state[name].float() + delta).to(state[name].dtype)
    return state


def merge_adapters(model: TrainableModel) -> None:
    """Turn the model into an equivalent one without adapters, with all weights trainable."""
    adapters, state = _adapters(model), base_state(model)
    for name, delta in adapters.deltas():
        state[name].copy_(state[name].float() + delta)
    for adapter in adapters.each():
        adapter.hook.remove()
    del model.adapters
    model.requires_grad_(True)


def base_state(model: TrainableModel) -> dict[str, Tensor]:
    """The frozen weights under Hugging Face's names, not copied."""
    return to_huggingface(model) if isinstance(model, Decoder) else model.module.state_dict()


def _adapters(model: TrainableModel) -> Adapters:
    adapters = getattr(model, "adapters", None)
    if not isinstance(adapters, Adapters):
        raise ValueError("the model has no adapters: call add_adapters or load_adapter first")
    return adapters


def _linears(model: TrainableModel) -> list[Linear]:
    if isinstance(model, Decoder):
        return [Linear(*layer) for layer in linear_layers(model)]
    head = model.module.get_output_embeddings()
    return [
        Linear(name, module, {name: module.weight.shape[0]})
        for name, module in model.module.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _wanted_names(target_modules: str | Sequence[str], linears: Sequence[Linear]) -> set[str]:
    """The Hugging Face names of the selected layers."""
    there = [name for linear in linears for name in linear.rows]
    if not there:
        raise ConfigError("LoRA: this model has no linear layers but the output layer; train all its weights instead")
    if ALL_LINEAR in ([target_modules] if isinstance(target_modules, str) else target_modules):
        return set(there)
    if isinstance(target_modules, str) and not re.fullmatch(r"[\w.,\s-]*", target_modules):
        found = {target_modules: _matching(target_modules, there)}
    else:
        parts = target_modules.split(",") if isinstance(target_modules, str) else target_modules
        wanted = [part.strip() for part in parts if part.strip()]
        found = {end: [name for name in there if f".{name}".endswith(f".{end}")] for end in wanted}
    unknown = [end for end, names in found.items() if not names]
    if unknown or not found:
        what = f"no linear layer is called {', '.join(unknown)}" if unknown else "no linear layer given"
        raise ConfigError(
            f"target_modules={_shown(target_modules)}: {what}. Choose from "
            f"{', '.join(dict.fromkeys(map(_last, there)))}, or {ALL_LINEAR}"
        )
    return {name for names in found.values() for name in names}


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    try:
        return [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ConfigError(f"target_modules={pattern}: not a regular expression: {error}") from None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(target_modules: str | Sequence[str]) -> str:
    return target_modules if isinstance(target_modules, str) else ",".join(target_modules)


def _typed(value: Any) -> str:
    """As on the command line."""
    return f"[{_shown(value)}]" if isinstance(value, list) else str(value)


# --- on disk ------------------------------------------------------------------------------------------------------


def adapter_state(model: TrainableModel) -> dict[str, Tensor]:
    """A and B under peft's names; views."""
    state: dict[str, Tensor] = {}
    for name, (a, b) in _adapters(model).pairs().items():
        state |= {f"{_PREFIX}{name}.lora_A.weight": a.detach(), f"{_PREFIX}{name}.lora_B.weight": b.detach()}
    return state


def adapter_config(model: TrainableModel, base_model_name: str) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    adapters = _adapters(model)
    names = set(adapters.pairs())
    ends = {_last(name) for name in names}
    ends_suffice = names == {name for linear in _linears(model) for name in linear.rows if _last(name) in ends}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(ends if ends_suffice else names),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def save_adapter(model: TrainableModel, folder: str | Path, base_model_name: str) -> None:
    """Write the adapter in peft's format."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(adapter_config(model, base_model_name), indent=2), encoding="utf-8")
    # Their layers are rows of our parameters, and safetensors rejects shared memory.
    state = {name: weight.clone().contiguous() for name, weight in adapter_state(model).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapter(model: TrainableModel, folder: str | Path) -> None:
    """Load the model's adapters from a directory, ours or peft's; adds adapters to a model without them."""
    from safetensors.torch import load_file

    settings = read_config(folder)
    if not has_adapters(model):
        add_adapters(model, settings["r"], settings["lora_alpha"], settings["target_modules"])
    check_settings(model, settings, folder)
    state = load_file(Path(folder) / WEIGHTS)
    check_shapes(model, {name: tuple(weight.shape) for name, weight in state.items()}, folder)
    fill_adapters(model, state)


def fill_adapters(model: TrainableModel, state: Mapping[str, Tensor]) -> None:
    """Copy the weights that `adapter_state` lists into the model."""
    for name, weight in adapter_state(model).items():
        weight.copy_(state[name])


def read_config(folder: str | Path) -> dict[str, Any]:
    """The settings of a stored adapter; raises on what this module does not implement."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise ConfigError(f"{folder} is not an adapter directory (no {CONFIG})")
    try:
        settings = {"base_model_name_or_path": None} | json.loads(path.read_bytes())
        kind, wanted = settings["peft_type"], {key: convert(settings[key], hint, key) for key, hint in _HINTS.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not an adapter config ({type(error).__name__}: {error}): copy it again from its source"
        ) from None
    if not (path.parent / WEIGHTS).exists():
        raise ConfigError(
            f"{folder} has no {WEIGHTS}: copy it there. A pickle (adapter_model.bin) can run any code, so it is not "
            "loaded: open it with peft and save it with safe_serialization=True"
        )
    unknown = [f"{key}={settings[key]}" for key in _MUST_BE_EMPTY if settings.get(key)]
    if str(settings.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        unknown.append(f"init_lora_weights={settings['init_lora_weights']}, which changes the base")
    if kind != "LORA" or settings.get("bias", "none") != "none" or unknown:
        reason = f"peft_type {kind}, bias {settings.get('bias', 'none')}" if not unknown else ", ".join(unknown)
        raise ConfigError(
            f"{path}: only plain LoRA is supported, not {reason}; merge it with peft and use that directory"
        )
    return settings | wanted


_HINTS = {
    "r": int,
    "lora_alpha": int | float,
    "target_modules": str | list[str],
    "base_model_name_or_path": str | None,
}
# Initialisations that move a part of the base's weights into the adapter, so it fits no other base.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
_MUST_BE_EMPTY = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "exclude_modules",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)


def check_settings(
    model: TrainableModel, settings: Mapping[str, Any], folder: str | Path, keys: Mapping[str, str] = KEYS
) -> None:
    """Raise unless a stored adapter has the model's rank, alpha and layers; `keys` are the names of these settings."""
    here = adapter_config(model, "")
    different = [key for key in ("r", "lora_alpha") if settings[key] != here[key]]
    if _wanted_names(settings["target_modules"], _linears(model)) != set(_adapters(model).pairs()):
        different.append("target_modules")
    if different:
        there, now = (
            " ".join(f"{keys[key]}={_typed(values[key])}" for key in different) for values in (settings, here)
        )
        raise ConfigError(f"the adapter in {folder} has {there}, but this run has {now}")


def is_of(folder: str | Path, digest: str) -> bool:
    """Whether a stored adapter was trained on weights with this digest; True if it does not say."""
    path = Path(folder) / DIGEST
    return not digest or not path.exists() or path.read_text(encoding="utf-8").strip() == digest


def check_shapes(model: TrainableModel, found: Mapping[str, tuple[int, ...]], folder: str | Path) -> None:
    """Raise unless a stored adapter fits this model."""
    wanted = {name: tuple(weight.shape) for name, weight in adapter_state(model).items()}
    for name in [*wanted, *found]:
        there, here = found.get(name), wanted.get(name)
        if there != here:
            texts = ["missing" if shape is None else " x ".join(map(str, shape)) for shape in (there, here)]
            raise ConfigError(
                f"the adapter in {folder} belongs to another model: {name} is {texts[0]} there and {texts[1]} here"
            )
