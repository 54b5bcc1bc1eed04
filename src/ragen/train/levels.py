"""Which levels a training step plays.

    sampling = UniformLevels(config)                   # or `steering.SteeredLevels`
    requests = sampling.choose(slots(config, step=1))  # groups on seeds 10000 … 10007, step 2 on 10008 … 10015

A slot is a place for a group: its tag and its place in the stream of levels, which advances with the step. A sampling
decides which level fills it. Slots depend on step and config alone, so a resumed run plays the same levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragen.config import derive
from ragen.config.schema import Config, TrainEnvs, ValEnvs
from ragen.errors import ConfigError
from ragen.rollout.collect import FailedGroup, GroupRequest
from ragen.types import Group

SPLIT = "train"
FURTHER = 100_000_000  # where the stream of further levels starts: no training step gets that far


class Slot(NamedTuple):
    """A place for a group. `group` is its number within the step, `place` the one in the stream of levels."""

    group: int
    tag: str
    place: int


class LevelSampling(Protocol):
    """Fills slots with levels, and may learn from the groups that were played on them."""

    def choose(self, slots: Sequence[Slot]) -> list[GroupRequest]: ...

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Once a step, with all its groups. Returns metrics."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class UniformLevels:
    """Every level of the stream in turn. Learns nothing."""

    def __init__(self, config: Config):
        self.config = config

    def choose(self, slots: Sequence[Slot]) -> list[GroupRequest]:
        return [request_of(self.config, slot, seed_of(self.config, slot.place)) for slot in slots]

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


def slots(config: Config, step: int) -> list[Slot]:
    """The groups of a step, which counts from 1."""
    envs = config.es_manager.train
    first = (step - 1) * envs.env_groups
    return [Slot(group, tag, first + group) for group, tag in enumerate(tags_of_groups(envs))]


def further_slots(config: Config, step: int, num_before: int, tags: Sequence[str]) -> list[Slot]:
    """Groups beyond those of a step, of which `num_before` were played already, further ones included."""
    num_groups, num_rounds = config.es_manager.train.env_groups, derive.num_further_rounds(config)
    start = FURTHER + (step - 1) * num_groups * num_rounds - num_groups
    return [Slot(group, tag, start + group) for group, tag in enumerate(tags, start=num_before)]


def seed_of(config: Config, place: int) -> int:
    """The level at a place of the stream. With `data.train_data_num` the same levels come round again."""
    pool = config.data.train_data_num
    return config.seed.train + (place if pool is None else place % pool)


def request_of(config: Config, slot: Slot, seed: int) -> GroupRequest:
    return GroupRequest(slot.tag, seed, SPLIT, slot.group, config.es_manager.train.group_size)


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
