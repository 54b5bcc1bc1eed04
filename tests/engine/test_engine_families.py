"""The engine with every kind of model: replies equal those of a sampler without cache, batch and bursts."""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_native import END, SAMPLING, VOCAB, Letters, Scripted, check_against_oracle
from transformers import AutoConfig, AutoModelForCausalLM

from ragen.engine.native.eager import EagerRows
from ragen.engine.native.engine import NativeEngine
from ragen.engine.native.recompute import RecomputedRows
from ragen.engine.native.way import Way, choose_way
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.huggingface import ATTENTION, HuggingFaceModel

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=10_000.0)
LLAMA3 = YARN | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
NATIVE = {
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral, short window": ("mistral", {"sliding_window": 6}),
}
MODULES = {
    "olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_chunk_size": 8},
}


def their_model(kind, changes):
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES | changes), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    return theirs.eval()


def native_pair(family):
    theirs = their_model(*NATIVE[family])
    ours = Decoder(Shape.of(theirs.config)).eval()
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


def module_pair(kind):
    theirs = their_model(kind, MODULES[kind])
    config = copy.deepcopy(theirs.config)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    module.load_state_dict(theirs.state_dict())
    return HuggingFaceModel(module).check(), theirs


def conversations(num=5):
    """Some begin alike, some end early and leave their row to others."""
    shared = tuple(2 + at % 30 for at in range(20))
    prompts = [(*shared[: 3 + 4 * (key % 5)], 2 + key) for key in range(num)]
    return [Scripted([prompt, *[(5, 6, 7)] * (key % 3)], key % 2 == 0, key) for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("family", NATIVE)
def test_native_families(family):
    ours, theirs = native_pair(family)
    played = conversations()
    NativeEngine(ours, Letters(), END, max_rows=3).run(played, SAMPLING)
    check_against_oracle(played, theirs, SAMPLING)


@pytest.mark.parametrize("kind", MODULES)
def test_hugging_face_modules(kind, monkeypatch):
    monkeypatch.setattr("ragen.engine.native.recompute.MAX_TOKENS", 50)  # several passes for each token
    ours, theirs = module_pair(kind)
    engine, played = NativeEngine(ours, Letters(), END, max_rows=3), conversations()
    engine.run(played, SAMPLING)
    check_against_oracle(played, theirs, SAMPLING)
    run = engine.start([], SAMPLING)
    if kind == "olmo3":
        assert isinstance(run.device_rows, EagerRows) and engine.way.text == ""
    else:
        assert isinstance(run.device_rows, RecomputedRows)
        assert engine.way.text.startswith("sampling: each token computes its conversation again (this model keeps more")


# --- which way on a GPU ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch):
    """A model that claims to be on a GPU, for the choice alone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    weight = SimpleNamespace(device=torch.device("cuda"))

    def claim(model):
        monkeypatch.setattr(model, "parameters", lambda: iter([weight]))
        return model

    return claim


def test_a_window_that_no_conversation_leaves_changes_nothing(on_cuda):
    model = on_cuda(native_pair("mistral, short window")[0])
    assert choose_way(model, max_tokens=6)[:2] == (True, True)
    for max_tokens in (7, None):
        way = choose_way(model, max_tokens)
        assert way[:2] == (True, False) and "torch's attention (no Triton kernel for a sliding window of 6" in way.text


@pytest.mark.parametrize("waits", [False, True])
def test_a_module_is_captured_unless_it_waits_for_the_gpu(on_cuda, monkeypatch, waits):
    monkeypatch.setattr("ragen.engine.native.way._waits_for_the_gpu", lambda model: waits)
    way = choose_way(on_cuda(module_pair("olmo3")[0]))
    assert way[:2] == (not waits, False)
    assert ("waits for the GPU" if waits else "CUDA graphs, torch's attention (a Hugging Face module)") in way.text


def test_a_native_decoder_with_query_norms_has_all_kernels(on_cuda):
    assert choose_way(on_cuda(native_pair("qwen3, yarn")[0]))[:2] == (True, True)


def test_what_cannot_be_cached_is_computed_again_on_a_gpu_too(on_cuda):
    way = choose_way(on_cuda(module_pair("lfm2")[0]))
    assert isinstance(way, Way) and way.recomputes and not way.graphs
