"""A run of each kind of model, from its directory to a checkpoint that transformers opens."""

import json
import shutil

import pytest
import torch
from tiny import TINY
from transformers import AutoConfig, AutoModelForCausalLM

from ragen.cli import main
from ragen.model.attention import Packed
from ragen.model.load import find_model, load_model
from ragen.model.pocket.load import pocket_folder

SIZES = dict(
    vocab_size=622, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
KINDS = {
    "qwen3": {},
    "mistral": {"sliding_window": 64},
    "llama": {"rope_parameters": LLAMA3},
    "olmo2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
SHORT = ["trainer.total_training_steps=1", "trainer.save_freq=1", "actor_rollout_ref.rollout.response_length=12"]


def model_folder(folder, kind, **sizes):
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(pocket_folder() / name, folder / name)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 4])
def test_sampler_learner_critic_and_checkpoint_agree(tmp_path, kind, rank):
    model, run = model_folder(tmp_path / "model", kind, **SIZES | KINDS[kind]), tmp_path / "run"
    changes = [f"model_path={model}", f"lora.rank={rank}", "algorithm.adv_estimator=gae"]
    assert main(["train", *TINY, *changes, *SHORT, f"trainer.default_local_dir={run}"]) == 0
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["rollout/log_prob_diff_max"] < 1e-4
    if rank:
        assert main(["merge", str(run / "global_step_1"), "--output", str(tmp_path / "merged")]) == 0
    stored = tmp_path / "merged" if rank else run / "global_step_1" / "actor"
    theirs = AutoModelForCausalLM.from_pretrained(stored, attn_implementation="eager").eval()
    assert theirs.config.model_type == kind
    ours, ids, attend = load_model(find_model(str(stored)), "cpu").model, torch.arange(2, 102), Packed([100])
    with torch.no_grad():
        wanted = theirs(ids[None], use_cache=False).logits[0]
        assert torch.allclose(ours.logits(ours.hidden(ids, attend.positions, attend)), wanted, atol=1e-5)


def test_a_family_that_cannot_run_right_is_refused_with_one_sentence(tmp_path, capsys):
    model = model_folder(tmp_path / "model", "bloom", vocab_size=622, hidden_size=16, n_layer=1, n_head=2)
    given = ["train", *TINY, f"model_path={model}", *SHORT, f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "models of type bloom are not supported: their attention" in said and "Use a model of another family" in said
