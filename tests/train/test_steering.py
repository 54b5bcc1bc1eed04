"""Levels are drawn where outcomes vary: by length, for each tag, the same after a resume and with several workers."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest
from made_up_runs import make_episode
from tiny import ROLLOUT, TINY

from ragen.agent.chat_template import ChatTemplate
from ragen.config.compose import resolve
from ragen.distributed.workers import ALONE
from ragen.model.load import find_model, load_model
from ragen.rollout.collect import World
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder
from ragen.train.levels import Slot, UniformLevels, slots
from ragen.train.steering import DECAY, FLOOR, NUM_CANDIDATES, PRIOR, Difficulties, SteeredLevels, pick
from ragen.train.trainer import train
from ragen.types import Group

STEERED = "es_manager.train.level_sampling=steered"
SOKOBAN, LAKE = "SimpleSokoban", "FrozenLake"


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_model(find_model("pocket")).tokenizer)


def configured(*words, tags=(SOKOBAN,), num_groups=16):
    counts = [num_groups // len(tags)] * len(tags)
    named = [f"es_manager.train.env_configs.{name}=[{','.join(map(str, values))}]" for name, values in
             (("tags", tags), ("n_groups", counts))]  # fmt: skip
    given = ["model_path=pocket", f"es_manager.train.env_groups={num_groups}", *named, STEERED, *words]
    return resolve(given, "base", environ={}).config


def sampling(config, chat, workers=ALONE, notes=None):
    worlds = {tag: World.make(config, tag, chat) for tag in config.es_manager.train.env_configs.tags}
    return SteeredLevels(config, worlds, workers, [].append if notes is None else notes.append)


def played(requests, length_of, varies):
    """A group for each request, with the rewards of a win and a loss where its length varies."""
    groups = []
    for request in requests:
        won = (True, False) if varies(length_of(request)) else (False, False)
        episodes = [make_episode(request.seed, one, group=request.group, tag=request.tag) for one in won]
        groups.append(Group(request.tag, request.seed, "train", request.group, tuple(episodes)))
    return groups


def lengths_of(steered):
    def length_of(request):
        env = steered.worlds[request.tag].env
        return len(env.shortest_plan(env.reset(request.seed, "train")))

    return length_of


# --- the statistic --------------------------------------------------------------------------------------------------


def test_weights_by_hand():
    known = Difficulties()
    assert known.weight(SOKOBAN, 3) == 1.0, "before the first group"
    known.observe([(SOKOBAN, 2, 0.0), (SOKOBAN, 2, 0.0), (SOKOBAN, 3, 0.5), (SOKOBAN, 3, 0.25), (LAKE, 2, 9.0)])
    mean = 0.75 / 4
    assert known.weight(SOKOBAN, 2) == pytest.approx(FLOOR + (1 - FLOOR) * PRIOR / (2 + PRIOR))
    assert known.weight(SOKOBAN, 3) == pytest.approx(FLOOR + (1 - FLOOR) * (0.75 + PRIOR * mean) / (2 + PRIOR) / mean)
    assert known.weight(SOKOBAN, 4) == known.weight(SOKOBAN, None) == pytest.approx(1.0), "untried: like the mean"
    assert known.weight(LAKE, 2) == pytest.approx(1.0), "tags do not mix"


def test_what_was_seen_fades():
    known = Difficulties()
    known.observe([(SOKOBAN, 9, 0.0), (SOKOBAN, 2, 0.25)])
    weights = [known.weight(SOKOBAN, 9)]
    for _ in range(100):
        known.observe([(SOKOBAN, 2, 0.25)])
        weights.append(known.weight(SOKOBAN, 9))
    assert weights == sorted(weights) and weights[0] < 0.8 and weights[-1] > 0.99
    assert known.sums[SOKOBAN]["9"] == [pytest.approx(DECAY**100), 0.0]


def test_where_nothing_varies_all_levels_are_equal():
    known = Difficulties()
    known.observe([(SOKOBAN, 2, 0.0), (SOKOBAN, 3, 0.0)])
    assert known.weight(SOKOBAN, 2) == known.weight(SOKOBAN, 3) == 1.0


def test_a_state_is_json_and_restores_exactly():
    known, restored = Difficulties(), Difficulties()
    known.observe([(SOKOBAN, 2, 0.1), (SOKOBAN, None, 0.7), (LAKE, 3, 1 / 3)])
    known.observe([(SOKOBAN, 2, 0.1)])
    restored.restore(json.loads(json.dumps(known.state())))
    assert restored.sums == known.sums
    state = known.state()
    known.observe([(SOKOBAN, 2, 0.9)])
    assert state == restored.state(), "a state that was taken does not change"


def test_picks_follow_their_weights():
    assert [pick([1.0, 0.0, 3.0], chance) for chance in (0.0, 0.24, 0.25, 0.999999)] == [0, 0, 2, 2]


# --- levels ---------------------------------------------------------------------------------------------------------


def test_levels_that_vary_are_drawn_more_and_the_others_still(chat):
    config = configured()
    steered = sampling(config, chat)
    length_of, drawn = lengths_of(steered), []
    for step in range(1, 31):
        requests = steered.choose(slots(config, step))
        assert [request.group for request in requests] == list(range(16)) and len(set(requests)) == 16
        metrics = steered.observe(played(requests, length_of, lambda length: length in (4, 5)))
        drawn.append(Counter(map(length_of, requests)))
    assert metrics["train/SimpleSokoban/num_len_3-4"] + metrics["train/SimpleSokoban/num_len_5-6"] > 4
    assert sum(value for name, value in metrics.items() if "/num_len_" in name) == 16
    assert 1 <= metrics["train/SimpleSokoban/optimal_length"] <= 10
    uniform = Counter(
        length_of(one) for step in range(1, 11) for one in UniformLevels(config).choose(slots(config, step))
    )
    last = sum(drawn[-10:], Counter())
    assert (uniform[4] + uniform[5]) / 160 < 0.35 and (last[4] + last[5]) / 160 > 0.55
    assert len(last) >= 8, "every length keeps its chance"


def test_levels_are_the_same_after_a_resume_and_no_level_comes_twice(chat):
    config = configured()
    one, again = sampling(config, chat), sampling(config, chat)
    seen = []
    for step in range(1, 7):
        if step == 4:
            again.restore(json.loads(json.dumps(one.state())))
        requests = one.choose(slots(config, step))
        one.observe(played(requests, lengths_of(one), lambda length: length < 4))
        seen += [request.seed for request in requests]
        if step >= 4:
            assert again.choose(slots(config, step)) == requests
            again.observe(played(requests, lengths_of(one), lambda length: length < 4))
    assert again.state() == one.state() and len(set(seen)) == len(seen)


@dataclass(frozen=True)
class Second:
    """The second of two workers, which can look up what the first one finds."""

    first: object

    def mine(self, items):
        return list(items)[1::2]

    def gather(self, mine):
        everyone = self.first.pop(0)
        assert list(mine) == everyone[1::2]
        return everyone

    def agree(self, value):
        return value


@dataclass(frozen=True)
class Remembering:
    found: list

    def mine(self, items):
        return list(items)

    def gather(self, mine):
        self.found.append(list(mine))
        return list(mine)

    def agree(self, value):
        return value


def test_workers_share_the_search_and_draw_the_same(chat):
    config, found = configured(), []
    alone = sampling(config, chat, Remembering(found))
    expected = alone.choose(slots(config, 1))
    assert sampling(config, chat, Second(found)).choose(slots(config, 1)) == expected


def test_a_pool_of_levels_is_searched_once(chat, monkeypatch):
    config = configured("data.train_data_num=20")
    steered = sampling(config, chat)
    solved = []
    monkeypatch.setattr(steered, "_solve", lambda tag, seed: solved.append(seed) or 3)
    for step in range(1, 8):
        requests = steered.choose(slots(config, step))
        steered.observe(played(requests, lambda request: 3, lambda length: True))
        assert all(10000 <= request.seed < 10020 for request in requests)
    assert sorted(solved) == list(range(10000, 10020))


LAKE_OF_CHANCE = "custom_envs.FrozenLake.env_config.success_rate=0.8"


@pytest.mark.parametrize("tag", [LAKE, "TwoArmedBandit", "Bandit"])
def test_without_a_known_optimum_levels_are_uniform_and_that_is_said_once(chat, tag):
    config = configured(LAKE_OF_CHANCE, tags=[tag])
    notes = []
    steered = sampling(config, chat, notes=notes)
    for step in (1, 2):
        requests = steered.choose(slots(config, step))
        assert requests == UniformLevels(config).choose(slots(config, step))
        assert steered.observe(played(requests, lambda request: 1, bool)) == {}
    assert len(notes) == 1 and f"levels of {tag} are drawn uniformly: " in notes[0]


def test_of_two_tags_one_may_be_steered(chat):
    config = configured(LAKE_OF_CHANCE, tags=[SOKOBAN, LAKE])
    steered = sampling(config, chat)
    requests = steered.choose(slots(config, 2))
    uniform = UniformLevels(config).choose(slots(config, 2))
    assert requests[8:] == uniform[8:]
    for number, request in enumerate(requests[:8]):
        first = 10000 + NUM_CANDIDATES * (16 + number)
        assert request.tag == SOKOBAN and first <= request.seed < first + NUM_CANDIDATES


def test_a_level_that_cannot_be_made_is_one_more_difficulty(chat):
    config = configured('custom_envs.Line.env_config={fault:raise,call:reset,seeds:[10001]}',
                        "custom_envs.Line.env_type=faulty_line:FaultyLine", tags=["Line"])  # fmt: skip
    steered = sampling(config, chat)
    assert steered._lengths([("Line", 10000), ("Line", 10001)]) == {("Line", 10000): 2, ("Line", 10001): None}
    assert steered.choose([Slot(0, "Line", 0)])


# --- runs -----------------------------------------------------------------------------------------------------------


WORDS = [*TINY, STEERED, f"{ROLLOUT}.rollout_filter_resample=True", "trainer.test_freq=1", "trainer.save_freq=1"]


def finished_run(folder, *words):
    given = [*WORDS, *words, f"trainer.default_local_dir={folder}"]
    return RunFolder(train(resolve(given, environ={}).config).folder)


def rows(folder):
    clocks = ("timing_s/", "perf/")
    return [{name: row[name] for name in row if not name.startswith(clocks)} for row in folder.read_metrics().rows]


def levels_of(folder, split):
    return [[one["seed"] for one in read_episodes(file.path)] for file in folder.episode_files(split)]


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path):
    whole = finished_run(tmp_path / "whole", "trainer.total_training_steps=3")
    finished_run(tmp_path / "parts", "trainer.total_training_steps=1")
    parts = finished_run(tmp_path / "parts", "trainer.total_training_steps=3")
    assert rows(parts) == rows(whole) and levels_of(parts, "train") == levels_of(whole, "train")
    assert levels_of(whole, "val") == [[123, 124]] * 3, "validation levels stay as they are"
