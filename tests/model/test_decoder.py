"""Our decoder and the adapter against transformers' own forward pass."""

import copy

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen.model.attention import Packed
from ragen.model.decoder import Decoder, Shape, from_huggingface, to_huggingface
from ragen.model.huggingface import ATTENTION, HuggingFaceModel

SIZES = dict(
    vocab_size=50, hidden_size=64, intermediate_size=80, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, rope_theta=5000.0,
)  # fmt: skip
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make(family: str, **changes):
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES | changes)
    return config, model_class(copy.deepcopy(config)).eval()


def packed_ids(*lengths):
    return torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(4)), Packed(lengths)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_packed_logits_equal_theirs_one_by_one(family, tied):
    config, theirs = make(family, tie_word_embeddings=tied)
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    ids, attend = packed_ids(9, 1, 14)
    with torch.no_grad():
        got = ours.logits(ours.hidden(ids, attend.positions, attend))
        wanted = torch.cat([theirs(part[None]).logits[0] for part in ids.split([9, 1, 14])])
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_go_out_under_their_names(family):
    config, theirs = make(family, tie_word_embeddings=False)
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    state = to_huggingface(ours)
    assert set(state) == set(theirs.state_dict())
    assert all(torch.equal(state[name], weight) for name, weight in theirs.state_dict().items())


def test_missing_weights_are_named():
    config, theirs = make("qwen2")
    state = theirs.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        from_huggingface(Decoder(Shape.of(config)), state)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, "sliding window in some layers"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(family, changes, reason):
    config, _ = make(family, **changes)
    with pytest.raises(ValueError, match=reason):
        Shape.of(config)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_adapter_computes_the_same_as_their_module(family):
    config, theirs = make(family)
    config._attn_implementation = ATTENTION
    module = FAMILIES[family][1](config).eval()
    module.load_state_dict(theirs.state_dict())
    model = HuggingFaceModel(module)
    ids, attend = packed_ids(7, 12)
    with torch.no_grad():
        got = model.logits(model.hidden(ids, attend.positions, attend))
        wanted = torch.cat([theirs(part[None]).logits[0] for part in ids.split([7, 12])])
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("num_recomputed", [1, 2])
def test_some_layers_can_be_recomputed(num_recomputed, monkeypatch):
    """On CUDA only as many as memory asks for; the first ones."""
    config, theirs = make("qwen2")
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    ids, attend = packed_ids(5, 6)
    wanted = torch.autograd.grad(ours.hidden(ids, attend.positions, attend).square().sum(), [*ours.layers.parameters()])
    calls = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
        for number, layer in enumerate(ours.layers)
    ]
    monkeypatch.setattr(ours, "_num_recomputed", lambda x, num_rows: num_recomputed)
    got = torch.autograd.grad(ours.hidden(ids, attend.positions, attend).square().sum(), [*ours.layers.parameters()])
    for hook in hooks:
        hook.remove()
    assert all(map(torch.equal, wanted, got))
    everyone = list(range(len(ours.layers)))
    assert calls[: len(everyone)] == everyone
    assert sorted(calls[len(everyone) :]) == everyone[:num_recomputed]


def test_gradient_checkpointing_changes_nothing():
    config, theirs = make("qwen2")
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    ids, attend = packed_ids(5, 6)

    def gradient(checkpointing):
        ours.gradient_checkpointing = checkpointing
        ours.zero_grad()
        ours.hidden(ids, attend.positions, attend).square().sum().backward()
        return [parameter.grad.clone() for parameter in ours.parameters() if parameter.grad is not None]

    for plain, checkpointed in zip(gradient(False), gradient(True), strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-5)
