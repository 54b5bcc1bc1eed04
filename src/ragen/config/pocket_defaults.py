"""Settings that come with the embedded model, under which `pocket` learns in minutes on two cores.

    settings(["SokobanV1"], ["SokobanV1"])["agent_proxy.max_turn"]      # 5

They override recipe and v1 defaults, and anything the user types overrides them. `pocket` knows bare grids and short
prompts, so the game stays and its board becomes the plain one; FrozenLake's ice does not slip.
"""

from collections.abc import Collection, Mapping
from typing import Any

NAMES = ("pocket", "pocket-blank")
PACKAGED = (*NAMES, "smollm2")  # every model that comes with a package

# The tag that pocket plays where another of the same game was chosen.
TAGS = {
    "SokobanV1": "SimpleSokoban",
    "CoordSokoban": "SimpleSokoban",
    "FrozenLakeV1": "FrozenLake",
    "CoordFrozenLake": "FrozenLake",
}
ONE_PULL = ("TwoArmedBandit", "Bandit", "BanditTest")

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

SETTINGS = {
    "agent_proxy.prompt_style": "terse",
    "agent_proxy.max_turn": 5,
    "agent_proxy.max_actions_per_turn": 2,
    "es_manager.format_penalty": -0.1,
    "es_manager.train.env_groups": 16,
    "es_manager.train.group_size": 8,
    "es_manager.val.env_groups": 512,
    "custom_envs.FrozenLake.env_config.success_rate": 1.0,
    "data.val_batch_size": None,
    "data.train_data_num": None,
    "ppo_mini_batch_size": 64,
    "micro_batch_size_per_gpu": 64,
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.optim.lr": 3e-4,
    f"{ACTOR}.optim.lr_scheduler_type": "linear",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.0,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.response_length": 48,
    f"{ROLLOUT}.max_model_len": 1024,
    f"{ROLLOUT}.rollout_filter_value": 0.9,
    f"{ROLLOUT}.rollout_filter_include_zero": False,
    "trainer.total_training_steps": 150,
    "trainer.test_freq": 75,
    "trainer.val_before_train": True,
    "trainer.save_freq": 10,
    "trainer.save_best": True,
    "trainer.logger": ["console"],
}
RUN_NAMES = {"SimpleSokoban": "pocket-sokoban", "FrozenLake": "pocket-frozenlake", "TwoArmedBandit": "pocket-bandit"}
ONE_TURN = {"agent_proxy.max_turn": 1, "agent_proxy.max_actions_per_turn": 1}


def settings(train_tags: list[str], val_tags: list[str], keep: Collection[str] = ()) -> Mapping[str, Any]:
    """The values for a run in these games; the tags to `keep` stay as they are."""
    values = dict(SETTINGS)
    tags = {tag: plain for tag, plain in TAGS.items() if tag not in keep}
    values["es_manager.train.env_configs.tags"] = [tags.get(tag, tag) for tag in train_tags]
    values["es_manager.val.env_configs.tags"] = [tags.get(tag, tag) for tag in val_tags]
    values["trainer.experiment_name"] = RUN_NAMES.get(tags.get(train_tags[0], train_tags[0]), "pocket")
    if set(train_tags) <= set(ONE_PULL):
        values |= ONE_TURN
    return values
