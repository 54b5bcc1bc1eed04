"""Levels are the same for ever, in every process, and their statistics are those that the budgets are made for."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from statistics import mean

import pytest

from ragen.env.bandit import Bandit, TwoArmedBandit
from ragen.env.base import SPLITS
from ragen.env.check import levels_digest
from ragen.env.frozen_lake import FrozenLake
from ragen.env.sokoban import Sokoban
from ragen.env.sokoban_levels import LENGTH_WEIGHTS, content_class
from ragen.env.solve import Budget, baselines, overlap, random_success

VALIDATION_SEEDS = range(123, 635)
TEN_ACTIONS = Budget(turns=5, actions_per_turn=2, actions=10)
ONE_BOX = Sokoban(Sokoban.Config(num_boxes=1))

# Fingerprints of the states of levels 0 to 49 of every split. A change here changes every level that was ever reported:
# results before and after it cannot be compared.
FINGERPRINTS = {
    "sokoban 6x6, 1 box": (ONE_BOX, "cf81178f785c9564"),
    "sokoban 6x6, 3 boxes": (Sokoban(), "faecb1629b333023"),
    "sokoban 8x8, 2 boxes": (
        Sokoban(Sokoban.Config(dim_room=(8, 8), num_boxes=2, search_depth=10)),
        "13f95096c919ee18",
    ),
    "frozen lake": (FrozenLake(), "b17d20f744fa880d"),
    "bandit": (Bandit(), "88f55c1bc59cb703"),
    "two-armed bandit": (TwoArmedBandit(), "3e47f255caff6174"),
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_levels_never_change(name):
    env, fingerprint = FINGERPRINTS[name]
    states = [tuple(env.reset(seed, split)) for split in SPLITS for seed in range(50)]
    assert hashlib.sha256(repr(states).encode()).hexdigest()[:16] == fingerprint


def test_one_level_in_full():
    assert ONE_BOX.render(ONE_BOX.reset(123, "val")) == "######\n#___P#\n#_X__#\n##_#O#\n######\n######"


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_levels_are_the_same_in_a_fresh_process(hash_seed):
    code = (
        "from ragen.env.base import SPLITS; from ragen.env.check import levels_digest; "
        "from ragen.env.sokoban import Sokoban; print(levels_digest(Sokoban(), range(20), SPLITS))"
    )
    surroundings = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == levels_digest(Sokoban(), range(20), SPLITS)


def test_sokoban_level_statistics():
    states = [ONE_BOX.reset(seed, "val") for seed in VALIDATION_SEEDS]
    lengths = Counter(len(ONE_BOX.shortest_plan(state)) for state in states)
    assert sorted(lengths) == list(range(1, 11))
    assert 3.5 <= sum(length * number for length, number in lengths.items()) / len(states) <= 4.5
    assert 0.17 <= mean(random_success(ONE_BOX, state, TEN_ACTIONS) for state in states) <= 0.23


@pytest.mark.parametrize("split", ["train", "test", "sft"])
def test_sokoban_level_statistics_hold_in_other_splits(split):
    result = baselines(ONE_BOX, range(10_000, 10_512), split, TEN_ACTIONS)
    assert 0.17 <= result.random <= 0.23
    assert result.optimal == 1.0


def test_frozen_lake_random_play():
    env = FrozenLake(FrozenLake.Config(size=4, p=0.9, success_rate=1.0))
    result = baselines(env, VALIDATION_SEEDS, "val", TEN_ACTIONS)
    assert 0.22 <= result.random <= 0.28
    assert result.optimal == 1.0


def test_the_older_frozen_lake_is_hard_even_for_perfect_play():
    env = FrozenLake(FrozenLake.Config(p=0.8, success_rate=1 / 3))
    optimal = baselines(env, VALIDATION_SEEDS, "val", Budget(turns=5, actions_per_turn=1, actions=5)).optimal
    assert 0.25 <= optimal <= 0.31


def test_lengths_are_drawn_from_a_nine_bit_table():
    assert sum(LENGTH_WEIGHTS) == 512


@pytest.mark.parametrize("settings", [{"num_boxes": 1}, {"num_boxes": 2, "dim_room": (5, 6)}])
def test_sokoban_splits_share_no_board(settings):
    env = Sokoban(Sokoban.Config(**settings))
    boards = {split: {env.reset(seed, split) for seed in range(700)} for split in SPLITS}
    for index, split in enumerate(SPLITS):
        classes = {content_class(s.board.floor, s.board.targets, s.boxes, s.player) for s in boards[split]}
        assert classes == {index}
        for other in SPLITS[:index]:
            assert not boards[split] & boards[other]
        assert len(boards[split]) > 500


def test_small_lakes_repeat_across_splits_and_the_share_is_known():
    env = FrozenLake()
    assert 0.2 < overlap(env, range(5000), "train", VALIDATION_SEEDS, "val") < 0.9
    assert overlap(ONE_BOX, range(2000), "train", VALIDATION_SEEDS, "val") == 0.0


def test_search_depth_bounds_the_difficulty():
    env = Sokoban(Sokoban.Config(num_boxes=2, search_depth=4))
    assert max(len(env.shortest_plan(env.reset(seed))) for seed in range(60)) == 4


def test_easier_settings_keep_the_same_levels_where_the_bound_does_not_bite():
    deep, shallow = ONE_BOX, Sokoban(Sokoban.Config(num_boxes=1, search_depth=10))
    assert all(deep.reset(seed) == shallow.reset(seed) for seed in range(50))


@pytest.mark.parametrize(
    "env", [Sokoban(), FrozenLake(), Bandit(), TwoArmedBandit()], ids=lambda env: type(env).__name__
)
def test_an_unknown_split_is_refused(env):
    with pytest.raises(ValueError, match="validation"):
        env.reset(0, "validation")


def test_large_and_long_boards_work():
    for settings in ({"dim_room": (12, 12), "num_boxes": 1}, {"dim_room": (10, 10), "num_boxes": 3}):
        env = Sokoban(Sokoban.Config(**settings))
        assert all(env.shortest_plan(env.reset(seed)) is not None for seed in range(3))
