"""Settings that come with the embedded model, under which `pocket` learns in minutes on two cores.

    settings(["SokobanV1"], ["SokobanV1"])["agent_proxy.max_turn"]      # 5

They replace defaults: those of the schema and of the v1 command line. Whatever is stated wins over them, key by key: a
recipe, packaged or the user's own, a variable, the command line. The plan shows the origin of each.

One value of a packaged recipe is replaced, and a note says so: a board that `pocket` cannot read. It knows bare grids,
so the game stays and its board becomes the plain one. The user's own recipe, typed tags and typed settings of a board
are kept, with a note.
"""

from collections.abc import Collection, Iterator
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
MINI_BATCH = "ppo_mini_batch_size"
# A setting does not apply where the key beside it was stated: it would contradict that key, or switch it off.
GIVES_WAY_TO = {
    "es_manager.train.env_groups": "es_manager.train.env_configs.n_groups",
    "es_manager.val.env_groups": "es_manager.val.env_configs.n_groups",
    "algorithm.adv_estimator": "algorithm.bi_level_gae",
    f"{ACTOR}.use_kl_loss": f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_coef": f"{ACTOR}.use_kl_loss",
}
FILTER = (f"{ROLLOUT}.rollout_filter_value", f"{ROLLOUT}.rollout_filter_include_zero")
RUN_NAMES = {"SimpleSokoban": "pocket-sokoban", "FrozenLake": "pocket-frozenlake", "TwoArmedBandit": "pocket-bandit"}
TRAIN_TAGS, VAL_TAGS = (f"es_manager.{split}.env_configs.tags" for split in ("train", "val"))
ONE_TURN = {"agent_proxy.max_turn": 1, "agent_proxy.max_actions_per_turn": 1}


def settings(
    train_tags: list[str], val_tags: list[str], keep: Collection[str] = (), group_size: int | None = None
) -> dict[str, Any]:
    """The values for a run in these games; the tags to `keep` stay as they are.

    `group_size` is the one that the user chose. Groups of one have no spread to filter by, so they get no filter.
    """
    values = {key: value for key, value in SETTINGS.items() if group_size != 1 or key not in FILTER}
    tags = {tag: plain for tag, plain in TAGS.items() if tag not in keep}
    values[TRAIN_TAGS] = [tags.get(tag, tag) for tag in train_tags]
    values[VAL_TAGS] = [tags.get(tag, tag) for tag in val_tags]
    first = train_tags[0] if train_tags else ""  # an empty list is refused once the tree is whole
    values["trainer.experiment_name"] = RUN_NAMES.get(tags.get(first, first), "pocket")
    if train_tags and set(train_tags) <= set(ONE_PULL):
        values |= ONE_TURN
    return values


def notes(model: str, tags: Collection[str]) -> Iterator[str]:
    """A note on the boards that the model cannot read."""
    for tag in dict.fromkeys(tags):
        if tag in TAGS:
            plain = TAGS[tag]
            yield (
                f"{model} knows bare grids and has never seen {tag}: it starts no better than random play. The plain "
                f"board: {TRAIN_TAGS}=[{plain}] {VAL_TAGS}=[{plain}]"
            )
