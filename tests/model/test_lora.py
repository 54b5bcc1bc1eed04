"""Adapters against plain arithmetic, against transformers with merged weights, and against peft."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen.errors import ConfigError
from ragen.model.attention import Packed
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.huggingface import ATTENTION, HuggingFaceModel
from ragen.model.load import _load, find_model, load_model
from ragen.model.lora import (
    Adapter,
    BaseModel,
    Linear,
    adapters_off,
    add_adapters,
    base_state,
    has_adapters,
    load_adapter,
    merge_adapters,
    merged_state,
    save_adapter,
)
from ragen.model.packing import pack
from ragen.model.policy import score
from ragen.types import TokenSequence

SIZES = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=4,
)  # fmt: skip
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),  # the Hugging Face module
}
CPU = torch.device("cpu")
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = (5, 1, 7)
IDS = torch.randint(0, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))


def make(family):
    """Our model and theirs, with the same weights."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES)
    theirs = model_class(copy.deepcopy(config)).eval()
    if family == "olmo2":
        config._attn_implementation = ATTENTION
        ours = HuggingFaceModel(model_class(config).eval())
        ours.module.load_state_dict(theirs.state_dict())
    else:
        ours = Decoder(Shape.of(config))
        from_huggingface(ours, theirs.state_dict())
    return ours, theirs


def logits(model):
    attend = Packed(LENGTHS)
    return model.logits(model.hidden(IDS, attend.positions, attend))


def logits_of_theirs(module):
    return torch.cat([module(part[None]).logits[0] for part in IDS.split(LENGTHS)])


def learn(model, scale=0.2):
    """As after some training: every adapter has numbers in it."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def weights_of(model):
    return {name: weight.clone() for name, weight in model.state_dict().items() if "adapters." not in name}


def same(left, right):
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def merged_by_hand(theirs, folder, rank, alpha):
    """W + alpha / rank * B A in float64, from the file alone."""
    state = {name: weight.double() for name, weight in theirs.state_dict().items()}
    stored = load_file(folder / "adapter_model.safetensors")
    for name in stored:
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = stored[name].double(), stored[name.replace("lora_A", "lora_B")].double()
            state[f"{path}.weight"] = state[f"{path}.weight"] + alpha / rank * b @ a
    module = copy.deepcopy(theirs).double()
    module.load_state_dict(state)
    return module


# --- arithmetic ---------------------------------------------------------------------------------------------------


def linear_of(*rows):
    linear = nn.Linear(2, len(rows), bias=False)
    linear.weight.data = torch.tensor(rows)
    return linear.requires_grad_(False)


def fill(adapter, a, b):
    adapter.A.data, adapter.B.data = torch.tensor(a), torch.tensor(b)


@torch.no_grad()
def test_numbers_worked_by_hand():
    linear = linear_of([1.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    adapter = Adapter(Linear("x", linear, {"x": 3}), ["x"], rank=1, scaling=3.0, seed=0)
    fill(adapter, [[1.0, 2.0]], [[1.0], [0.0], [2.0]])
    # W x = 1, 1, 2. A x = 3, B A x = 3, 0, 6, and three times that is added.
    assert linear(torch.tensor([[1.0, 1.0]])).tolist() == [[10.0, 1.0, 20.0]]
    assert linear(torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])).tolist() == [[[10.0, 1.0, 20.0], [0.0, 0.0, 0.0]]]
    adapter.on = False
    assert linear(torch.tensor([[1.0, 1.0]])).tolist() == [[1.0, 1.0, 2.0]]


@torch.no_grad()
def test_of_a_fused_layer_only_the_rows_that_are_meant():
    linear = linear_of([1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0])
    adapter = Adapter(Linear("qkv", linear, {"q": 2, "k": 1, "v": 1}), ["q", "v"], rank=1, scaling=0.5, seed=0)
    # q has A = (1, 0) and B = (2, 4), v has A = (0, 1) and B = 6.
    fill(adapter, [[1.0, 0.0], [0.0, 1.0]], [[2.0], [4.0], [6.0]])
    # W x = 3, 5, 8, 6. q gains 1/2 * 3 * (2, 4), k nothing, v 1/2 * 5 * 6.
    assert linear(torch.tensor([[3.0, 5.0]])).tolist() == [[6.0, 11.0, 8.0, 21.0]]


@given(
    family=st.sampled_from(list(FAMILIES)),
    rank=st.integers(1, 5),
    alpha=st.integers(1, 9),
    names=st.none() | st.sets(st.sampled_from(NAMES), min_size=1),
    as_text=st.booleans(),
)
@settings(max_examples=15)
def test_on_off_stored_and_merged(tmp_path_factory, family, rank, alpha, names, as_text):
    folder = tmp_path_factory.mktemp("adapter")
    ours, theirs = make(family)
    wanted = "all-linear" if names is None else ",".join(sorted(names)) if as_text else sorted(names)
    with torch.no_grad():
        base, before = logits(ours), weights_of(ours)
        add_adapters(ours, rank, alpha, wanted, seed=3)
        assert torch.equal(logits(ours), base), "nothing is learnt yet"
        learn(ours)
        learnt = logits(ours)
        assert not torch.allclose(learnt, base, atol=1e-3)
        with adapters_off(ours):
            assert torch.equal(logits(ours), base)
        assert torch.equal(logits(BaseModel(ours)), base)
        save_adapter(ours, folder, "somewhere")
        naive = logits_of_theirs(merged_by_hand(theirs, folder, rank, alpha))
        assert torch.allclose(learnt.double(), naive, atol=1e-4)
        theirs.load_state_dict(merged_state(ours))
        assert torch.allclose(logits_of_theirs(theirs), learnt, atol=1e-4)
        assert torch.equal(logits(ours), learnt) and same(weights_of(ours), before), "the model stays as it is"
        merge_adapters(ours)
        assert torch.allclose(logits(ours), learnt, atol=1e-4)
        assert not has_adapters(ours) and all(parameter.requires_grad for parameter in ours.parameters())
        other, _ = make(family)
        load_adapter(other, folder)
        assert torch.equal(logits(other), learnt)


# --- what is trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_only_adapters_are_trained(family):
    ours, _ = make(family)
    before = weights_of(ours)
    add_adapters(ours, rank=3, alpha=6)
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert all(name.startswith("adapters.") for name in trained)
    # q 16 to 16, k and v 16 to 8, o 16 to 16, gate and up 16 to 24, down 24 to 16; two layers.
    assert sum(parameter.numel() for parameter in trained.values()) == 2 * 3 * (32 + 24 + 24 + 32 + 40 + 40 + 40)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(logits(ours)[:-1], IDS[1:])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    assert same(weights_of(ours), before) and all(
        weight.grad is None for weight in ours.parameters() if not weight.requires_grad
    )


def gradients(model):
    model.zero_grad()
    logits(model).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def test_gradient_checkpointing_changes_nothing():
    ours, _ = make("qwen2")
    add_adapters(ours, rank=3, alpha=6)
    learn(ours)
    plain = gradients(ours)
    ours.gradient_checkpointing = True
    for one, other in zip(plain, gradients(ours), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_reference_in_between_does_not_reach_the_gradient():
    """The base is asked between the forward and the backward pass, also where layers are computed again."""
    ours, _ = make("qwen2")
    add_adapters(ours, rank=3, alpha=6)
    learn(ours)
    wanted = gradients(ours)
    ours.gradient_checkpointing = True
    ours.zero_grad()
    loss = logits(ours).square().sum()
    assert not BaseModel(ours).hidden(IDS, Packed(LENGTHS).positions, Packed(LENGTHS)).requires_grad
    loss.backward()
    got = [parameter.grad for parameter in ours.parameters() if parameter.requires_grad]
    for one, other in zip(wanted, got, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_kl_over_all_words_against_the_base():
    """The reference without a second model says what a second model says."""
    (ours, _), (other, _) = make("qwen2"), make("qwen2")
    add_adapters(ours, rank=3, alpha=6)
    learn(ours)
    ids = tuple(IDS.tolist())
    packed = pack([TokenSequence(ids, (False,) * 3 + (True,) * (len(ids) - 3), (0.0,) * len(ids), 0, ())], "cpu")
    own, second = (score(ours, packed, 0.7, reference) for reference in (BaseModel(ours), other))
    assert torch.equal(own.full_kl, second.full_kl) and float(own.full_kl.detach().mean()) > 1e-3
    own.full_kl.sum().backward()
    assert all(bool(adapter.A.grad.any()) for adapter in ours.adapters.values())


def test_the_first_numbers_are_those_of_a_linear_layer_of_torch():
    ours, _ = make("qwen2")
    add_adapters(ours, rank=64, alpha=64, target_modules="down_proj", seed=7)
    (adapter, second) = ours.adapters.values()
    assert not adapter.B.any() and not torch.equal(adapter.A, second.A)
    # Uniform between -1/√24 and 1/√24: 1,536 numbers come close to the ends, and their variance is 1/72.
    values = adapter.A.detach()
    assert 0.99 / 24**0.5 < float(values.abs().max()) <= 1 / 24**0.5
    assert float(values.var()) == pytest.approx(1 / 72, rel=0.1)


def test_the_first_numbers_depend_on_seed_and_name_alone():
    def first(targets, seed):
        ours, _ = make("qwen2")
        add_adapters(ours, 4, 4, targets, seed)
        return ours.adapters["layers/1/qkv"].pairs()["model.layers.1.self_attn.v_proj"][0]

    assert torch.equal(first("all-linear", 1), first("v_proj", 1))
    assert not torch.equal(first("v_proj", 1), first("v_proj", 2))


def test_a_copy_has_adapters_of_its_own():
    ours, _ = make("qwen2")
    add_adapters(ours, 4, 4)
    other = copy.deepcopy(ours)
    learn(other)
    with torch.no_grad():
        base, learnt = logits(ours), logits(other)
        assert not torch.allclose(base, learnt, atol=1e-3)
        with adapters_off(ours):
            assert torch.equal(logits(other), learnt)


def test_adapters_come_back_after_an_error():
    ours, _ = make("qwen2")
    add_adapters(ours, 4, 4)
    with pytest.raises(KeyError), adapters_off(ours):
        raise KeyError
    assert all(adapter.on for adapter in ours.adapters.values())


def test_in_half_precision_the_adapter_has_the_models_type():
    ours, _ = make("qwen2")
    ours.to(torch.bfloat16)
    add_adapters(ours, 4, 4)
    learn(ours)
    ours.to(torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert logits(ours).dtype == torch.bfloat16
    assert {weight.dtype for weight in merged_state(ours).values()} == {torch.bfloat16}


# --- peft ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj,up_proj", r".*\.1\..*(k|v|gate)_proj"])
def test_peft_opens_ours(tmp_path, family, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with the extra dev")
    ours, theirs = make(family)
    add_adapters(ours, 3, 6, targets)
    learn(ours)
    save_adapter(ours, tmp_path, "somewhere")
    module = peft.PeftModel.from_pretrained(theirs, tmp_path, is_trainable=True)
    loss, their_loss = logits(ours).square().sum(), logits_of_theirs(module).square().sum()
    assert torch.allclose(logits(ours), logits_of_theirs(module), atol=1e-5)
    loss.backward()
    their_loss.backward()
    found = {name.replace(".default", ""): weight.grad for name, weight in module.named_parameters() if "lora_" in name}
    for adapter in ours.adapters.values():
        lows, highs = (
            adapter.A.grad.chunk(len(adapter.wanted)),
            adapter.B.grad.split([adapter.rows[name] for name in adapter.wanted]),
        )
        for name, low, high in zip(adapter.wanted, lows, highs, strict=True):
            assert torch.allclose(low, found.pop(f"base_model.model.{name}.lora_A.weight"), rtol=1e-3, atol=1e-4)
            assert torch.allclose(high, found.pop(f"base_model.model.{name}.lora_B.weight"), rtol=1e-3, atol=1e-4)
    assert not found


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    "targets", ["all-linear", ["v_proj", "layers.1.mlp.up_proj"], ".*_proj", r"model\.layers\.1\..*(q|v|up)_proj"]
)
def test_we_open_those_of_peft(tmp_path, family, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with the extra dev")
    ours, theirs = make(family)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    module = peft.get_peft_model(theirs, config).eval()
    module.save_pretrained(tmp_path)
    load_adapter(ours, tmp_path)
    with torch.no_grad():
        assert torch.allclose(logits(ours), logits_of_theirs(module), atol=1e-5)
        with module.disable_adapter(), adapters_off(ours):
            assert torch.allclose(logits(ours), logits_of_theirs(module), atol=1e-5)
        learnt = logits(ours)
    save_adapter(ours, tmp_path / "again", "somewhere")
    stored, again = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert same(stored, again)
    again, _ = make(family)
    load_adapter(again, tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(logits(again), learnt)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize("targets", ["q_proj,qproj", ["q_proj", "qproj"]])
def test_unknown_layers_are_refused_with_those_that_there_are(family, targets):
    ours, _ = make(family)
    with pytest.raises(ConfigError, match="target_modules=q_proj,qproj: no linear layer is called qproj") as error:
        add_adapters(ours, 4, 4, targets)
    assert all(name in str(error.value) for name in NAMES) and "lm_head" not in str(error.value)
    assert not has_adapters(ours) and all(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("(q|v)_proj", r"no linear layer is called \(q\|v\)_proj\. Choose from q_proj"),  # of the whole name
        ("*_proj", r"target_modules=\*_proj: not a regular expression: nothing to repeat"),
    ],
)
def test_regular_expressions_that_mean_nothing(targets, message):
    with pytest.raises(ConfigError, match=message):
        add_adapters(make("qwen2")[0], 4, 4, targets)


@pytest.mark.parametrize("targets", ["", " , ", []])
def test_no_layers_at_all_are_refused(targets):
    ours, _ = make("qwen2")
    with pytest.raises(ConfigError, match="no linear layer given"):
        add_adapters(ours, 4, 4, targets)


def test_what_makes_no_sense_is_refused():
    ours, _ = make("qwen2")
    with pytest.raises(ConfigError, match="rank=0"):
        add_adapters(ours, 0, 4)
    for needs in (merged_state, merge_adapters, BaseModel):
        with pytest.raises(ValueError, match="has no adapters"):
            needs(ours)
    add_adapters(ours, 4, 4)
    with pytest.raises(ValueError, match="already has adapters"):
        add_adapters(ours, 4, 4)


@pytest.fixture
def stored(tmp_path):
    ours, _ = make("qwen2")
    add_adapters(ours, 4, 8)
    save_adapter(ours, tmp_path, "somewhere")
    return tmp_path


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4, which changes the base"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias all"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"target_modules": ["query"]}, "no linear layer is called query"),
        ({"target_modules": ["q_proj"]}, r"belongs to another model: .* is 4 x 24 there and missing here"),
        ({"r": 3}, r"is 4 x 16 there and 3 x 16 here"),
        ({"r": "four"}, r"adapter_config\.json is not an adapter config .*r=four: takes a whole number.*copy it again"),
        ({"target_modules": None}, r"is not an adapter config .*target_modules=null: takes text or a list"),
        ({"base_model_name_or_path": ["a"]}, r"is not an adapter config .*base_model_name_or_path="),
    ],
)
def test_stored_adapters_that_cannot_be_read(stored, values, message):
    change(stored, **values)
    with pytest.raises(ConfigError, match=message):
        load_adapter(make("qwen2")[0], stored)


def test_a_stored_adapter_must_be_of_this_model_and_this_rank(stored):
    ours, _ = make("qwen2")
    add_adapters(ours, 3, 8)
    with pytest.raises(ConfigError, match=r"has lora\.rank=4, but this run has lora\.rank=3"):
        load_adapter(ours, stored)
    ours, _ = make("qwen2")
    add_adapters(ours, 4, 4)
    with pytest.raises(ConfigError, match=r"has lora\.alpha=8, but this run has lora\.alpha=4"):
        load_adapter(ours, stored)
    state = load_file(stored / "adapter_model.safetensors")
    first = min(state)
    del state[first]
    save_file(state, stored / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"{first} is missing there"):
        load_adapter(make("qwen2")[0], stored)


def test_a_folder_without_an_adapter(tmp_path):
    with pytest.raises(ConfigError, match=r"\(no adapter_config\.json\)"):
        load_adapter(make("qwen2")[0], tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not an adapter config"):
        load_adapter(make("qwen2")[0], tmp_path)


def test_weights_that_are_pickled_or_damaged(tmp_path):
    loaded = load_model(find_model("pocket"), "cpu")
    add_adapters(loaded.model, 4, 8)
    save_adapter(loaded.model, tmp_path, "pocket")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"could not load {weights}: [^$]*copy it again"):
        load_model(find_model(str(tmp_path)), "cpu")
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors.*open it with peft and save it"):
        find_model(str(tmp_path))


# --- by name ------------------------------------------------------------------------------------------------------


def test_a_folder_with_an_adapter_is_a_model(tmp_path):
    loaded = load_model(find_model("pocket"), "cpu")
    add_adapters(loaded.model, 4, 8)
    learn(loaded.model)
    save_adapter(loaded.model, tmp_path / "one", "pocket")
    source = find_model(str(tmp_path / "one"))
    assert source.base.name == "pocket" and source.model_folder == find_model("pocket").folder
    merged = load_model(source, "cpu")
    with torch.no_grad():
        learnt = logits(loaded.model)
        assert torch.allclose(logits(merged.model), learnt, atol=1e-4)
    assert not has_adapters(merged.model) and merged.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    add_adapters(merged.model, 2, 2)  # and one above it
    save_adapter(merged.model, tmp_path / "two", source.lasting_name)
    with torch.no_grad():
        above = load_model(find_model(str(tmp_path / "two")), "cpu")
        assert torch.allclose(logits(above.model), learnt, atol=1e-4)


@pytest.mark.parametrize("family", ["pocket", "qwen3"])
def test_an_adapter_is_merged_before_anything_is_rounded_or_not_at_all(tmp_path, family):
    """Of changes that bf16 weights cannot hold, what plays keeps all, and what is merged no less than it must."""
    base = "pocket"
    if family == "olmo2":
        base = str(tmp_path / "base")
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES | {"vocab_size": 622})).save_pretrained(base)
        load_model(find_model("pocket"), "cpu").tokenizer.save_pretrained(base)
    loaded = load_model(find_model(base), "cpu")
    add_adapters(loaded.model, 4, 8)
    learn(loaded.model)
    save_adapter(loaded.model, tmp_path / "one", base)
    source = find_model(str(tmp_path / "one"))
    merged = base_state(_load(source, torch.bfloat16, True, CPU).model)
    for name, weight in merged_state(loaded.model).items():
        assert torch.equal(merged[name], weight.to(torch.bfloat16)), name
    beside = load_model(source, "cpu", merge=False).model
    assert has_adapters(beside) and torch.equal(logits(beside), logits(loaded.model))
    rounded = _load(source, torch.bfloat16, False, CPU).model
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    for name, (a, b) in loaded.model.adapters.pairs().items():
        kept = rounded.adapters.pairs()[name]
        assert torch.equal(kept[0], a.to(torch.bfloat16)) and torch.equal(kept[1], b.to(torch.bfloat16))


def test_frequencies_of_positions_are_not_rounded():
    model = _load(find_model("pocket"), torch.bfloat16, True, CPU).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.frequencies, load_model(find_model("pocket"), "cpu").model.frequencies)


def test_an_adapter_whose_base_is_gone(tmp_path):
    loaded = load_model(find_model("pocket"), "cpu")
    add_adapters(loaded.model, 4, 8)
    save_adapter(loaded.model, tmp_path / "one", str(tmp_path))
    with pytest.raises(ConfigError, match=r"is an adapter of .*\(no config\.json\)"):
        find_model(str(tmp_path / "one"))
    save_adapter(loaded.model, tmp_path / "one", "")
    with pytest.raises(ConfigError, match="does not name the adapter's base model"):
        find_model(str(tmp_path / "one"))
    assert find_model(str(tmp_path / "one"), base="pocket").base.name == "pocket"
    save_adapter(loaded.model, tmp_path / "one", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/gone: directory not found\. .*--base MODEL") as error:
        find_model(str(tmp_path / "one"))
    assert "pocket" not in str(error.value) and "Repo id" not in str(error.value)


def test_names_that_last(tmp_path, monkeypatch):
    loaded = load_model(find_model("pocket"), "cpu")
    loaded.tokenizer.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "pocket").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("mine").lasting_name == str(tmp_path / "mine")
    assert find_model("pocket").lasting_name == "pocket"
