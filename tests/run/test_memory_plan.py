"""What a run will hold on a GPU: by hand, and what the plan chooses as memory shrinks."""

import json

import pytest

from ragen.cli.estimates import POCKET, QWEN_3B
from ragen.config.compose import resolve
from ragen.run.memory_plan import CONTEXT, FAMILIES, LARGE, ModelShape, plan

PARAMETERS = 3_085_938_688
GB = 10**9


def config(*overrides):
    words = ["model_path=x", "micro_batch_size_per_gpu=2", "algorithm.adv_estimator=grpo", *overrides]
    return resolve(words, "_2_sokoban", environ={}).config


PPO = ("algorithm.adv_estimator=gae",)
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")


def test_what_is_held_by_hand():
    """Weights in bf16; masters, moments and gradients in float32, gradients of one model at a time."""
    alone, ppo, with_reference = (plan(QWEN_3B, config(*more), 141 * GB) for more in ((), PPO, (*PPO, *KL)))
    assert alone.held == (2 + 4 + 8) * PARAMETERS and alone.gradients == 4 * PARAMETERS
    assert ppo.held == 2 * alone.held and ppo.gradients == alone.gradients
    assert with_reference.held == ppo.held + 2 * PARAMETERS
    assert alone.update == alone.held + alone.gradients + alone.activations <= alone.peak


def test_less_memory_first_means_smaller_micro_batches_then_recomputed_layers():
    plans = [plan(QWEN_3B, config(), capacity * GB) for capacity in (141, 80, 70)]
    assert [one.num_tokens for one in plans] == sorted((one.num_tokens for one in plans), reverse=True)
    assert plans[0].num_tokens == 2 * 3600 and plans[0].num_recomputed == 0
    assert plans[2].num_recomputed > 0
    for one, capacity in zip(plans, (141, 80, 70), strict=True):
        assert one.update + CONTEXT <= capacity * GB


def test_layers_are_not_recomputed_where_the_user_says_so():
    never = plan(QWEN_3B, config("actor_rollout_ref.model.enable_gradient_checkpointing=False"), 70 * GB)
    assert never.num_recomputed == 0 and never.num_tokens < 4096


def test_the_line_says_what_does_not_fit():
    ppo = plan(QWEN_3B, config(*PPO), 80 * GB)
    assert "does not fit" in ppo.line(80 * GB) and "does not fit" not in ppo.line(200 * GB)
    assert ppo.line(80 * GB).startswith(f"memory: {ppo.peak / GB:.0f} GB of 80 GB at the peak")
    assert f"{ppo.num_tokens:,} tokens, 36 of 36 layers" in ppo.line(80 * GB)


def test_the_shape_of_a_model_directory(tmp_path):
    stored = {
        "model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "intermediate_size": 11008,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert ModelShape.of_folder(QWEN_3B.name, tmp_path) == QWEN_3B
    (tmp_path / "config.json").write_text(json.dumps(stored | {"model_type": "gpt2"}))
    assert ModelShape.of_folder("x", tmp_path) is None and ModelShape.of_folder("x", tmp_path / "none") is None


def test_a_small_model_recomputes_nothing():
    assert plan(POCKET, config(), GB).num_recomputed == 0


def test_numbers_that_stand_elsewhere_too():
    from ragen.model import decoder, load

    assert (FAMILIES, LARGE) == (decoder.FAMILIES, load.LARGE)


@pytest.mark.parametrize("rank", [8, 64])
def test_adapters_have_small_masters(rank):
    found = plan(QWEN_3B, config(f"lora.rank={rank}"), 141 * GB)
    assert found.masters == 4 * QWEN_3B.num_adapter_parameters(rank) and found.weights == 2 * PARAMETERS
