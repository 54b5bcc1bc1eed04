"""Turns worked by hand in a corridor of five cells: start at 2, pit at 0, goal at 4, -0.25 a step, +1 at the goal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.agent.episode import noise_stream, take_turn
from ragen.env.base import Tag
from ragen.types import ENDINGS, EpisodeState

CALM = [1.0] * 100


@pytest.fixture(scope="session")
def play(corridor, rules_with):
    """Play turns of action texts; returns the episode after the last one, and all turn results."""

    def run(turns, env=corridor, tag=None, noise=CALM, well_formed=True, **changes):
        episode, results = EpisodeState(env.reset(0)), []
        for texts in turns:
            episode, turn = take_turn(
                env, tag or Tag(), rules_with(**changes), episode, texts, noise.__getitem__, well_formed
            )
            results.append(turn)
        return episode, results

    return run


def flags(episode):
    return episode.terminated, episode.truncated, episode.success


def test_a_win(play):
    episode, (turn,) = play([("Right", "right ")])
    assert flags(episode) == (True, False, True)
    assert episode.ended_by == "won"
    assert (turn.reward, turn.penalty, turn.actions, turn.num_effective) == (0.5, 0.0, ("r", "r"), 2)


def test_a_loss_stops_the_turn(play):
    episode, (turn,) = play([("Left", "Left", "Right")], max_actions_per_turn=3)
    assert flags(episode) == (True, True, False)
    assert episode.ended_by == "lost"
    assert (turn.reward, turn.actions, turn.num_valid) == (-0.5, ("l", "l"), 3)


def test_unknown_actions_are_dropped_and_cost_once(play):
    episode, (turn,) = play([("jump", "Left", "fly")], max_actions_per_turn=3)
    assert (turn.reward, turn.penalty, turn.actions) == (-0.25, -0.1, ("l",))
    assert (turn.num_listed, turn.num_valid) == (3, 1)
    assert not episode.warn_invalid
    assert not episode.finished


def test_no_valid_action_warns_and_costs_once(play):
    for texts in [(), ("jump", "fly")]:
        episode, (turn,) = play([texts])
        assert (turn.reward, turn.penalty, turn.actions) == (0.0, -0.1, ())
        assert episode.warn_invalid
        assert not episode.finished
    episode, _ = play([(), ("Right",)])
    assert not episode.warn_invalid


def test_a_malformed_reply_costs_even_with_valid_actions(play):
    _, (turn,) = play([("Right",)], well_formed=False)
    assert (turn.reward, turn.penalty, turn.actions) == (-0.25, -0.1, ("r",))


def test_rewards_and_penalties_add_up_apart(play):
    episode, turns = play([("Left",), ("jump",), ("Right", "x"), ("Right",)])
    assert [turn.reward for turn in turns] == [-0.25, 0.0, -0.25, -0.25]
    assert episode.reward == -0.75
    assert episode.penalty == pytest.approx(-0.2)
    assert (episode.num_turns, episode.num_actions) == (4, 3)


def test_an_invalid_reply_can_end_the_episode(play):
    episode, _ = play([("jump",)], tag=Tag(end_on_invalid=True))
    assert episode.ended_by == "invalid"
    assert flags(episode) == (True, True, False)
    episode, _ = play([("jump", "Left")], tag=Tag(end_on_invalid=True))
    assert not episode.finished


def test_the_action_limit(play):
    # Three actions in all: the second of the second turn is not executed, and that costs nothing.
    episode, turns = play([("Left", "Right"), ("Right", "Right")], tag=Tag(max_actions_per_traj=3))
    assert turns[1].actions == ("r",)
    assert turns[1].penalty == 0.0
    assert episode.ended_by == "max_actions"
    assert flags(episode) == (True, True, False)
    # A win with the last action is a win.
    episode, _ = play([("Right", "Right")], tag=Tag(max_actions_per_traj=2))
    assert flags(episode) == (True, False, True)


def test_the_turn_limit_is_neither_end_nor_success(play):
    episode, _ = play([("Left",), ("Right",)], max_turn=2)
    assert episode.ended_by == "max_turn"
    assert episode.finished
    assert flags(episode) == (False, False, False)


def test_a_finished_episode_takes_no_turn(play):
    with pytest.raises(AssertionError, match="won"):
        play([("Right", "Right"), ("Left",)])


def test_noise_is_counted_by_executed_actions(play, slippery):
    seen = []

    class Recorded:
        def __getitem__(self, step):
            seen.append(step)
            return 1.0 if step % 2 else 0.0

    episode, _ = play([("Right", "jump"), (), ("Right", "Right")], env=slippery, noise=Recorded())
    assert seen == [0, 1, 2]
    assert episode.state.cell == 1  # slipped to 1, walked to 2, slipped to 1


def test_noise_streams_differ_between_members_and_repeat():
    streams = [[noise_stream(7, 0, member)(step) for step in range(5)] for member in (0, 1, 0)]
    assert streams[0] == streams[2] != streams[1]
    assert all(0.0 <= noise < 1.0 for noise in streams[0])


WORDS = st.lists(st.sampled_from(["Left", "Right", "RIGHT", "jump", ""]), max_size=3)


@given(
    st.lists(st.tuples(WORDS, st.booleans()), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 3),
)
def test_invariants(slippery, rules_with, replies, max_turn, max_actions_per_traj, end_on_invalid, seed):
    tag = Tag(max_actions_per_traj=max_actions_per_traj, end_on_invalid=end_on_invalid)
    rules = rules_with(max_turn=max_turn, max_actions_per_turn=3)
    noise = noise_stream(seed, 0, 0)
    episode, results, executed = EpisodeState(slippery.reset(0)), [], []
    for texts, well_formed in replies:
        before = episode
        episode, turn = take_turn(slippery, tag, rules, before, texts, noise, well_formed)
        assert (episode, turn) == take_turn(slippery, tag, rules, before, texts, noise, well_formed)
        known = [text.lower()[:1] for text in texts if text.lower() in ("left", "right")]
        assert list(turn.actions) == known[: len(turn.actions)]
        assert (turn.penalty == 0.0) == (well_formed and len(known) == len(texts) > 0)
        assert episode.warn_invalid == (not known)
        results.append(turn)
        executed += turn.actions
        if episode.finished:
            break

    # The same steps, straight from the environment.
    state, reward, last = slippery.reset(0), 0.0, None
    for step, action in enumerate(executed):
        last = slippery.step(state, action, noise(step))
        state, reward = last.state, reward + last.reward
    assert (episode.state, episode.reward, episode.num_actions) == (state, reward, len(executed))
    assert episode.penalty == pytest.approx(-0.1 * sum(turn.penalty != 0 for turn in results))
    assert episode.success == (last is not None and last.success)
    assert episode.num_actions <= max_actions_per_traj
    assert episode.num_turns == len(results) <= max_turn
    assert (episode.terminated, episode.truncated) == ENDINGS[episode.ended_by]
