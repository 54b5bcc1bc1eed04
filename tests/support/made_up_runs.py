"""Hand-written episodes and metrics. Imported by the tests of this folder."""

from ragen.types import Episode, EpisodeState, Group, Turn, TurnResult

BOARD = "Player: (1, 1)\nGrid Map:\n####\n#PX#\n##O#\n####"


def make_turn(reply="<think>go</think><answer>Up</answer>", first=True, valid=1, **changes):
    fields = {
        "given_ids": (1, 2, 3) if first else (9,),
        "continues": not first,
        "reply_ids": (10, 11),
        "log_probs": (-0.12345678, -2.5),
        "stopped_by": "answer",
        "state_text": BOARD,
        "turn_text": f"Turn 1:\n{BOARD}",
        "reply_text": reply,
        "result": TurnResult(-0.1, 0.0, (1,) * valid, 1, valid, valid),
    }
    return Turn(**(fields | changes))


def make_episode(seed, won, *turns, group=0, member=0, split="val", tag="CoordSokoban"):
    turns = turns or (make_turn(), make_turn(first=False))
    final = EpisodeState("end", len(turns), 2, 9.8 if won else -0.2, -0.1, ended_by="won" if won else "max_turn")
    return Episode(tag, seed, split, group, member, "You play.", tuple(turns), final)


def make_groups(outcomes, **options):
    """One group of one episode for each (seed, won)."""
    groups = []
    for index, (seed, won) in enumerate(outcomes):
        episode = make_episode(seed, won, group=index, **options)
        groups.append(Group(episode.tag, seed, episode.split, index, (episode,)))
    return groups


def validation_metrics(success, low=None, high=None, tag="CoordSokoban", **others):
    prefix = f"val-env/{tag}/"
    named = {"success": success, "success_low": low, "success_high": high, **others}
    return {prefix + name: value for name, value in named.items() if value is not None}
