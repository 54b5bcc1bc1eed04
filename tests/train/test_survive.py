"""Kill -9 at any moment, start again with the same command: the end is that of a run that was never killed.

Bit for bit, on a CPU: weights, optimizer, metrics, episodes. The moments are drawn from a fixed seed, over the whole
run and within each phase, so that rollouts, updates and saves are all hit.
"""

import functools

import pytest
from kills import assert_same, checkpoint_of, files, kill_and_resume, unbroken_run
from tiny import ACTOR, ROLLOUT, TINY
from without_clock import metrics_without_clock

COMMON = [
    "train",
    *TINY,
    "es_manager.train.env_groups=3",
    "es_manager.train.group_size=4",
    "es_manager.val.env_groups=4",
    f"{ROLLOUT}.rollout_filter_value=0.9",
    f"{ROLLOUT}.rollout_filter_include_zero=False",
    "ppo_mini_batch_size=8",
    "trainer.test_freq=3",
    "trainer.val_before_train=True",
    "trainer.log_group_rv_table=True",
]
GRPO = [
    "trainer.total_training_steps=5",
    f"{ACTOR}.shuffle=True",
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
    f"{ACTOR}.optim.lr_warmup_steps=2",
]
PPO = [
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.horizon=100",
]
PHASES = ("rollout", "update", "checkpoint")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("save_freq", "num_kills"), [(1, 3), slow(1, 18), slow(2, 12)])
def test_grpo_survives(nursery, tmp_path, save_freq, num_kills):
    words = [*COMMON, *GRPO, f"trainer.save_freq={save_freq}"]
    unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, (*PHASES, None), save_freq, seconds):
        assert_same(folder, unbroken)
        assert checkpoint_of(folder) == checkpoint_of(unbroken)


@pytest.mark.parametrize(("save_freq", "num_kills"), [slow(1, 6), slow(2, 4), slow(-1, 3)])
def test_steered_levels_and_resampling_survive(nursery, tmp_path, save_freq, num_kills):
    steered = ["es_manager.train.level_sampling=steered", f"{ROLLOUT}.rollout_filter_resample=True"]
    words = [*COMMON, *GRPO, *steered, f"trainer.save_freq={save_freq}"]
    unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
    assert any(row.get("rollout/resampled_groups", 0.0) > 0 for row in metrics_without_clock(unbroken))
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, ("rollout", "update"), seed=7, seconds=seconds):
        assert_same(folder, unbroken)


@pytest.mark.parametrize("num_kills", [slow(6)])
def test_ppo_with_its_critic_and_its_kl_control_survives(nursery, tmp_path, num_kills):
    words = [*COMMON, *PPO]
    unbroken, _ = unbroken_run(nursery, tmp_path / "unbroken", words)
    coefficients = [row.get("actor/reward_kl_penalty_coeff") for row in metrics_without_clock(unbroken)]
    assert len(set(coefficients[1:])) == 3  # there is something to restore
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, ("update", "critic", "checkpoint"), seed=3):
        assert_same(folder, unbroken)
        assert checkpoint_of(folder) == checkpoint_of(unbroken)


@pytest.mark.parametrize("num_kills", [slow(8)])
def test_an_adapter_survives(nursery, tmp_path, num_kills):
    words = [*COMMON, *GRPO, "lora.rank=4", "lora.alpha=8", "trainer.save_freq=1"]
    unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, (*PHASES, None), seed=5, seconds=seconds):
        assert_same(folder, unbroken)
        assert checkpoint_of(folder) == checkpoint_of(unbroken)


@pytest.mark.parametrize("num_kills", [slow(8)])
def test_the_best_checkpoint_survives(nursery, tmp_path, num_kills):
    words = [*COMMON, *GRPO, "trainer.save_freq=2", "trainer.save_best=True", "trainer.test_freq=1"]
    words.append("trainer.total_training_steps=4")
    unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, ("checkpoint", None), seed=6, seconds=seconds):
        assert_same(folder, unbroken)
        assert weights(folder) == weights(unbroken)


def weights(folder):
    """Of all checkpoints, and which of them is the best."""
    held = files(folder, "*.safetensors")
    assert len({path.split("/")[0] for path in held}) <= 2
    return held, (folder / "best_checkpoint.json").read_bytes()


@pytest.mark.parametrize("num_kills", [slow(5)])
def test_a_run_that_saves_nothing_begins_again(nursery, tmp_path, num_kills):
    words = [*COMMON, *GRPO, "trainer.save_freq=-1", "trainer.total_training_steps=4"]
    unbroken, _ = unbroken_run(nursery, tmp_path / "unbroken", words)
    for folder in kill_and_resume(nursery, tmp_path, words, num_kills, ("rollout", "update"), seed=4):
        assert_same(folder, unbroken)
        assert not [*folder.glob("global_step_*"), *folder.glob("latest*")]
