"""Further levels are played until enough groups vary: what counts, what fills the batch, and when it ends."""

from collections import Counter
from dataclasses import replace

import pytest
from made_up_runs import make_episode
from tiny import ROLLOUT, TINY

from ragen.config.compose import resolve
from ragen.env.failure import EnvironmentFailed, TooManyFailures
from ragen.rollout.collect import FailedGroup
from ragen.run.run_logger import NullLogger
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder
from ragen.train.failures import Before, play_groups
from ragen.train.levels import Slot, UniformLevels
from ragen.train.resampling import play_rounds, varied_groups
from ragen.train.trainer import train
from ragen.types import Group

RESAMPLE = f"{ROLLOUT}.rollout_filter_resample"
WON_AND_LOST, A_STEP_LESS, EQUAL = (9.0, -1.0, -1.0), (-1.0, -0.9, -1.0), (-1.0, -1.0, -1.0)


def configured(*words):
    return resolve(["model_path=pocket", "es_manager.train.env_groups=4", *words], "base", environ={}).config


def made_group(slot, rewards):
    episodes = []
    for member, reward in enumerate(rewards):
        episode = make_episode(slot.place, False, group=slot.group, member=member, tag=slot.tag)
        episodes.append(replace(episode, final=replace(episode.final, reward=reward, penalty=0.0)))
    return Group(slot.tag, slot.place, "train", slot.group, tuple(episodes))


class Scripted:
    """Plays groups whose rewards are given, in the order asked; None fails."""

    def __init__(self, *rewards):
        self.rewards, self.asked = iter(rewards), []

    def __call__(self, slots):
        self.asked.append([slot.tag for slot in slots])
        pairs = [(slot, next(self.rewards)) for slot in slots]
        return [made_group(slot, rewards) for slot, rewards in pairs if rewards is not None]


def test_what_varies():
    rewards = [WON_AND_LOST, A_STEP_LESS, EQUAL, (4.0, 3.5, 4.0)]
    groups = play_rounds(configured(), 1, Scripted(*rewards)).played
    assert [group.group for group in varied_groups(groups)] == [0]  # a spread of 0.29 is faint beside one of 5.8
    assert [group.group for group in varied_groups(groups[1:])] == [1, 3], "without wins and losses it is not"
    assert varied_groups(groups[2:3]) == []


def test_every_tag_has_its_own_scale():
    tags = "es_manager.train.env_configs.tags=[SimpleSokoban,FrozenLake]"
    config = configured(tags, "es_manager.train.env_configs.n_groups=[2,2]")
    groups = play_rounds(config, 1, Scripted(WON_AND_LOST, EQUAL, (0.0, 0.1, 0.0), (0.0, 0.0, 0.0))).played
    assert [group.group for group in varied_groups(groups)] == [0, 2]


def test_without_it_the_batch_is_what_was_played():
    play = Scripted(EQUAL, WON_AND_LOST, A_STEP_LESS, EQUAL)
    rounds = play_rounds(configured(), 1, play)
    assert [group.group for group in rounds.batch] == [0, 1, 2, 3] and len(play.asked) == 1
    assert rounds.metrics() == {"rollout/varied_ratio": 0.25, "train/rollout_attempts": 1.0}


def test_a_round_plays_what_is_missing_until_enough_vary():
    play = Scripted(EQUAL, WON_AND_LOST, A_STEP_LESS, WON_AND_LOST, EQUAL, WON_AND_LOST, WON_AND_LOST)
    rounds = play_rounds(configured(f"{RESAMPLE}=True"), 1, play)
    assert [len(asked) for asked in play.asked] == [4, 2, 1]
    assert [group.group for group in rounds.batch] == [1, 3, 5, 6] and len(rounds.played) == 7
    assert rounds.metrics() == {
        "rollout/varied_ratio": 4 / 7,
        "train/rollout_attempts": 3.0,
        "rollout/resampled_groups": 3.0,
        "rollout/resampled_episodes": 9.0,
    }


def test_the_rounds_are_bounded_and_the_first_others_fill_the_batch():
    play = Scripted(WON_AND_LOST, *[EQUAL] * 20)
    rounds = play_rounds(configured(f"{RESAMPLE}=True", f"{RESAMPLE}_rounds=2"), 1, play)
    assert [len(asked) for asked in play.asked] == [4, 3, 3]
    assert [group.group for group in rounds.batch] == [0, 1, 2, 3]


def test_each_tag_gets_its_own_further_levels():
    tags = "es_manager.train.env_configs.tags=[SimpleSokoban,FrozenLake]"
    config = configured(tags, "es_manager.train.env_configs.n_groups=[2,2]", f"{RESAMPLE}=True")
    play = Scripted(WON_AND_LOST, WON_AND_LOST, EQUAL, WON_AND_LOST, WON_AND_LOST)
    rounds = play_rounds(config, 1, play)
    assert play.asked[1:] == [["FrozenLake"]]
    assert Counter(group.tag for group in rounds.batch) == {"SimpleSokoban": 2, "FrozenLake": 2}


def test_groups_whose_environment_failed_are_missing():
    play = Scripted(WON_AND_LOST, None, WON_AND_LOST, WON_AND_LOST, WON_AND_LOST)
    rounds = play_rounds(configured(f"{RESAMPLE}=True"), 1, play)
    assert [group.group for group in rounds.batch] == [0, 2, 3, 4]


@pytest.mark.parametrize(("before", "stops"), [(Before(4, 0), False), (Before(4, 2), True), (Before(0, 0), True)])
def test_failures_are_a_share_of_all_groups_of_the_step(before, stops):
    config = configured("es_manager.env_retries=0")
    requests = UniformLevels(config).choose([Slot(4, "SimpleSokoban", 4)])

    def play(requests, attempt):
        return [FailedGroup(one, EnvironmentFailed("raised", "level", "oh"), 0, 0, "", {}) for one in requests]

    if stops:
        with pytest.raises(TooManyFailures, match="in 3 of 5 groups" if before.num_groups else "in all 1 group"):
            play_groups(requests, play, config, NullLogger(), 1, "train", before)
    else:
        assert play_groups(requests, play, config, NullLogger(), 1, "train", before)[1]["failed_groups"] == 1


def test_a_run_trains_on_the_groups_that_vary_and_counts_the_others(tmp_path):
    words = [*TINY, f"{RESAMPLE}=True", "trainer.total_training_steps=2", "trainer.log_group_rv_table=True"]
    config = resolve([*words, f"trainer.default_local_dir={tmp_path / 'run'}"], environ={}).config
    folder = RunFolder(train(config).folder)
    rows = folder.read_metrics().rows
    assert sum(row["rollout/resampled_groups"] for row in rows) > 0, "there is something to look at"
    for row, file in zip(rows, folder.episode_files("train"), strict=True):
        episodes = read_episodes(file.path)
        assert len(episodes) == 2 * 3 + row["rollout/resampled_episodes"]
        assert len({episode["seed"] for episode in episodes}) == 2 + row["rollout/resampled_groups"]
        assert row["rollout/filter_kept_count"] == 2 and row["train/batch_size"] == 6
        won = [episode["success"] for episode in episodes]
        assert row["train/SimpleSokoban/success"] == pytest.approx(sum(won) / len(won)), "of all that were played"


def test_a_flaky_environment_does_not_end_a_run_in_a_small_round(tmp_path):
    """A further round may have a single group: that it fails is no reason to stop."""
    words = [
        *TINY, "custom_envs.Line.env_type=faulty_line:FaultyLine", "custom_envs.Line.max_actions_per_traj=4",
        'custom_envs.Line.env_config={fault:raise,call:reset,seeds:[100010000]}',
        *(f"es_manager.{split}.env_configs.tags=[Line]" for split in ("train", "val")),
        "es_manager.train.env_groups=1", "ppo_mini_batch_size=3",
        "es_manager.format_penalty=0",  # so that nothing varies
        f"{RESAMPLE}=True", "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    run = train(resolve(words, environ={}).config)
    (row,) = RunFolder(run.folder).read_metrics().rows
    assert run.status == "finished" and row["train/rollout_attempts"] == 4
    assert row["rollout/failed_groups"] == 1 and row["rollout/resampled_groups"] == 2
