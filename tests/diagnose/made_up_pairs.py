"""Groups, turns and prompts without a game or a model, for the tests of collapse metrics."""

from ragen.diagnose.collapse import Pair, Samples
from ragen.types import Episode, Group, Turn, TurnResult


def turn(given, reply, continues=False):
    return Turn(
        given_ids=tuple(given),
        continues=continues,
        reply_ids=tuple(reply),
        log_probs=(-1.0,) * len(reply),
        stopped_by="answer",
        state_text="",
        turn_text="",
        reply_text="",
        result=TurnResult(0.0, 0.0, (), 0, 0, 0),
    )


def groups_of(tree):
    """From [groups][episodes][turns] of (given ids, reply ids)."""
    return [
        Group("T", 0, "train", place, tuple(episode(place, member, turns) for member, turns in enumerate(group)))
        for place, group in enumerate(tree)
    ]


def episode(group, member, turns):
    played = tuple(turn(given, reply, continues=index > 0) for index, (given, reply) in enumerate(turns))
    return Episode("T", 0, "train", group, member, "", played, None)


def samples_of(own, lengths, prompts, episodes=None):
    """Samples whose prompts are named by numbers: equal numbers are equal prompts."""
    episodes = range(len(own)) if episodes is None else episodes
    pairs = [
        Pair((prompts[place],), (0,) * length, place, index)
        for place, length, index in zip(own, lengths, episodes, strict=True)
    ]
    return Samples(tuple(pairs), tuple((name,) for name in prompts), tuple(own))
