"""Families that are not quite like Llama: computed as theirs are, or refused."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    MistralConfig,
    PretrainedConfig,
)

from ragen.errors import ConfigError
from ragen.model.attention import Packed
from ragen.model.huggingface import ATTENTION, HuggingFaceModel

LENGTHS = (5, 1, 7)


def test_gpt2_computes_what_their_module_does(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION).eval())
    ids, attend = torch.randint(0, 40, (sum(LENGTHS),)), Packed(LENGTHS)
    with torch.no_grad():
        wanted = torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)])
        assert torch.allclose(ours.logits(ours.hidden(ids, attend.positions, attend)), wanted, atol=1e-5)
    with pytest.raises(ConfigError, match=r"this gpt2 model has 64 positions, .* set .*max_model_len=64"):
        ours.hidden(torch.zeros(65, dtype=torch.long), torch.arange(65), Packed((65,)))
    assert (ours.shape.num_layers, ours.shape.num_kv_heads, ours.shape.head_dim) == (2, 4, 4)


SMALL = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=1,
)  # fmt: skip


def both(config: PretrainedConfig, folder) -> tuple:
    """Their module, and ours around a copy of it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert type(AutoConfig.from_pretrained(folder)) is type(config)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return theirs, HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION).eval())


def logits_of(ours: HuggingFaceModel, ids: torch.Tensor, lengths=LENGTHS) -> torch.Tensor:
    attend = Packed(lengths)
    with torch.no_grad():
        return ours.logits(ours.hidden(ids, attend.positions, attend))


def test_another_scale_of_attention_is_heeded(tmp_path):
    theirs, ours = both(GraniteConfig(**SMALL, attention_multiplier=3.0, logits_scaling=1.0), tmp_path)
    ids = torch.randint(0, 40, (sum(LENGTHS),))
    with torch.no_grad():
        wanted = torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)])
    assert torch.allclose(logits_of(ours.check(), ids), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GraniteConfig(**SMALL, logits_scaling=8.0), "granite are not supported: they transform their logits"),
        (Cohere2Config(**SMALL, logit_scale=0.06), "cohere2 are not supported: they transform their logits"),
        (Gemma2Config(**SMALL, query_pre_attn_scalar=4), r"unsupported kind of attention \(softcap\)"),
    ],
    ids=["granite", "cohere2", "gemma2"],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, config, match):
    with pytest.raises(ConfigError, match=match):
        both(config, tmp_path)[1].check()


def test_a_window_is_fine_as_long_as_everything_lies_in_it(tmp_path):
    theirs, ours = both(MistralConfig(**SMALL, sliding_window=8), tmp_path)
    ids = torch.randint(0, 40, (9,))
    with torch.no_grad():
        assert torch.allclose(logits_of(ours.check(), ids[:8], (8,)), theirs(ids[None, :8]).logits[0], atol=1e-5)
    with pytest.raises(ConfigError, match=r"window of 8 tokens.* has 9: set .*max_model_len=8"):
        logits_of(ours, ids, (9,))
