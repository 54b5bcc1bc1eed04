"""What a run will hold on a GPU: by hand, what the plan chooses as memory shrinks, and what it refuses."""

import json
import shlex
from functools import cache

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.engine.native.slot_memory import slot_bytes
from ragen.errors import ConfigError
from ragen.run.memory_plan import ACTOR, CONTEXT, CRITIC, LARGE, PREFILL_TOKENS, plan
from ragen.run.model_shape import FAMILIES, POCKET, PUBLISHED, QWEN_05B, QWEN_3B, QWEN_7B, ModelShape, shape_of
from ragen.run.nearest_fit import changed, check_fits, check_named

PARAMETERS = 3_085_938_688
GB = 10**9
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=False"


MODELS = ("actor_rollout_ref.model", "critic.model")
FOLLOWING = {  # keys that others follow when a command is resolved
    "micro_batch_size_per_gpu": [
        f"{key}.ppo_micro_batch_size_per_gpu" for key in ("actor_rollout_ref.actor", "critic")
    ],
    "lora.rank": [f"{key}.lora_rank" for key in MODELS],
}


@cache
def base():
    words = ["model_path=x", "micro_batch_size_per_gpu=2", "algorithm.adv_estimator=grpo"]
    return resolve(words, "_2_sokoban", environ={}).config


def config(*overrides):
    """The base with other values, without resolving a command for each."""
    change = {}
    for override in overrides:
        key, _, value = override.partition("=")
        change |= dict.fromkeys(FOLLOWING.get(key, [key]), yaml.safe_load(value))
    return changed(base(), change)


PPO = ("algorithm.adv_estimator=gae",)
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")


# --- by hand ------------------------------------------------------------------------------------------------------


def test_what_is_held_by_hand():
    """Weights in bf16; masters, moments and gradients in float32, gradients of one model at a time."""
    alone, ppo, with_reference = (plan(QWEN_3B, config(*more), 141 * GB) for more in ((), PPO, (*PPO, *KL)))
    assert alone.held == (2 + 4 + 8) * PARAMETERS and alone.gradients == 4 * PARAMETERS
    assert ppo.held == 2 * alone.held and ppo.gradients == alone.gradients
    assert with_reference.held == ppo.held + 2 * PARAMETERS
    assert alone.update == alone.held + alone.kept + alone.gradients + alone.activations <= alone.peak


def test_slots_by_hand():
    """128 episodes of 3,600 tokens and a burst: 129 rows of 4,096 tokens, 36 layers, keys and values of 2 x 128."""
    found = plan(QWEN_3B, config("trainer.test_freq=-1", "trainer.val_before_train=False"), 141 * GB)
    assert (found.num_slots, found.slot_tokens) == (128, 4096)
    assert found.cache == 129 * 4096 * 36 * 2 * 256 * 2
    with_validation = plan(QWEN_3B, config("trainer.test_freq=10", "es_manager.val.env_groups=512"), 200 * GB)
    assert with_validation.num_slots == 256
    two = plan(
        QWEN_3B, config("trainer.n_gpus_per_node=2", "trainer.test_freq=-1", "trainer.val_before_train=False"), 141 * GB
    )
    assert two.num_slots == 64, "each worker plays half of the groups"


def test_the_share_of_the_sampler_caps_its_slots_and_refuses_nothing():
    less, least = (
        plan(QWEN_3B, config(f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"), 141 * GB)
        for share in (0.05, 0.0001)
    )
    assert less.cache <= 0.05 * 141 * GB and 1 < less.num_slots < 128
    assert least.num_slots == 1 and least.fits


def test_adapters_have_small_masters_and_no_gradient_of_the_head():
    whole = plan(QWEN_3B, config(), 141 * GB)
    for rank in (8, 64):
        found = plan(QWEN_3B, config(f"lora.rank={rank}"), 141 * GB)
        assert found.masters == 4 * QWEN_3B.num_adapter_parameters(rank) and found.weights == 2 * PARAMETERS
        assert whole.activations - found.activations == 151936 * 2048 * (2 + 2 + 4 * (whole.num_tokens * 5 / 9 > 3533))


def test_a_small_model_recomputes_nothing():
    assert plan(POCKET, config(), 4 * GB).num_recomputed == 0


def test_numbers_that_stand_elsewhere_too():
    import inspect

    from ragen.engine.native.engine import NativeEngine
    from ragen.engine.native.slot_memory import MAX_ROWS
    from ragen.model import decoder, load, random_weights

    engine = inspect.signature(NativeEngine).parameters
    assert (FAMILIES, LARGE) == (decoder.FAMILIES, load.LARGE)
    assert engine["max_prefill_tokens"].default == PREFILL_TOKENS and engine["max_rows"].default == MAX_ROWS
    published = {shape.short_name: shape for shape in PUBLISHED}
    for name, (layers, hidden, inside, heads, kv_heads, vocabulary, tied) in random_weights.SHAPES.items():
        shape = published[name]
        assert shape[1:6] == (layers, hidden, inside, heads, kv_heads) and shape[7:9] == (vocabulary, tied)


# --- what is chosen -----------------------------------------------------------------------------------------------


def test_what_is_given_up_as_memory_shrinks():
    plenty, less, little, least = (
        plan(QWEN_3B, config("micro_batch_size_per_gpu=4"), capacity * GB) for capacity in (200, 110, 80, 70)
    )
    assert all(one.fits and not one.offloaded for one in (plenty, less, little, least))
    assert (plenty.num_tokens, plenty.keeps_slots, plenty.num_recomputed) == (4 * 3600, True, 0)
    assert 4096 <= less.num_tokens < 4 * 3600 and less.keeps_slots, "first the size of micro-batches"
    assert not little.keeps_slots and little.num_recomputed == 0, "then slots that stay"
    assert not least.keeps_slots and least.num_recomputed > 0, "then layers are recomputed"


def test_ppo_of_3b_fits_on_80_gb_with_the_critics_state_in_main_memory():
    found = plan(QWEN_3B, config(*PPO), 80 * GB)
    assert found.fits and found.offloaded == (CRITIC,) and found.host == 12 * PARAMETERS
    assert found.held == (2 + 2 + 12) * PARAMETERS
    assert plan(QWEN_3B, config(*PPO), 40 * GB).offloaded == (CRITIC, ACTOR)
    assert not plan(QWEN_3B, config(*PPO), 141 * GB).offloaded


def test_main_memory_is_not_assumed_where_it_is_known():
    assert plan(QWEN_3B, config(*PPO), 80 * GB, host_memory=40 * GB).fits
    assert not plan(QWEN_3B, config(*PPO), 80 * GB, host_memory=30 * GB).fits
    two = config(*PPO, "trainer.n_gpus_per_node=2")
    assert not plan(QWEN_3B, two, 80 * GB, host_memory=40 * GB).fits, "two workers need it twice"


def test_the_key_offloads_where_nothing_asks_for_it():
    assert plan(QWEN_3B, config(OFFLOAD), 141 * GB).offloaded == (ACTOR,)
    both = plan(QWEN_3B, config(*PPO, "critic.model.fsdp_config.optimizer_offload=True"), 141 * GB)
    assert both.offloaded == (CRITIC,)


def test_main_memory_that_the_key_asks_for_must_be_free():
    asked = config(OFFLOAD)
    assert check_fits(QWEN_3B, asked, 141 * GB, host_memory=40 * GB).offloaded == (ACTOR,)
    with pytest.raises(ConfigError, match=r"37 GB of main memory for optimizer_offload, and 30 GB are free") as caught:
        check_fits(QWEN_3B, asked, 141 * GB, host_memory=30 * GB)
    assert str(caught.value).endswith(f"{OFFLOAD.replace('True', 'False')}")
    with pytest.raises(ConfigError, match=r"74 GB of main memory"):
        check_fits(QWEN_3B, config(OFFLOAD, "trainer.n_gpus_per_node=2"), 141 * GB, host_memory=40 * GB)


def test_a_critic_of_another_shape():
    small = plan(QWEN_3B, config(*PPO), 141 * GB, critic=QWEN_05B)
    assert small.weights == 2 * (PARAMETERS + QWEN_05B.num_parameters) and small.gradients == 4 * PARAMETERS
    large = plan(QWEN_05B, config(*PPO), 141 * GB, critic=QWEN_3B)
    assert large.num_layers == QWEN_3B.num_layers and large.gradients == 4 * PARAMETERS


def test_layers_are_not_recomputed_where_the_user_says_so():
    assert plan(QWEN_3B, config(CHECKPOINTING), 74 * GB).num_recomputed == 0


CHANGES = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.model.lora_rank": 16,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*PUBLISHED, POCKET]), st.sets(st.sampled_from([*CHANGES])), st.integers(2, 400), st.data())
def test_any_plan_holds_its_own_promises(model, keys, capacity, data):
    micro = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": data.draw(st.integers(1, 8))}
    asked = changed(config(), {key: CHANGES[key] for key in sorted(keys)} | micro)
    found, more = plan(model, asked, capacity * GB), plan(model, asked, 2 * capacity * GB)
    assert found.num_tokens >= 3600 and found.num_slots >= 1 and found.num_scored_tokens >= 3600
    assert 0 <= found.num_recomputed <= model.num_layers
    assert found.cache == slot_bytes(model, found.num_slots, 3600, 2)
    assert found.fits == (found.peak + CONTEXT <= capacity * GB) and (more.fits or not found.fits)
    if not found.fits:
        with pytest.raises(ConfigError, match=rf"{model.name} needs \d+ GB"):
            check_fits(model, asked, capacity * GB)


# --- refusing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "capacity", "words", "named"),
    [
        ("Qwen2.5-3B", 24, PPO, "lora_rank=64"),
        ("Qwen2.5-3B", 12, PPO, "adv_estimator=grpo"),
        ("Qwen2.5-14B", 24, (), "model_path=random:Qwen2.5-7B"),
        ("Qwen2.5-14B", 16, (*PPO, "critic.model.path=random:Qwen2.5-7B"), "critic.model.path=random:Qwen2.5-3B"),
        ("Qwen2.5-3B", 12, ("lora.rank=8", CHECKPOINTING), "enable_gradient_checkpointing=True"),
    ],
)
def test_the_nearest_setting_fits(capsys, model, capacity, words, named):
    """Named in the message of a refused dry run, and the same command with it is not refused."""
    command = [
        "train",
        "--config-name=_2_sokoban",
        "model_path=random:" + model,
        "algorithm.adv_estimator=grpo",
        *words,
    ]
    command += ["--dry-run", f"--gpu-memory={capacity}GB"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"random:{model} needs" in said and f"this one has {capacity} GB" in said and named in said
    overrides = shlex.split(said.partition("The nearest setting that fits: ")[2])
    assert main([*command, *overrides]) == 0
    assert "memory: " in capsys.readouterr().out


def test_fine_tuning_has_a_nearest_setting_too(capsys):
    words = ["sokoban", "sft.training.base_model=random:Qwen2.5-3B", "sft.training.micro_batch_size=64"]
    command = ["sft", *words, "--dry-run", "--gpu-memory=14GB"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "sft.training.micro_batch_size=1" in said
    assert main([*command, *shlex.split(said.partition("The nearest setting that fits: ")[2])]) == 0


def test_a_sweep_says_that_its_runs_do_not_fit_here(monkeypatch):
    """Only a note: the node that a run is placed on may have larger GPUs."""
    from ragen.experiment import check

    asked = changed(config(*PPO), {"model_path": "random:Qwen2.5-3B"})
    for memory, count in ((24 * GB, 1), (80 * GB, 0), (None, 0)):
        monkeypatch.setattr(check, "_gpu_memory", lambda memory=memory: memory)
        notes = check._about_memory(asked)
        assert len(notes) == count and all("this one has 24 GB" in note for note in notes)


def test_the_larger_micro_batch_of_actor_and_critic_counts():
    both = plan(QWEN_05B, config(*PPO, "critic.ppo_micro_batch_size_per_gpu=4"), 141 * GB)
    assert both.num_tokens == 4 * 3600
    assert plan(QWEN_05B, config("critic.ppo_micro_batch_size_per_gpu=4"), 141 * GB).num_tokens == 2 * 3600


def test_nothing_fits_into_a_small_card(capsys):
    command = ["train", "--config-name=_2_sokoban", "model_path=random:Qwen2.5-7B", "--dry-run", "--gpu-memory=2GB"]
    assert main(command) == 2
    assert "No setting was found that fits: use a smaller model" in capsys.readouterr().err


def test_the_line_of_a_dry_run(capsys):
    command = ["train", "--config-name=_2_sokoban", "model_path=random:Qwen2.5-3B", *PPO, "--dry-run"]
    assert main([*command, "--gpu-memory", "80GB"]) == 0
    said = " ".join(capsys.readouterr().out.replace("#", "").split())
    for part in (
        "memory: 75 GB of 80 GB at the peak: weights 12.3, masters 12.3, Adam 24.7, gradients 12.3, activations",
        "micro-batches of 3,600 tokens, 0 of 36 layers recomputed",
        "sampler: 128 slots of 4,096 tokens 19.5, released before updates",
        "in main memory: the critic's masters and Adam 37.0",
    ):
        assert part in said, part
    assert main(command) == 0 and "memory: " not in capsys.readouterr().out, "no GPU here"


@pytest.mark.parametrize("size", ["80", "80GB", "80 gb", "74.6GiB", "80000MB"])
def test_sizes(size):
    from ragen.machine import read_size

    assert abs(read_size(size) - 80 * GB) < GB


@pytest.mark.parametrize("size", ["", "much", "0", "-80GB", "80TB", "8.0.0GB"])
def test_wrong_sizes(capsys, size):
    assert main(["doctor", f"--gpu-memory={size}"]) == 2
    assert "write it as 80GB" in capsys.readouterr().err


def test_a_real_run_takes_no_size(capsys):
    assert main(["train", "sokoban", "--gpu-memory=80GB"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


# --- shapes -------------------------------------------------------------------------------------------------------

STORED = {
    "model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "intermediate_size": 11008,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_shape_of_a_model_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STORED))
    assert ModelShape.of_folder(QWEN_3B.name, tmp_path) == QWEN_3B
    assert shape_of(str(tmp_path)) == QWEN_3B._replace(name=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(STORED | {"model_type": "gpt2"}))
    assert ModelShape.of_folder("x", tmp_path) is None and ModelShape.of_folder("x", tmp_path / "none") is None


def test_shapes_by_name(tmp_path):
    assert shape_of("Qwen/Qwen2.5-7B", {})[1:] == QWEN_7B[1:] == shape_of("random:Qwen2.5-7B", {})[1:]
    assert shape_of("pocket", {}) == POCKET and shape_of("someone/else", {}) is None
    cached = tmp_path / "models--someone--else/snapshots/1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(STORED))
    assert shape_of("someone/else", {"HF_HUB_CACHE": str(tmp_path)}) == QWEN_3B._replace(name="someone/else")


def test_without_a_gpu_or_a_known_model_there_is_no_plan():
    assert check_named(config(), None) is None
    assert check_named(config("model_path=someone/else"), 80 * GB) is None
