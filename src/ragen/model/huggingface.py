"""Any Hugging Face causal LM behind the interface of `decoder.Decoder`: packed tokens and an `attend` function.

    model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION))

The module stays theirs; only its attention is ours. Transformers lets an attention function be registered by name and
hands it whatever keyword the forward call was given: `attend` travels that way.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragen.errors import ConfigError
from ragen.model.attention import Packed
from ragen.model.decoder import Attend, Shape

ATTENTION = "ragen"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple:
    """Theirs: [1, heads, tokens, head_dim]; ours: [tokens, heads, head_dim], and scaled by the root of head_dim."""
    _refuse_what_is_not_computed(keywords)
    head_dim = query.shape[-1]
    scaling = keywords.get("scaling")
    if scaling is not None and not math.isclose(scaling, head_dim**-0.5):
        query = query * (scaling * head_dim**0.5)
    mixed = keywords["attend"](module.layer_idx, *(part[0].transpose(0, 1) for part in (query, key, value)))
    return mixed[None], None


def _refuse_what_is_not_computed(keywords: Mapping[str, Any]) -> None:
    """Special kinds of attention, by the keywords that the families use."""
    for name in ("softcap", "s_aux"):
        if keywords.get(name) is not None:
            raise ConfigError(f"this model needs an attention that is not supported here ({name})")
    window, longest = keywords.get("sliding_window"), keywords["longest"]
    if window is not None and longest > window:
        raise ConfigError(
            f"this model looks back {window} tokens at most, which is supported for conversations of that length only; "
            f"one takes {longest}: set actor_rollout_ref.rollout.max_model_len={window}"
        )


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    """`attend` knows what may look at what."""


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
            intermediate_size=getattr(config, "intermediate_size", 0),  # GPT-2 does not tell, and nobody asks
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            rope_theta=0.0,  # theirs to know, like what follows
            norm_eps=0.0,
            qkv_bias=False,
            tied_embeddings=bool(config.tie_word_embeddings),
        )
        learnt = getattr(module.base_model, "wpe", None)  # GPT-2 has a vector for every position
        self.num_learnt = learnt.num_embeddings if learnt else 0
        self.is_bounded = bool(self.num_learnt or getattr(config, "sliding_window", None))

    @torch.no_grad()
    def check(self) -> "HuggingFaceModel":
        """Refuse a model that does more than this class does between hidden states and logits."""
        attend = Packed((2,), next(self.parameters()).device)
        ids = attend.positions + 1  # 0 is often a padding without a meaning
        theirs = self.module(**self._inputs(ids, attend.positions, attend)).logits[0]
        ours = self.logits(self.hidden(ids, attend.positions, attend))
        if (theirs - ours).abs().max() > 0.01 * ours.abs().max():
            raise ConfigError(
                f"models of type {self.module.config.model_type} are not supported: they change their logits"
            )
        return self

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        output = self.module.base_model(**self._inputs(ids, positions, attend))
        hidden = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def _inputs(self, ids: Tensor, positions: Tensor, attend: Attend) -> dict[str, Any]:
        longest = int(positions.max()) + 1 if self.is_bounded else 0
        if self.num_learnt and longest > self.num_learnt:
            raise ConfigError(
                f"this {self.module.config.model_type} model has {self.num_learnt} positions, and a conversation takes "
                f"more: set actor_rollout_ref.rollout.max_model_len={self.num_learnt}"
            )
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        return inputs | {"attend": attend, "longest": longest}

    def fill(self, ids: Tensor, positions: Tensor, attend: Attend) -> None:
        self.hidden(ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.module.get_output_embeddings()(hidden)
