"""Scores: compared with those of their peers, and put on tokens."""

import math
from collections import defaultdict
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen.algo.experience import number_turns
from ragen.algo.reward import GROUPINGS, normalize_scores, token_rewards

METHODS = ("identity", "mean", "mean_std", "asym_clip")
SCORES, GROUPS, TAGS = [1.0, 2.0, 3.0, 0.0, 10.0], [4, 4, 4, 1, 1], [0, 0, 0, 0, 7]


def normalized(scores, grouping, method, groups=GROUPS, tags=TAGS):
    result = normalize_scores(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.tensor(tags), grouping, method
    )
    return result.tolist()


def test_by_hand():
    assert all(normalized(SCORES, grouping, "identity") == SCORES for grouping in GROUPINGS)
    assert normalized(SCORES, "state", "mean") == [-1.0, 0.0, 1.0, -5.0, 5.0]
    # 0, 10: std sqrt(50).
    one, five = 1 / 1.000001, 5 / (math.sqrt(50) + 1e-6)
    assert normalized(SCORES, "state", "mean_std") == pytest.approx([-one, 0.0, one, -five, five], rel=1e-12)
    # One tag with 1, 2, 3, 0: mean 1.5. The other has one episode, which keeps its score.
    assert normalized(SCORES, "inductive", "mean") == [-0.5, 0.5, 1.5, -1.5, 10.0]
    assert normalized(SCORES, "inductive", "mean_std")[4] == 10.0
    # Mean 3.2.
    assert normalized(SCORES, "batch", "mean") == pytest.approx([-2.2, -1.2, -0.2, -3.2, 6.8])


def test_asym_clip_by_hand():
    # Fifteen times 0 and once 16: mean 1, squares 15 + 225 = 240 over 15, std 4: -1/4 and 15/4, which is cut to 3.
    scores = [0.0] * 15 + [16.0]
    got = normalized(scores, "batch", "asym_clip", [0] * 16, [0] * 16)
    assert got == pytest.approx([-1 / 4.000001] * 15 + [3.0])
    # The other way round -15/4 is cut to -1.
    got = normalized([-score for score in scores], "batch", "asym_clip", [0] * 16, [0] * 16)
    assert got == pytest.approx([1 / 4.000001] * 15 + [-1.0])


@pytest.mark.parametrize("method", METHODS)
def test_episodes_without_peers_keep_their_scores(method):
    assert normalized([5.0, -7.0], "state", method, [1, 2], [0, 0]) == [5.0, -7.0]
    assert normalized([5.0], "batch", method, [1], [0]) == [5.0]
    assert normalize_scores(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long(), "batch", method).shape == (0,)


def test_a_spread_within_the_constant_counts_as_none():
    # 0 and 1.4e-6: std 0.99e-6. 0 and 1.5e-6: std 1.06e-6.
    assert normalized([0.0, 1.4e-6], "state", "mean_std", [0, 0], [0, 0]) == [0.0, 0.0]
    assert normalized([0.0, 1.5e-6], "state", "mean_std", [0, 0], [0, 0])[1] == pytest.approx(0.364, abs=0.001)
    assert normalized([100.1] * 5, "batch", "mean_std") == [0.0] * 5


def test_float32_stays_float32():
    scores_E = torch.tensor([1.0, 2.0])
    assert (
        normalize_scores(scores_E, torch.zeros(2).long(), torch.zeros(2).long(), "state", "mean").dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("grouping", "method", "wrong"),
    [("level", "mean", "level"), ("level", "identity", "level"), ("state", "rank", "rank")],
)
def test_unknown_choices_are_refused(grouping, method, wrong):
    with pytest.raises(AssertionError, match=wrong):
        normalized(SCORES, grouping, method)


def naive(scores, keys, method):
    peers = defaultdict(list)
    for score, key in zip(scores, keys, strict=True):
        peers[key].append(score)
    result = []
    for score, key in zip(scores, keys, strict=True):
        if method == "identity" or len(peers[key]) == 1:
            result.append(score)
            continue
        centred, std = score - fmean(peers[key]), stdev(peers[key])
        if method != "mean":
            centred = centred / (std + 1e-6) if std > 1e-6 else 0.0
        result.append(max(-1.0, min(3.0, centred)) if method == "asym_clip" else centred)
    return result


@given(
    st.lists(
        st.tuples(
            st.integers(-640, 640).map(lambda number: number / 64), st.sampled_from([0, 3, -8]), st.integers(0, 1)
        ),
        max_size=20,
    ),
    st.sampled_from(GROUPINGS),
    st.sampled_from(METHODS),
)
def test_against_plain_loops(episodes, grouping, method):
    scores, groups, tags = (list(column) for column in zip(*episodes, strict=True)) if episodes else ([], [], [])
    keys = {"state": groups, "inductive": tags, "batch": [0] * len(scores)}[grouping]
    got = normalize_scores(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.long),
        torch.tensor(tags, dtype=torch.long),
        grouping,
        method,
    )
    assert got.tolist() == pytest.approx(naive(scores, keys, method), rel=1e-9, abs=1e-12)


def test_scores_on_tokens():
    episode_T, turn_T = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 0])
    assert token_rewards(torch.tensor([5.0, -1.0]), episode_T).tolist() == [0.0, 0.0, 5.0, 0.0, -1.0]
    by_turn = token_rewards(torch.tensor([2.0, 3.0, -1.0]), number_turns(episode_T, turn_T))
    assert by_turn.tolist() == [0.0, 2.0, 3.0, 0.0, -1.0]
    assert token_rewards(torch.zeros(0), episode_T[:0]).shape == (0,)
    for wrong in ([5.0], [5.0, 1.0, 1.0]):
        with pytest.raises(AssertionError, match="one score for each segment"):
            token_rewards(torch.tensor(wrong), episode_T)
