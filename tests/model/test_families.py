"""Every family of the native decoder against transformers in float32: logits differ by at most 1e-5."""

import copy
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from ragen.config.model_name import FAMILIES
from ragen.engine.native.cache import Decode, Prefill, RowCache
from ragen.model.attention import Packed
from ragen.model.critic import Critic
from ragen.model.decoder import Decoder, Shape, from_huggingface, to_huggingface, unsupported
from ragen.model.packing import pack
from ragen.run.memory_plan import ModelShape
from ragen.types import TokenSequence

SIZES = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ORIGINAL = 16  # tokens of the context before it was extended; test sequences are longer
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)
CONFIGS = {
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"rope_theta": 500_000.0}),
    "linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
    "yarn": Qwen2Config(**SIZES, rope_parameters=YARN | {"rope_theta": 10_000.0}),
    "yarn, all options": LlamaConfig(
        **SIZES,
        rope_parameters=YARN
        | {"rope_theta": 10_000.0, "attention_factor": 1.7, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "qwen3, yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN | {"rope_theta": 1_000_000.0}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral, own head_dim": MistralConfig(**SIZES, sliding_window=None, head_dim=20),
    "mistral, long window": MistralConfig(**SIZES, sliding_window=4096),
    "mistral, short window": MistralConfig(**SIZES, sliding_window=7),
}
LENGTHS = (40, 1, 9)
families = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def both(config):
    """Ours and theirs, with the same weights, none of which is 0 or 1."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.2 * torch.randn(weight.shape)
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


@pytest.fixture
def ids():
    return torch.randint(1, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def wanted_logits(theirs, ids, lengths=LENGTHS):
    return torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])


@families
def test_logits_without_a_cache(config, ids):
    ours, theirs = both(config)
    attend = Packed(LENGTHS)
    with torch.no_grad():
        packed = ours.logits(ours.hidden(ids, attend.positions, attend))
        alone = [
            ours.logits(ours.hidden(part, torch.arange(len(part)), Packed([len(part)]))) for part in ids.split(LENGTHS)
        ]
    wanted = wanted_logits(theirs, ids)
    assert torch.allclose(packed, wanted, atol=1e-5) and torch.allclose(torch.cat(alone), wanted, atol=1e-5)


@families
@torch.no_grad()
def test_logits_with_a_cache(config, ids):
    """Two rows of which 20 and 3 tokens are prefilled, in two parts, and the others decoded one by one."""
    ours, theirs = both(config)
    rows, prefilled = [ids[:30], ids[30:43]], [20, 3]
    cache = RowCache(3, ours.shape.num_kv_heads, ours.shape.head_dim, 2, ours.embed.weight)
    cache.reserve(64)
    for starts, counts in (([0, 0], [11, 2]), ([11, 2], [9, 1])):
        attend = Prefill(cache, [0, 1], starts, counts)
        parts = [row[start : start + count] for row, start, count in zip(rows, starts, counts, strict=True)]
        ours.fill(torch.cat(parts), attend.positions, attend)
    cache.lengths = torch.tensor(prefilled)
    found = []
    for offset in range(10):
        fed = torch.stack([row[start + offset] for row, start in zip(rows, prefilled, strict=True)])
        found.append(ours.logits(ours.hidden(fed, cache.lengths, Decode(cache, 32))))
        cache.lengths = cache.lengths + 1
    for index, (row, start) in enumerate(zip(rows, prefilled, strict=True)):
        wanted = theirs(row[None]).logits[0, start : start + 10]
        assert torch.allclose(torch.stack(found)[:, index], wanted, atol=1e-5)


@families
def test_gradients(config, ids):
    ours, theirs = both(config)
    attend = Packed(LENGTHS)
    ours.logits(ours.hidden(ids, attend.positions, attend)).square().sum().backward()
    torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)]).square().sum().backward()
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    for weight in ours.parameters():
        weight.data = weight.grad
    for name, gradient in to_huggingface(ours).items():
        assert (gradient - wanted[name]).abs().max() <= 1e-4 * wanted[name].abs().max(), name


@families
def test_the_critic_runs_on_it(config, ids):
    ours, _ = both(config)
    sampled = [False, *[True] * 19]
    sequence = TokenSequence(ids[:20].tolist(), sampled, [0.0] * 20, 0, [(1, 20)])
    critic = Critic(ours)
    torch.nn.init.ones_(critic.head.weight)
    critic.values(pack([sequence], "cpu")).sum().backward()
    assert all(weight.grad.any() for weight in ours.layers.parameters())


def test_the_plan_of_memory_knows_every_family(tmp_path):
    for kind in FAMILIES:
        config = AutoConfig.for_model(kind, **SIZES)
        config.save_pretrained(tmp_path)
        shape = ModelShape.of_folder(kind, tmp_path)
        assert shape is not None and abs(shape.num_parameters - num_parameters(config)) <= 3 * 2 * 128, kind


def num_parameters(config):
    return sum(weight.numel() for weight in Decoder(Shape.of(config)).parameters())


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_a_config_of_older_transformers_is_the_same(tmp_path, rope, name):
    """They stored `rope_theta` beside `rope_scaling`, and its type as `type` at first."""
    rest = {key: value for key, value in rope.items() if key != "rope_type"}
    stored = {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 500_000.0,
        "rope_scaling": {name: rope["rope_type"], **rest},
    }
    (tmp_path / "config.json").write_text(json.dumps(stored | {"hidden_act": "silu", "rms_norm_eps": 1e-6}))
    old = Shape.of(AutoConfig.from_pretrained(tmp_path))
    new = LlamaConfig(**SIZES, rope_parameters=rope | {"rope_theta": 500_000.0})
    assert old == Shape.of(new) and old.scaled_frequencies
    new.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert Shape.of(AutoConfig.from_pretrained(tmp_path)) == old


def test_what_is_left_to_the_hugging_face_module():
    plain = LlamaConfig(**SIZES)
    assert unsupported(plain) == []
    partial = LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    assert unsupported(partial) == ["partly rotated heads"]
    assert unsupported(AutoConfig.for_model("olmo2", **SIZES)) == ["model_type olmo2"]
