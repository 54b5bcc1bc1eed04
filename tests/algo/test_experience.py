"""Tokens, turns and episodes: which is which, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_experience import experience

from ragen.algo.experience import Experience


def test_the_example_of_the_docstring():
    made = experience([[2, 1], [3]], [0.0, 0.0, 5.0, 0.0, 0.0, -1.0], [7, 7])
    assert made.episode_T.tolist() == [0, 0, 0, 1, 1, 1] and made.turn_T.tolist() == [0, 0, 1, 0, 0, 0]
    assert made.returns_E.tolist() == [5.0, -1.0] and made.returns_E.dtype == torch.float64
    assert made.num_tokens_E.tolist() == [3, 3]
    assert made.segment_T.tolist() == [0, 0, 1, 2, 2, 2]
    assert made.ends_turn_T.tolist() == [False, True, True, False, False, True]
    assert made.ends_episode_T.tolist() == [False, False, True, False, False, True]


def test_nothing_at_all():
    made = experience([], [])
    assert made.returns_E.shape == made.num_tokens_E.shape == made.segment_T.shape == made.ends_turn_T.shape == (0,)


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=6))
def test_turns_and_episodes_against_plain_loops(lengths):
    total = sum(map(sum, lengths))
    made = experience(lengths, [float(2**index % 97) for index in range(total)])
    ends_turn, ends_episode, segment, number, returns, place = [], [], [], 0, [], 0
    for turns in lengths:
        returns.append(sum(2**index % 97 for index in range(place, place + sum(turns))))
        for turn, length in enumerate(turns):
            segment += [number] * length
            ends_turn += [False] * (length - 1) + [True]
            ends_episode += [False] * (length - 1) + [turn == len(turns) - 1]
            number += 1
        place += sum(turns)
    assert made.segment_T.tolist() == segment
    assert made.ends_turn_T.tolist() == ends_turn and made.ends_episode_T.tolist() == ends_episode
    assert made.returns_E.tolist() == returns
    assert made.num_tokens_E.tolist() == [sum(turns) for turns in lengths]


@pytest.mark.parametrize(
    ("episodes", "turns", "groups", "message"),
    [
        ([0, 1, 0], [0, 0, 0], [1, 1], "in order"),
        ([0, 0, 2], [0, 0, 0], [1, 1, 1], "with tokens"),
        ([0, 0, 0], [0, 0, 0], [1, 1], "with tokens"),  # the last episode has no token, and its score no place
        ([1, 1, 1], [0, 0, 0], [1], "in order"),
        ([0, 0, 0], [0, 1, 0], [1], "turns must come in order"),
        ([0, 0], [0, 0], [1], "one entry per token"),
    ],
)
def test_a_wrong_order_is_noticed(episodes, turns, groups, message):
    with pytest.raises(AssertionError, match=message):
        Experience(torch.zeros(3), torch.tensor(episodes), torch.tensor(turns), torch.tensor(groups))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_must_be_finite(bad):
    with pytest.raises(ValueError, match=f"every reward must be a finite number, got {bad} at token 1"):
        experience([[3]], [0.0, bad, 0.0])
    with pytest.raises(ValueError, match=f"every value must be a finite number, got {bad} at token 2"):
        experience([[3]], [0.0] * 3, values=[0.0, 0.0, bad])
