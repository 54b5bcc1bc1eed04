"""Which levels a training step plays: seeds that advance with the step, tag by tag.

levels(config, step=1)      # groups on seeds 10000 … 10007, step 2 on 10008 … 10015
"""

from collections.abc import Sequence

from ragen.config.schema import Config, TrainEnvs, ValEnvs
from ragen.errors import ConfigError
from ragen.rollout.collect import FailedGroup, GroupRequest
from ragen.types import Group

SPLIT = "train"


def levels(config: Config, step: int) -> list[GroupRequest]:
    """The groups of a step, which counts from 1. With `data.train_data_num` the same levels come round again."""
    envs, pool = config.es_manager.train, config.data.train_data_num
    requests = []
    for group, tag in enumerate(tags_of_groups(envs)):
        index = (step - 1) * envs.env_groups + group
        seed = config.seed.train + (index if pool is None else index % pool)
        requests.append(GroupRequest(tag, seed, SPLIT, group, envs.group_size))
    return requests


def tags_of_groups(envs: TrainEnvs | ValEnvs) -> list[str]:
    """The tag of each group, in order."""
    counted = zip(envs.env_configs.tags, envs.env_configs.n_groups, strict=True)
    return [tag for tag, count in counted for _ in range(count)]


def with_turns(groups: Sequence[Group | FailedGroup], config: Config) -> list[Group | FailedGroup]:
    """The groups, all of whose episodes were played: one whose first prompt has no room has nothing to train on."""
    rollout, played = config.actor_rollout_ref.rollout, [group for group in groups if isinstance(group, Group)]
    for episode in (episode for group in played for episode in group.episodes if not episode.turns):
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} less response_length="
            f"{rollout.response_length} has no room for the first prompt of {episode.tag}, {episode.split} level "
            f"{episode.seed}: raise max_model_len"
        )
    return list(groups)
