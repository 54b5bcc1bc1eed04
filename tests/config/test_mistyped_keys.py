"""Suggestions for keys that do not exist: what the user meant, and never a key without effect."""

import pytest

from ragen.config import keys
from ragen.config.compose import resolve
from ragen.config.everyday_names import EVERYDAY_NAMES
from ragen.errors import ConfigError

STEPS, LR = "trainer.total_training_steps", "actor_rollout_ref.actor.optim.lr"
GROUP_SIZE, REPLY = "es_manager.train.group_size", "actor_rollout_ref.rollout.response_length"
MEANT = {
    "total_steps": STEPS, "steps": STEPS, "max_steps": STEPS, "epochs": STEPS, "num_epochs": STEPS,
    "trainer.total_steps": STEPS, "trainer.steps": STEPS, "trainer.max_steps": STEPS, "trainer.epochs": STEPS,
    "trainer.total_training_step": STEPS, "trainer.training_steps": STEPS, "trainer.total_trainig_steps": STEPS,
    "lr": LR, "learning_rate": LR, "trainer.lr": LR, "actor.lr": LR, "actor_rollout_ref.actor.lr": LR,
    "critic_lr": "critic.optim.lr", "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "batch_size": "ppo_mini_batch_size", "mini_batch_size": "ppo_mini_batch_size",
    "n_rollout": GROUP_SIZE, "num_generations": GROUP_SIZE, "group_size": GROUP_SIZE, "es_manager.group_size": GROUP_SIZE,
    "env_groups": "es_manager.train.env_groups", "num_groups": "es_manager.train.env_groups",
    "max_turns": "agent_proxy.max_turn", "agent_proxy.max_turns": "agent_proxy.max_turn", "turns": "agent_proxy.max_turn",
    "kl_coef": "actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "entropy_coef": "actor_rollout_ref.actor.entropy_coeff", "clip_ratio": "actor_rollout_ref.actor.clip_ratio_high",
    "temperature": "actor_rollout_ref.rollout.temperature", "temprature": "actor_rollout_ref.rollout.temperature",
    "max_tokens": REPLY, "max_new_tokens": REPLY, "response_length": REPLY,
    "save_every": "trainer.save_freq", "trainer.save_every": "trainer.save_freq", "save_freq": "trainer.save_freq",
    "eval_every": "trainer.test_freq", "trainer.eval_freq": "trainer.test_freq", "test_freq": "trainer.test_freq",
    "num_gpus": "trainer.n_gpus_per_node", "trainer.num_gpus": "trainer.n_gpus_per_node",
    "model": "model_path", "model_name": "model_path", "modelpath": "model_path", "model.name": "model.base_model",
    "seeds": "seed.train", "trainer.seed": "seed.train", "random_seed": "seed.train",
    "run_name": "trainer.experiment_name", "output_dir": "trainer.default_local_dir", "wandb": "trainer.logger",
    "adv_estimator": "algorithm.adv_estimator", "estimator": "algorithm.adv_estimator",
    "env": "es_manager.train.env_configs.tags", "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "training.steps": "training.total_training_steps", "training.lr": "optimization.actor_lr",
    "training.group_size": "training.n_rollout", "optimization.learning_rate": "optimization.actor_lr",
    "sft.training.lr": "sft.training.learning_rate", "lora_rank": "lora.rank",
}  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), MEANT.items())
def test_what_was_meant_is_suggested(typed, meant):
    assert f"did you mean {meant}?" in keys.suggest(typed, None)


def test_the_command_says_it():
    for start in ([], ["sokoban"]):
        with pytest.raises(ConfigError, match=r"did you mean trainer\.total_training_steps"):
            resolve([*start, "total_steps=5"], environ={})


@pytest.mark.parametrize("environment", [None, "sokoban"])
def test_no_suggestion_is_without_effect(environment):
    for name in (*EVERYDAY_NAMES, *MEANT):
        if not keys.is_key(name):
            suggested = keys.suggest(name, environment).partition("did you mean ")[2].partition("?")[0]
            assert keys.is_key(suggested) and not keys.no_effect(suggested), (name, suggested)
