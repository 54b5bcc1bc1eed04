"""Every `train.sh` command of the published experiments, read out of the documents' text, resolves to what it says."""

import re
import shlex
from pathlib import Path

import pytest

from ragen.config.compose import resolve
from ragen.config.tree import leaves

SEEDS = Path(__file__).parents[1] / "data/seeds"

# Independent of the dialect's own table: what each typed key of these commands must have set.
TREE_KEYS = {
    "model.base_model": "model_path",
    "model.experiment_name": "trainer.experiment_name",
    "training.micro_batch_size": None,  # divided by the GPUs, below
    "training.train_batch_size": "es_manager.train.env_groups",
    "training.n_rollout": "es_manager.train.group_size",
    "training.ppo_batch_size": "ppo_mini_batch_size",
    "training.max_turns": "agent_proxy.max_turn",
    "training.no_think_rl": None,
    "training.val_batch_size": "data.val_batch_size",
    "training.val_data_num": None,
    "optimization.kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "optimization.adv_estimator": "algorithm.adv_estimator",
    "system.n_gpus": "trainer.n_gpus_per_node",
    "rl_or_sft": "rl_or_sft",
}


def commands() -> list[list[str]]:
    """The overrides after `bash train.sh`, up to a redirection."""
    text = "\n".join(path.read_text() for path in sorted(SEEDS.glob("*.txt"))).replace("\\\n", " ")
    found = []
    for line in re.findall(r"^bash train\.sh .*$", text, flags=re.MULTILINE):
        overrides = shlex.split(re.split(r"2>&1|>", line)[0])
        found.append(overrides[2:])
    return found


def number(text: str):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)


def test_all_eighteen_are_found():
    assert len(commands()) == 18


@pytest.mark.parametrize(
    "overrides", commands(), ids=lambda overrides: f"{overrides[0]}-{overrides[2].rpartition('=')[2]}"[:60]
)
def test_command_resolves(overrides):
    tree = leaves(resolve(overrides, environ={}).config)
    typed = dict(word.split("=", 1) for word in overrides[1:])
    num_gpus = int(typed.get("system.n_gpus", 1))
    for key, text in typed.items():
        target = key if key.startswith("sft.") else TREE_KEYS[key]
        if target:
            assert tree[target] == number(text), key
    if "training.micro_batch_size" in typed:
        assert tree["micro_batch_size_per_gpu"] == int(typed["training.micro_batch_size"]) // num_gpus
        assert tree["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == tree["micro_batch_size_per_gpu"]
    assert tree["agent_proxy.enable_think"] is not (typed.get("training.no_think_rl") == "True")
    assert tree["system.CUDA_VISIBLE_DEVICES"] == ",".join(str(index) for index in range(num_gpus))
    if typed.get("rl_or_sft") == "sft":
        assert typed["training.val_data_num"] == ""
        assert tree["es_manager.val.env_groups"] == 512  # an empty value means all
        assert tree["es_manager.val.group_size"] == int(typed["training.n_rollout"])
    else:
        groups, size = int(typed["training.train_batch_size"]), int(typed["training.n_rollout"])
        assert groups * size == int(typed["training.ppo_batch_size"]) == 32
        assert tree["es_manager.train.env_configs.n_groups"] == [groups]
        assert tree["trainer.total_training_steps"] == 10_000 // groups * 5
        assert tree["actor_rollout_ref.actor.use_kl_loss"] is True
    expected = {"sokoban": "SokobanV1", "frozenlake": "FrozenLakeV1", "two_armed_bandit": "TwoArmedBandit"}
    assert tree["es_manager.val.env_configs.tags"] == [expected[overrides[0]]]
