"""A decoder for Llama, Mistral, Qwen2 and Qwen3 over packed tokens: one module for sampling and training.

There is no batch dimension and no padding: the tokens of many sequences are concatenated, and the caller decides what
attends to what, by the `attend` function that it passes (a cache for the sampler, whole sequences for the learner):

    hidden_T = decoder.hidden(ids_T, positions_T, attend)       # attend(layer, query, key, value) -> mixed values
    logits = decoder.logits(hidden_T[rows])                     # only where needed

q, k and v are one matrix, and so are gate and up: fewer, larger products. Rotary positions may be scaled (linear,
llama3, yarn), queries and keys normed, attention limited to a window; models that need more (`unsupported`) are Hugging
Face modules. On disk, weights have Hugging Face's names and shapes (`to_huggingface`, `from_huggingface`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ragen.config.model_name import FAMILIES
from ragen.model.activations import layers_to_recompute
from ragen.model.pointwise import add_norm, norm, norm_heads, split_heads, swiglu
from ragen.protocols import Attend

if TYPE_CHECKING:
    from ragen.model.huggingface import HuggingFaceModel

SCALED_ROPES = ("linear", "llama3", "yarn")  # types whose frequencies do not depend on the length
TrainableModel: TypeAlias = "Decoder | HuggingFaceModel"  # an nn.Module that is a `protocols.SampledModel`


@dataclass(frozen=True)
class Shape:
    """The sizes that define a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    tied_embeddings: bool
    qk_norm: bool = False
    scaled_frequencies: tuple[float, ...] = ()  # of rotary positions; empty: those of `rope_theta`
    rope_gain: float = 1.0  # of cosines and sines
    window: int | None = None  # the number of tokens that a token attends to, itself included; None: all before it

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """The shape of a Hugging Face config; raises on what this module does not implement."""
        reasons = unsupported(config)
        if reasons:
            raise ValueError(f"not a decoder of the Llama family: {', '.join(reasons)}")
        rope = config.rope_parameters
        frequencies, gain = _scaled_frequencies(config)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            rope_theta=rope["rope_theta"],
            norm_eps=config.rms_norm_eps,
            qkv_bias=config.model_type == "qwen2",
            tied_embeddings=bool(config.tie_word_embeddings),
            qk_norm=config.model_type == "qwen3",
            scaled_frequencies=frequencies,
            rope_gain=gain,
            window=config.sliding_window if config.model_type == "mistral" else None,
        )


def unsupported(config: Any) -> list[str]:
    """What this module does not implement of a Hugging Face config: such a model runs as a `HuggingFaceModel`.

    Old names in `config.json` (`rope_scaling`, `rope_theta`) are `rope_parameters` once transformers has read it.
    """
    if config.model_type not in FAMILIES:
        return [f"model_type {config.model_type}"]
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    found = {
        f"rope type {kind}": kind not in ("default", *SCALED_ROPES),
        "partly rotated heads": rope.get("partial_rotary_factor") not in (None, 1.0),
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding window in some layers": bool(getattr(config, "use_sliding_window", False)),
    }
    return [reason for reason, is_there in found.items() if is_there]


def _scaled_frequencies(config: Any) -> tuple[tuple[float, ...], float]:
    """As transformers computes them, and what it multiplies cosines and sines by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in SCALED_ROPES:
        return (), 1.0
    frequencies, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(gain)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        return add_norm(x, delta, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.attention_norm = Norm(shape.hidden_size, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, sum(self.heads) * shape.head_dim, bias=shape.qkv_bias)
        self.query_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.key_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.mlp_norm = Norm(shape.hidden_size, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, of all tokens or only of `rows`; the others are then only attended to."""
        mixed = attend(*self.heads_of(x, cos, sin)).flatten(-2)
        if rows is not None:
            x, mixed = x[rows], mixed[rows]
        x, normed = self.mlp_norm.after(x, self.out(mixed))
        return x + self.down(swiglu(self.gate_up(normed)))

    def heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return split_heads(self.project(self.attention_norm(x)), cos, sin, self.heads)

    def project(self, normed: Tensor) -> Tensor:
        """All heads [T, heads, head_dim]: queries, keys, values, before rotary positions."""
        heads = self.qkv(normed).unflatten(-1, (-1, self.shape.head_dim))
        if self.query_norm is None or self.key_norm is None:
            return heads
        return norm_heads(heads, self.query_norm.weight, self.key_norm.weight, self.heads, self.shape.norm_eps)


class Decoder(nn.Module):
    """The whole model. `gradient_checkpointing` trades one more forward pass for the memory of activations: on CUDA in
    as many layers as the free memory asks for, elsewhere in all.
    """

    frequencies: Tensor
    is_cacheable = True

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.gradient_checkpointing = False
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        self.head = None if shape.tied_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.scaled_frequencies:
            frequencies = torch.tensor(shape.scaled_frequencies, dtype=torch.float32)
        else:
            frequencies = shape.rope_theta ** -(
                torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            )
        self.register_buffer("frequencies", frequencies, persistent=False)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """The last hidden state, normalised, of each token or only of `rows`, which is cheaper."""
        x, cos, sin = self._start(ids, positions)
        attend = self._within_window(attend)
        num_recomputed = self._num_recomputed(x, len(ids) if rows is None else len(rows))
        for index, layer in enumerate(self.layers):
            wanted = rows if index == len(self.layers) - 1 else None
            if index < num_recomputed:
                x = checkpoint(layer, x, cos, sin, partial(attend, index), wanted, use_reentrant=False)
            else:
                x = layer(x, cos, sin, partial(attend, index), wanted)
        return self.norm(x)

    def _num_recomputed(self, x: Tensor, num_rows: int) -> int:
        """How many layers are recomputed in the backward pass: the first, since the last ones are then gone already."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return 0
        return layers_to_recompute(self.shape, x, num_rows) if x.is_cuda else len(self.layers)

    def fill(self, ids: Tensor, positions: Tensor, attend: Any) -> None:
        """Only fill a cache: of the last layer, compute nothing but keys and values."""
        x, cos, sin = self._start(ids, positions)
        *layers, last = self.layers
        assert isinstance(last, Layer)
        for index, layer in enumerate(layers):
            x = layer(x, cos, sin, partial(self._within_window(attend), index))
        _, key, value = last.heads_of(x, cos, sin)
        attend.store(len(layers), key, value)

    def _start(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self.angles(positions)
        return self.embed(ids), cos[:, None], sin[:, None]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [T, head_dim / 2]."""
        # Angles always in float32: at position 3,000 bf16 would be off by whole radians.
        angles, dtype = positions[:, None].float() * self.frequencies.float(), self.embed.weight.dtype
        return (angles.cos() * self.shape.rope_gain).to(dtype), (angles.sin() * self.shape.rope_gain).to(dtype)

    def _within_window(self, attend: Attend) -> Attend:
        return attend if self.window is None else partial(attend, window=self.window)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    @property
    def window(self) -> int | None:
        return self.shape.window

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight


# --- weights under Hugging Face's names ----------------------------------------------------------------------------

# Our name -> theirs, within a layer. Several names are the rows of one matrix of ours.
_LAYER_NAMES = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "query_norm.weight": ("self_attn.q_norm.weight",),
    "key_norm.weight": ("self_attn.k_norm.weight",),
    "out.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
ADAPTERS = "adapters."  # prefix of the names of adapter weights, see `lora`
_OUTER_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def _their_names(ours: str) -> tuple[str, ...]:
    if ours in _OUTER_NAMES:
        return (_OUTER_NAMES[ours],)
    _, index, name = ours.split(".", 2)
    return tuple(f"model.layers.{index}.{theirs}" for theirs in _LAYER_NAMES[name])


def _row_counts(shape: Shape, ours: str) -> list[int]:
    """The number of rows of our matrix that belong to each of theirs."""
    if "qkv" in ours:
        return [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    return [shape.intermediate_size] * 2


def _own_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's weights, without adapters."""
    return {name: weight for name, weight in decoder.state_dict().items() if not name.startswith(ADAPTERS)}


def linear_layers(decoder: Decoder) -> list[tuple[str, nn.Linear, dict[str, int]]]:
    """Every linear layer but the head: our name, the layer, and their names with their numbers of rows."""
    found = []
    for index, layer in enumerate(decoder.layers):
        for ours in ("qkv", "out", "gate_up", "down"):
            name, linear = f"layers.{index}.{ours}", getattr(layer, ours)
            theirs = [weight.removesuffix(".weight") for weight in _their_names(f"{name}.weight")]
            counts = [linear.out_features] if len(theirs) == 1 else _row_counts(decoder.shape, name)
            found.append((name, linear, dict(zip(theirs, counts, strict=True))))
    return found


def to_huggingface(decoder: Decoder) -> dict[str, Tensor]:
    """Our weights under their names; views, nothing is copied."""
    state: dict[str, Tensor] = {}
    for ours, weight in _own_state(decoder).items():
        names = _their_names(ours)
        parts = (weight,) if len(names) == 1 else weight.split(_row_counts(decoder.shape, ours))
        state |= dict(zip(names, parts, strict=True))
    return state


def from_huggingface(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy weights under their names into the module; raises if any is missing."""
    wanted = {name for ours in _own_state(decoder) for name in _their_names(ours)}
    missing = sorted(wanted - set(state))
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, for example {missing[0]}")
    with torch.no_grad():
        for ours, weight in _own_state(decoder).items():
            weight.copy_(torch.cat([state[name].to(weight) for name in _their_names(ours)]))
