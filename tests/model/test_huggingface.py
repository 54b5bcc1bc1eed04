"""Families that are not quite like Llama: computed as theirs are, or refused."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
)

from ragen.errors import ConfigError
from ragen.model.attention import Packed
from ragen.model.huggingface import ATTENTION, HuggingFaceModel
from ragen.model.load import _load_theirs

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
    with pytest.raises(ConfigError, match=r"this gpt2 model has 64 positions, .* set .*max_model_len=56"):
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


WINDOWS = {
    "all layers": MistralConfig(**SMALL, sliding_window=8),
    "some layers": Olmo3Config(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "the second half": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
}


@pytest.mark.parametrize("config", WINDOWS.values(), ids=WINDOWS)
def test_a_window_shorter_than_the_sequence(tmp_path, config):
    theirs, ours = both(config, tmp_path)
    lengths = (20, 8, 9)
    ids = torch.randint(0, 40, (sum(lengths),))
    with torch.no_grad():
        wanted = torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
    assert torch.allclose(logits_of(ours.check(), ids, lengths), wanted, atol=1e-5)
    assert ours.is_packable and ours.is_cacheable


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_are_refused_where_they_do(tmp_path, kind):
    """Within the original context they are right; beyond it, one long sequence would change all others."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "original_max_position_embeddings": 64}
    theirs, ours = both(LlamaConfig(**SMALL, rope_parameters=rope), tmp_path)
    ids = torch.randint(0, 40, (80,))
    with torch.no_grad():
        wanted = torch.cat([theirs(part[None]).logits[0] for part in (ids[:64], ids[64:])])
    assert torch.allclose(logits_of(ours.check(), ids, (64, 16)), wanted, atol=1e-5)
    with pytest.raises(ConfigError, match=r"64 positions, and a conversation needs more: set .*max_model_len=56"):
        logits_of(ours, ids, (65, 15))


def test_keys_and_values_of_two_sizes_are_not_cached(tmp_path):
    config = DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4}, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip
    ours = both(config, tmp_path)[1].check()
    assert ours.is_packable and not ours.is_cacheable


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt"])
def test_a_family_with_its_own_attention_is_refused_by_name(tmp_path, name):
    sizes = {"bloom": {"n_layer": 2, "n_head": 4}, "mpt": {"d_model": 16, "n_heads": 4, "n_layers": 2}}
    others = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    config = AutoConfig.for_model(name, vocab_size=40, **sizes.get(name, others))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"models of type {name} are not supported: .*Use a model of another family"):
        _load_theirs(tmp_path, name, torch.float32).check()
