"""One episode as a JSON object: the record that run folders, evaluations, reports and replay share.

episode_record(episode, step=20)           # a dict
read_episodes(path)                        # the records of one episodes/<split>-<step>.jsonl.gz
"""

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragen.store.fsync import write_whole
from ragen.store.json_lines import decode, encode
from ragen.types import Episode, Group

LOG_PROB_DIGITS = 6


def episode_record(episode: Episode, step: int) -> dict[str, Any]:
    """One line of an episode file: enough to draw, replay, fork and train the episode again.

    `sequences` are what the learner read: all ids, the [start, stop) of each sampled reply, and the log-probs of the
    sampled tokens only, one after the other. The i-th reply span belongs to the i-th turn.
    """
    final = episode.final
    return {
        "step": step,
        "tag": episode.tag,
        "split": episode.split,
        "seed": episode.seed,
        "group": episode.group,
        "member": episode.member,
        "ended_by": final.ended_by,
        "success": final.success,
        "reward": encode("reward", final.reward),
        "penalty": encode("penalty", final.penalty),
        "num_actions": final.num_actions,
        "system_text": episode.system_text,
        "turns": [
            {
                "state_text": turn.state_text,
                "turn_text": turn.turn_text,
                "reply_text": turn.reply_text,
                "stopped_by": turn.stopped_by,
                "reward": encode("reward", turn.result.reward),
                "penalty": encode("penalty", turn.result.penalty),
                "actions": [
                    action if isinstance(action, (int, str)) else str(action) for action in turn.result.actions
                ],
                "num_listed": turn.result.num_listed,
                "num_valid": turn.result.num_valid,
                "num_effective": turn.result.num_effective,
            }
            for turn in episode.turns
        ],
        "final_text": episode.final_text,
        "sequences": [
            {
                "first_turn": sequence.first_turn,
                "ids": [int(token) for token in sequence.ids],
                "sampled": [list(span) for span in sequence.reply_spans],
                "log_probs": [
                    encode("log_probs", round(float(value), LOG_PROB_DIGITS))
                    for start, stop in sequence.reply_spans
                    for value in sequence.log_probs[start:stop]
                ],
            }
            for sequence in episode.sequences()
        ],
    }


def write_episodes(path: Path, step: int, groups: Iterable[Group]) -> None:
    """Store whole groups."""
    lines = [
        json.dumps(episode_record(episode, step), allow_nan=False, separators=(",", ":"))
        for group in groups
        for episode in group.episodes
    ]
    text = "".join(f"{line}\n" for line in lines)
    write_whole(path, gzip.compress(text.encode(), compresslevel=1, mtime=0))  # no clock: equal runs, equal files


def read_episodes(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of one episode file, non-finite numbers as floats again."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [_with_floats(json.loads(line)) for line in file]


def _with_floats(record: dict[str, Any]) -> dict[str, Any]:
    for part in (record, *record["turns"]):
        part["reward"], part["penalty"] = decode(part["reward"]), decode(part["penalty"])
    for sequence in record["sequences"]:
        sequence["log_probs"] = [decode(value) for value in sequence["log_probs"]]
    return record
