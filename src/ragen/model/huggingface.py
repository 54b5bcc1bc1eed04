"""Any Hugging Face causal LM behind the interface of `decoder.Decoder`: packed tokens and an `attend` function.

    model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION))

The module stays theirs; only its attention is ours. Transformers lets an attention function be registered by name and
hands it whatever keyword the forward call was given: `attend` travels that way.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragen.model.decoder import Attend, Shape

ATTENTION = "ragen"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple:
    """Theirs: [1, heads, tokens, head_dim]; ours: [tokens, heads, head_dim]."""
    mixed = keywords["attend"](module.layer_idx, *(part[0].transpose(0, 1) for part in (query, key, value)))
    return mixed[None], None


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
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            rope_theta=0.0,  # theirs to know, like what follows
            norm_eps=0.0,
            qkv_bias=False,
            tied_embeddings=bool(config.tie_word_embeddings),
        )

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        base = self.module.base_model
        output = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend)
        hidden = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def fill(self, ids: Tensor, positions: Tensor, attend: Attend) -> None:
        self.hidden(ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.module.get_output_embeddings()(hidden)
