"""Which levels a training step plays: seeds that advance with the step, tag by tag.

levels(config, step=1)      # groups on seeds 10000 … 10007, step 2 on 10008 … 10015
"""

from ragen.config.schema import Config, TrainEnvs, ValEnvs
from ragen.rollout.collect import GroupRequest

SPLIT = "train"


def levels(config: Config, step: int) -> list[GroupRequest]:
    """The groups of a step, which counts from 1. With `data.train_data_num` the same levels come round again."""
    envs, pool = config.es_manager.train, config.data.train_data_num
    tags = [
        tag for tag, count in zip(envs.env_configs.tags, envs.env_configs.n_groups, strict=True) for _ in range(count)
    ]
    requests = []
    for group, tag in enumerate(tags):
        index = (step - 1) * envs.env_groups + group
        seed = config.seed.train + (index if pool is None else index % pool)
        requests.append(GroupRequest(tag, seed, SPLIT, group, envs.group_size))
    return requests


def tags_of_groups(envs: TrainEnvs | ValEnvs) -> list[str]:
    """The tag of each group, in order."""
    counted = zip(envs.env_configs.tags, envs.env_configs.n_groups, strict=True)
    return [tag for tag, count in counted for _ in range(count)]
