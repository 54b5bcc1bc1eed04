"""One episode as a JSON object: the record that run folders, evaluations, reports and replay share.

episode_record(episode, step=20)           # a dict
read_episodes(path)                        # the records of one episodes/<split>-<step>.jsonl.gz
"""

import gzip
import json
import os
import struct
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ragen.store import json_lines
from ragen.store.fsync import write_whole
from ragen.store.json_lines import decode, encode
from ragen.store.reading import NUMBER, Unreadable, problem_in, read_bytes
from ragen.types import Episode, Group

LOG_PROB_DIGITS = 6
FIX = "restore it from a copy, or remove it: its episodes are then not shown"
TURN = {
    "state_text": str,
    "turn_text": str,
    "reply_text": str,
    "stopped_by": str,
    "reward": NUMBER,
    "penalty": NUMBER,
    "actions": [Any],
    "num_listed": int,
    "num_valid": int,
    "num_effective": int,
}
EPISODE = {
    "step": int,
    "tag": str,
    "split": str,
    "seed": int,
    "group": int,
    "member": int,
    "ended_by": str,
    "success": bool,
    "reward": NUMBER,
    "penalty": NUMBER,
    "num_actions": int,
    "system_text": str,
    "turns": [TURN],
    "final_text": str,
    "sequences": [{"ids": list, "sampled": list, "log_probs": list}],
}
OUTCOME = ("tag", "seed", "success", "turns", "state_text")  # what a comparison needs
SHOWN = (*OUTCOME, "step", "ended_by", "num_actions", *(key for key in TURN if key != "turn_text"))  # and a page


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


def read_episodes(path: str | os.PathLike[str], needed: Collection[str] = OUTCOME) -> list[dict[str, Any]]:
    """The records of one episode file, non-finite numbers as floats again. Raises `Unreadable` for a damaged one.

    Every record and turn has the `needed` keys; what else it has is of the right type.
    """
    path = Path(path)
    try:
        lines = gzip.decompress(read_bytes(path) or b"").splitlines()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise Unreadable(path, f"it is not a whole gzip file ({error})", FIX) from None
    records = []
    for number, line in enumerate(lines, start=1):
        record = json_lines.parsed(line)
        problem = "not a JSON object" if record is None else problem_in(record, EPISODE, needed)
        if record is None or problem:
            raise Unreadable(path, f"line {number}: {problem}", FIX)
        records.append(_with_floats(record))
    return records


def _with_floats(record: dict[str, Any]) -> dict[str, Any]:
    for part in (record, *record.get("turns", ())):
        part |= {key: float(decode(part[key])) for key in ("reward", "penalty") if key in part}
    for sequence in record.get("sequences", ()):
        sequence["log_probs"] = [decode(value) for value in sequence.get("log_probs", ())]
    return record
