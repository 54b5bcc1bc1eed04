"""Episodes as JSON lines that other programs can read, and back.

    record = record_of(episode, world, "traj_0", meta_info={"model": "pocket"}, num_tokens=[31, 28])
    episode_of(record, world)                      # the same episode again: its states are found by playing it
    json_lines.write(path, [record]), read_lines(path)

A line is one episode:

    custom_id     traj_0, traj_1, …
    messages      the conversation: system, user, assistant, user, …, as a chat in mode `full` reads it
    rewards       the environment's reward of each assistant message, in order
    success       whether the level was solved
    metadata      tag, split, seed, group, member, num_turns, num_actions, total_reward, total_penalty, success,
                  ended_by
    turns         what each reply did: actions, reward, penalty, tokens, why the reply ended
    meta_info     the same for all episodes of a model: model, turns, sampling (`output.keep_meta_info`)
    sequences     on request: token ids, the [start, stop) of each sampled reply, log-probs of the sampled tokens

`output.keep_non_tensor_keys` selects from `messages` … `turns`, `output.keep_batch_keys` selects what of `sequences` is
kept: `input_ids`, `loss_mask` (as spans), `log_probs`. Pickle is never written: reading one runs code.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.agent.episode import noise_stream
from ragen.config.schema import Output
from ragen.env.base import Action, Environment, State
from ragen.errors import ConfigError, nearest_of
from ragen.rollout.collect import World
from ragen.store import json_lines
from ragen.store.episodes import TURN, episode_record
from ragen.store.free_name import next_free, numbered
from ragen.store.fsync import write_whole
from ragen.store.lock import locked
from ragen.store.reading import NUMBER, read_bytes
from ragen.types import Episode, EpisodeState, Turn, TurnResult

KEYS = ("messages", "rewards", "success", "metadata", "turns")
METADATA = ("tag", "split", "seed", "group", "member", "num_actions", "success", "ended_by")  # others are renamed
BATCH_KEYS = {"input_ids": "ids", "loss_mask": "sampled", "log_probs": "log_probs"}  # published name -> ours
# What a journal must hold of an episode to be read again.
RECORD = {
    "messages": [{"role": str, "content": str}],
    "rewards": [NUMBER],
    "success": bool,
    "metadata": dict.fromkeys(("seed", "group", "member", "num_actions"), int)
    | {"tag": str, "split": str, "ended_by": str, "success": bool, "total_reward": NUMBER, "total_penalty": NUMBER},
    "turns": [TURN | {"is_invalid": bool, "num_tokens": (int, type(None))}],
    "sequences": [{"ids": [int], "sampled": [[int]], "log_probs": [NUMBER]}],
}
ENDINGS = (".jsonl", ".md", ".html")  # the files of an evaluation


def record_of(
    episode: Episode,
    world: World,
    custom_id: str = "",
    meta_info: Mapping[str, Any] | None = None,
    num_tokens: Sequence[int | None] | None = None,
) -> dict[str, Any]:
    """The record of a run folder in the form of an evaluation. `num_tokens` counts each reply, if its ids do not."""
    stored = episode_record(episode, step=0)
    counts = [len(turn.reply_ids) for turn in episode.turns] if num_tokens is None else num_tokens
    totals = {"num_turns": len(episode.turns), "total_reward": stored["reward"], "total_penalty": stored["penalty"]}
    return {
        "custom_id": custom_id,
        "messages": messages_of(episode, world),
        "rewards": [turn["reward"] for turn in stored["turns"]],
        "success": stored["success"],
        "metadata": {key: stored[key] for key in METADATA} | totals,
        "turns": [
            record | {"is_invalid": is_invalid(turn), "num_tokens": count}
            for record, turn, count in zip(stored["turns"], episode.turns, counts, strict=True)
        ],
        "meta_info": dict(meta_info or {}),
        "sequences": [
            {
                "ids": record["ids"],
                "sampled": record["sampled"],
                # not rounded as in a run folder
                "log_probs": [value for span in sequence.reply_spans for value in sequence.log_probs[slice(*span)]],
            }
            for record, sequence in zip(stored["sequences"], episode.sequences(), strict=True)
        ],
    }


def is_invalid(turn: Turn) -> bool:
    """A reply that was malformed or cut off, or that named an unknown action or none."""
    result = turn.result
    return result.penalty != 0 or turn.stopped_by == "length" or result.num_valid < max(1, result.num_listed)


def messages_of(episode: Episode, world: World) -> list[dict[str, str]]:
    """The whole conversation. The message after a reply states its reward, if the prompt style does that at all."""
    texts, feedback = [("system", episode.system_text)], ""
    for turn in episode.turns:
        texts += [("user", feedback + turn.turn_text), ("assistant", turn.reply_text)]
        feedback = world.view.prompt.feedback_text(turn.result.reward)
    return [{"role": role, "content": text} for role, text in texts]


def kept(record: Mapping[str, Any], output: Output, has_ids: bool) -> dict[str, Any]:
    """The part of a record that is written to the file."""
    names = KEYS if output.keep_non_tensor_keys is None else output.keep_non_tensor_keys
    line = {"custom_id": record["custom_id"]} | {key: record[key] for key in KEYS if key in names}
    if output.keep_meta_info:
        line["meta_info"] = record["meta_info"]
    if output.keep_batch_keys and has_ids:
        parts = [BATCH_KEYS[key] for key in output.keep_batch_keys]
        line["sequences"] = [{part: sequence[part] for part in parts} for sequence in record["sequences"]]
    return line


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of an evaluation; a missing or damaged file is refused."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: file not found")
    records, skipped = json_lines.read(Path(path))
    if skipped:
        raise ConfigError(f"{path}: {skipped[0]}")
    return records


def episode_of(record: Mapping[str, Any], world: World) -> Episode:
    """The episode of a line that has all keys and its token ids."""
    missing = [key for key in ("metadata", "turns", "messages", "sequences") if key not in record]
    if missing:
        raise ConfigError(
            f"line {record.get('custom_id', '?')} lacks {', '.join(missing)}; lines are complete with --token-ids and "
            "without output.keep_non_tensor_keys"
        )
    metadata, turns = record["metadata"], []
    seed, split, group, member = (metadata[key] for key in ("seed", "split", "group", "member"))
    state, noise, num_played = world.env.reset(seed, split), noise_stream(seed, group, member), 0
    for item, (given_ids, continues, reply_ids, log_probs) in zip(record["turns"], _token_ids(record), strict=True):
        actions = []
        for stored in item["actions"]:
            actions.append(_action(world.env, state, stored))
            state = world.env.step(state, actions[-1], noise(num_played)).state
            num_played += 1
        counts = {name: item[name] for name in ("num_listed", "num_valid", "num_effective")}
        texts = {name: item[name] for name in ("stopped_by", "state_text", "turn_text", "reply_text")}
        result = TurnResult(float(item["reward"]), float(item["penalty"]), tuple(actions), **counts)
        turns.append(Turn(given_ids, continues, reply_ids, log_probs, **texts, result=result))
    final = EpisodeState(
        state=state,
        num_turns=len(turns),
        num_actions=metadata["num_actions"],
        reward=float(metadata["total_reward"]),
        penalty=float(metadata["total_penalty"]),
        warn_invalid=bool(turns) and turns[-1].result.num_valid == 0,
        ended_by=metadata["ended_by"],
    )
    texts = {"system_text": record["messages"][0]["content"], "final_text": world.env.render(state)}
    return Episode(metadata["tag"], seed, split, group, member, turns=tuple(turns), final=final, **texts)


def _token_ids(record: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], bool, tuple[int, ...], tuple[float, ...]]]:
    """Of each turn: the given ids, whether they continue the turn before, the sampled ids and their log-probs."""
    for sequence in record["sequences"]:
        if set(BATCH_KEYS.values()) - sequence.keys():
            raise ConfigError(f"line {record['custom_id']} lacks some of the tokens (output.keep_batch_keys)")
        ids, log_probs, end, first = sequence["ids"], sequence["log_probs"], 0, 0
        for start, stop in sequence["sampled"]:
            last = first + stop - start
            yield tuple(ids[end:start]), end > 0, tuple(ids[start:stop]), tuple(log_probs[first:last])
            end, first = stop, last


def _action(env: Environment, state: State, stored: int | str) -> Action:
    """The action of a line, which holds actions that are neither numbers nor texts as texts."""
    names = env.action_names(state)
    if stored in names or not names:
        return stored
    for action in names:
        if str(action) == stored:
            return action
    raise ConfigError(f"action {stored!r} is unknown to {type(env).__name__}: the line is of another environment")


def notes_on(output: Output) -> list[str]:
    """Keys whose request is met in another way."""
    json_only = "rollouts are written as JSON lines"
    notes = {
        f"output.format=pkl: {json_only}; a pickle runs code when it is opened": output.format == "pkl",
        f"output.save_pkl_backup: no pickle is written; {json_only}, which hold everything": output.save_pkl_backup,
        f"output.save_jsonl_backup: {json_only} already; no second copy is needed": output.save_jsonl_backup,
    }
    return [note for note, applies in notes.items() if applies]


def check_keys(output: Output) -> None:
    for name, known in (("keep_batch_keys", BATCH_KEYS), ("keep_non_tensor_keys", KEYS)):
        for key in getattr(output, name) or ():
            if key not in known:
                raise ConfigError(f"output.{name}: unknown key {key!r}{nearest_of(key, known)}")


def output_path(output: Output, now: datetime) -> Path:
    """Where the lines go: `output.dir/output.filename`, as JSON lines, with the time if asked for."""
    name = Path(output.filename)
    stem = name.stem if name.suffix in (".pkl", ".jsonl", ".json", ".pickle") else name.name
    if not stem or name.name != output.filename:
        raise ConfigError(f"output.filename={output.filename}: must be a file name; its directory is output.dir")
    stamp = f"_{now:%Y%m%d_%H%M%S}" if output.append_timestamp else ""
    return Path(output.dir) / f"{stem}{stamp}.jsonl"


def claimed(path: Path, evaluation: str, replaces: bool = False) -> Path:
    """The path, with a number if another evaluation has it and keeps it. A hidden file beside it names its owner."""
    with _naming(path.parent):
        names = numbered(path, separator="_", before_suffix=True)
        chosen = next(name for name in names if replaces or _is_free(name, evaluation))
        write_whole(_owner(chosen), evaluation.encode())
    return chosen


def created(path: Path) -> Path:
    """The path, with a number if it exists. The file is created empty, so that no other process takes the name."""
    with _naming(path.parent):
        chosen = next_free(path, separator="_", before_suffix=True)
        chosen.touch()
    return chosen


def _naming(folder: Path) -> AbstractContextManager[None]:
    """One process at a time chooses a name."""
    folder.mkdir(parents=True, exist_ok=True)
    return locked(folder / ".names.lock")


def _owner(path: Path) -> Path:
    return path.with_name(f".{path.stem}.owner")


def _is_free(path: Path, evaluation: str) -> bool:
    """The name is this evaluation's, or nobody's."""
    if _owner(path).exists():
        return read_bytes(_owner(path)) == evaluation.encode()
    return not any(path.with_suffix(ending).exists() for ending in ENDINGS)
