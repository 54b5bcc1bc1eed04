"""Metrics of played groups.

summarize(groups)      # {"SimpleSokoban/success": 0.41, …, "response_length": 96.2, "reward": 3.1}
"""

from collections.abc import Sequence
from statistics import fmean

from ragen.types import Episode, Group


def score_of(episode: Episode) -> float:
    """The score to train on: the environment's reward plus the format penalties."""
    return episode.final.reward + episode.final.penalty


def num_sampled(episode: Episode) -> int:
    return sum(len(turn.reply_ids) for turn in episode.turns)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """Per-tag metrics under `<Tag>/…`, and those of all episodes."""
    metrics: dict[str, float] = {}
    for tag in dict.fromkeys(group.tag for group in groups):
        of_tag = [group for group in groups if group.tag == tag]
        metrics |= {f"{tag}/{name}": value for name, value in _of_tag(of_tag).items()}
    episodes = [episode for group in groups for episode in group.episodes]
    turns = [turn for episode in episodes for turn in episode.turns]
    return metrics | {
        "reward": fmean(score_of(episode) for episode in episodes),
        "response_length": fmean(num_sampled(episode) for episode in episodes),
        "num_turns": fmean(len(episode.turns) for episode in episodes),
        "format_valid": fmean(turn.result.penalty == 0 for turn in turns),
        "cut_replies": fmean(turn.stopped_by == "length" for turn in turns),
        "reply_distinct": len({turn.reply_ids for turn in turns}) / len(turns),
        "reply_repeats": fmean(repeated_share(turn.reply_ids) for turn in turns),
    }


def repeated_share(ids: Sequence[int], num: int = 4) -> float:
    """The share of runs of `num` tokens that appeared earlier in the same reply; 0 in a shorter one."""
    runs = list(zip(*(ids[first:] for first in range(num)), strict=False))
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def _of_tag(groups: Sequence[Group]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    turns = [turn for episode in episodes for turn in episode.turns]
    num_actions = sum(len(turn.result.actions) for turn in turns)
    sizes = {len(group.episodes) for group in groups}
    metrics = {
        "success": fmean(episode.final.success for episode in episodes),
        "num_actions": fmean(episode.final.num_actions for episode in episodes),
        "action_is_effective": sum(turn.result.num_effective for turn in turns) / max(1, num_actions),
        "action_is_valid": fmean(turn.result.num_valid > 0 for turn in turns),
        "format_valid": fmean(turn.result.penalty == 0 for turn in turns),
    }
    if len(sizes) == 1 and sizes != {1}:
        won = [any(episode.final.success for episode in group.episodes) for group in groups]
        metrics[f"pass@{sizes.pop()}"] = fmean(won)
    return metrics
