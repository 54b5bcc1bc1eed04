"""Any Hugging Face causal LM behind the interface of `decoder.Decoder`: packed tokens and an `attend` function.

    model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION))

The module is theirs; only its attention is ours. Transformers registers attention functions by name and passes them the
keywords of the forward call: `attend` is one of these.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragen.errors import ConfigError
from ragen.model.attention import Packed
from ragen.model.decoder import Shape
from ragen.protocols import Attend

ATTENTION = "ragen"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple:
    """Theirs: [1, heads, tokens, head_dim]; ours: [tokens, heads, head_dim], and scaled by the root of head_dim."""
    _reject_unsupported(keywords)
    head_dim = query.shape[-1]
    scaling = keywords.get("scaling")
    if scaling is not None and not math.isclose(scaling, head_dim**-0.5):
        query = query * (scaling * head_dim**0.5)
    mixed = keywords["attend"](module.layer_idx, *(part[0].transpose(0, 1) for part in (query, key, value)))
    return mixed[None], None


def _reject_unsupported(keywords: Mapping[str, Any]) -> None:
    """Raise on special kinds of attention, recognised by their keywords."""
    for name in ("softcap", "s_aux"):
        if keywords.get(name) is not None:
            raise ConfigError(f"this model needs an unsupported kind of attention ({name})")
    window, longest = keywords.get("sliding_window"), keywords["longest"]
    if window is not None and longest > window:
        raise ConfigError(
            f"this model has a sliding window of {window} tokens, so conversations may not be longer; "
            f"this one has {longest}: set actor_rollout_ref.rollout.max_model_len={window}"
        )


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    """`attend` does the masking."""


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class HuggingFaceModel(nn.Module):
    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        config = module.config.get_text_config()
        num_heads = config.num_attention_heads
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
        positions = getattr(module.base_model, "wpe", None)  # GPT-2 learns a vector for every position
        self.max_positions = positions.num_embeddings if positions else 0  # 0: unlimited
        self.is_bounded = bool(self.max_positions or getattr(config, "sliding_window", None))

    @torch.no_grad()
    def check(self) -> "HuggingFaceModel":
        """Raise if the model does more than this class between hidden states and logits."""
        attend = Packed((2,), next(self.parameters()).device)
        ids = attend.positions + 1  # 0 is often padding
        theirs = self.module(**self._inputs(ids, attend.positions, attend)).logits[0]
        ours = self.logits(self.hidden(ids, attend.positions, attend))
        if (theirs - ours).abs().max() > 0.01 * ours.abs().max():
            raise ConfigError(
                f"models of type {self.module.config.model_type} are not supported: they transform their logits"
            )
        return self

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        output = self.module.base_model(**self._inputs(ids, positions, attend))
        hidden = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def _inputs(self, ids: Tensor, positions: Tensor, attend: Attend) -> dict[str, Any]:
        longest = int(positions.max()) + 1 if self.is_bounded else 0
        if self.max_positions and longest > self.max_positions:
            raise ConfigError(
                f"this {self.module.config.model_type} model has {self.max_positions} positions, and a conversation "
                f"needs more: set actor_rollout_ref.rollout.max_model_len={self.max_positions}"
            )
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        return inputs | {"attend": attend, "longest": longest}

    def fill(self, ids: Tensor, positions: Tensor, attend: Attend) -> None:
        self.hidden(ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.module.get_output_embeddings()(hidden)

    @property
    def head_weight(self) -> Tensor | None:
        head = self.module.get_output_embeddings()
        return head.weight if type(head) is nn.Linear and head.bias is None else None
