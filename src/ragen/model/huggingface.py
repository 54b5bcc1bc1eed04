"""Any Hugging Face causal LM behind the interface of `decoder.Decoder`: packed tokens and an `attend` function.

    model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)).check()

The module is theirs; only its attention is ours. Transformers registers attention functions by name and passes them the
keywords of the forward call: `attend` is one of these. It also does the masking: transformers makes no mask for an
attention without a mask function of the same name.

Not every layer is attention. Convolutions, linear attention and state spaces carry something from each token of a row
to the next, so also from one packed sequence into the other. `check` finds out by computing: sequences of such a model
are rows of a padded batch (`is_packable` is False), and each sampled token computes its conversation again, because the
sampler's cache does not hold what they carry (`is_cacheable` is False).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ragen.errors import ConfigError
from ragen.model.attention import Layout, Packed
from ragen.model.decoder import Shape
from ragen.protocols import Attend

ATTENTION = "ragen"
CHECKED = (5, 4)  # lengths of the two sequences of a check
NOT_THEIR_FUNCTION = "their attention is not one of transformers' attention functions, so ours cannot replace it"
OVERSHOOT = 8  # a burst may compute this many tokens beyond the end of a reply, and discards them
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")  # beyond the original context, the longest sequence changes all others


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple:
    """Theirs: [sequences, heads, tokens, head_dim]; ours: [tokens, heads, head_dim], scaled by the root of head_dim."""
    for name in ("softcap", "s_aux"):
        if keywords.get(name) is not None:
            raise ConfigError(f"this model needs an unsupported kind of attention ({name})")
    head_dim = query.shape[-1]
    scaling = keywords.get("scaling")
    if scaling is not None and not math.isclose(scaling, head_dim**-0.5):
        query = query * (scaling * head_dim**0.5)
    attend: _ModuleAttend = keywords["attend"]
    window = keywords.get("sliding_window")
    options = {} if window is None else {"window": window}
    return attend(module.layer_idx, query, key, value, options), None  # type: ignore[arg-type]  # an int


class _ModuleAttend:
    """An `attend` function for tokens in rows of a batch: all in one, or, `padded`, each sequence in its own."""

    def __init__(self, attend: Attend, padded: Layout | None):
        self.attend, self.padded = attend, padded

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, int]) -> Tensor:
        if self.padded is None:
            parts = (part[0].transpose(0, 1) for part in (query, key, value))
            return self.attend(layer, *parts, **options)[None]
        mixed = self.attend(layer, *(self.padded.unpad(part) for part in (query, key, value)), **options)
        return self.padded.pad(mixed).transpose(1, 2)


AttentionInterface.register(ATTENTION, _attention)


def refused(kind: str, reason: str) -> ConfigError:
    return ConfigError(
        f"models of type {kind} are not supported: {reason}. Use a model of another family, for example Qwen3 or Llama"
    )


class HuggingFaceModel(nn.Module):
    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        config = module.config.get_text_config()
        num_heads = getattr(config, "num_attention_heads", None) or 1  # pure state spaces have none
        self.shape = Shape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", 0),  # GPT-2 has no such field, and nothing reads it
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            rope_theta=0.0,  # not used here, like the next two
            norm_eps=0.0,
            qkv_bias=False,
            tied_embeddings=bool(config.tie_word_embeddings),
        )
        self.gradient_checkpointing = False  # no effect here
        self.is_packable = self.is_cacheable = True  # until `check`, like the next
        self.window: int | None = None
        self.max_positions = _max_positions(module, config)  # 0: unlimited

    @property
    def kind(self) -> str:
        return self.module.config.model_type

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        hidden = self._run(self.module.base_model, ids, positions, attend).last_hidden_state
        hidden = hidden[0] if self.is_packable else hidden[attend.sequences, attend.positions]  # type: ignore[attr-defined]
        return hidden if rows is None else hidden[rows]

    def _run(self, module: Any, ids: Tensor, positions: Tensor, attend: Attend) -> Any:
        if self.max_positions and int(positions.max()) >= self.max_positions:
            raise ConfigError(
                f"this {self.kind} model has {self.max_positions} positions, and a conversation needs more: set "
                f"actor_rollout_ref.rollout.max_model_len={self.max_positions - OVERSHOOT}"
            )
        padded = None
        ids, positions = ids[None], positions[None]
        if not self.is_packable:
            # Padding follows the tokens of a row, and these layers look back only.
            assert isinstance(attend, Layout), "only whole sequences can be computed"
            padded, size = attend, (len(attend.lengths), attend.longest)
            ids = ids.new_zeros(size).index_put((padded.sequences, padded.positions), ids[0])
            positions = torch.arange(padded.longest, device=ids.device).expand(size)
        attend = _ModuleAttend(attend, padded)
        return module(input_ids=ids, position_ids=positions, use_cache=False, attend=attend)

    def fill(self, ids: Tensor, positions: Tensor, attend: Attend) -> None:
        self.hidden(ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.module.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))  # some keep the residual stream in float32

    @property
    def head_weight(self) -> Tensor | None:
        head = self.module.get_output_embeddings()
        return head.weight if type(head) is nn.Linear and head.bias is None else None

    # --- what kind of model it is -----------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self) -> "HuggingFaceModel":
        """Find out how to run this model, by a few short passes; raise if it cannot be run right."""
        try:
            with _in_float32(self):
                self._check()
        except torch.OutOfMemoryError:  # of a GPU that the model itself just fits into
            self._check()
        return self

    def _check(self) -> None:
        device = next(self.parameters()).device
        ids = torch.arange(sum(CHECKED), device=device) % (self.shape.vocab_size - 1) + 1  # 0 is often padding
        parts = ids.split(CHECKED)
        self.is_packable = True
        try:
            alone = [self._whole(part, (len(part),)) for part in parts]
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # of their code, which may do anything
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise refused(
                self.kind, f"their module fails with our attention ({type(error).__name__}: {error})"
            ) from error
        start, first = parts[0][:3], _Recording((len(parts[0]),), device)
        if not _close(self._run(self.module, parts[0], first.positions, first).logits[0], self.logits(alone[0])):
            raise refused(self.kind, "they transform their logits")
        if not _close(self._whole(start, (len(start),)), alone[0][: len(start)]):
            raise refused(self.kind, NOT_THEIR_FUNCTION)
        self.is_packable = _close(self._whole(ids, CHECKED), torch.cat(alone))
        if not self.is_packable and not _close(self._whole(ids, CHECKED), torch.cat(alone)):
            raise refused(self.kind, "sequences of one batch change each other's results")
        self.is_cacheable = self.is_packable and self._continues(parts[0], len(start), alone[0])
        self.window = min((window for window in first.windows if window is not None), default=None)
        window = getattr(self.module.config.get_text_config(), "sliding_window", None)
        if window and not self.window:  # a window that only a mask would enforce
            self.max_positions = min(self.max_positions or window, window)

    def _whole(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        attend = _Recording(lengths, ids.device)
        return self.hidden(ids, attend.positions, attend)

    def _continues(self, ids: Tensor, num_first: int, wanted: Tensor) -> bool:
        """Whether the same comes out if the rest sees the first tokens only by keys and values of the known shape."""
        attend = _Continued()
        positions = torch.arange(len(ids), device=ids.device)
        sizes = [num_first, len(ids) - num_first]
        parts = zip(ids.split(sizes), positions.split(sizes), strict=True)
        if not _close(torch.cat([self.hidden(*part, attend) for part in parts]), wanted):
            return False
        shapes = {tuple(part.shape[1:]) for pair in attend.held.values() for part in pair}
        return shapes == {(self.shape.num_kv_heads, self.shape.head_dim)}


class _Recording(Packed):
    """In any type of numbers; knows which windows were asked for."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        super().__init__(lengths, device)
        self.windows: set[int | None] = set()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        self.windows.add(window)
        return self._padded(query, key, value, window)


class _Continued:
    """Attention of one sequence that comes in parts: an `attend` function."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        if layer in self.held:
            key, value = (torch.cat(pair) for pair in zip(self.held[layer], (key, value), strict=True))
        self.held[layer] = key, value
        visible = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device).tril(len(key) - len(query))
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=len(query) != len(key))
        return mixed.transpose(0, 1)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """With such weights, rounding hides no difference."""
    before = [(part, part.dtype) for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
    try:
        for part, _ in before:
            part.data = part.data.float()
        yield
    finally:
        for part, dtype in before:
            part.data = part.data.to(dtype)


def _close(left: Tensor, right: Tensor) -> bool:
    """Up to rounding, which adds up over the layers."""
    tolerance = 1e-4 if left.dtype == torch.float32 else 0.03
    return bool((left - right).abs().max() <= tolerance * right.abs().max())


def _max_positions(module: Any, config: Any) -> int:
    """The longest sequence for which each token is computed independently of the sequence's length; 0: any."""
    learned = getattr(module.base_model, "wpe", None)  # GPT-2 learns a vector for every position
    limits = [learned.num_embeddings] if learned else []
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPES:
        limits.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if getattr(config, "attention_chunk_size", None):  # only a mask would enforce it
        limits.append(config.attention_chunk_size)
    return min(limits, default=0)
