"""Episodes as JSON lines that others can read, and back.

    record = record_of(episode, custom_id="traj_0", meta_info={"model": "pocket"}, num_tokens=[31, 28])
    episode_of(record, world)                      # the same episode again: its states are found by playing it
    write_lines(path, records, config.output)

A line is one episode:

    custom_id     traj_0, traj_1, …
    messages      the conversation: system, user, assistant, user, …, as a chat in mode `full` reads it
    rewards       the environment's reward of each assistant message, in order
    success       whether the level was solved
    metadata      tag, split, seed, group, member, num_turns, num_actions, total_reward, total_penalty, success,
                  ended_by
    turns         what each reply did: actions, reward, penalty, tokens, why the reply ended
    meta_info     what holds for all episodes of a model: model, turns, sampling (`output.keep_meta_info`)
    sequences     on request: token ids, the [start, stop) of each sampled reply, log-probs of the sampled tokens

`output.keep_non_tensor_keys` keeps only the named ones of the others, `output.keep_batch_keys` names what of
`sequences` is kept: `input_ids`, `loss_mask` (as spans), `log_probs`. Pickle is never written: reading one runs code.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.agent.episode import noise_stream
from ragen.config.schema import Output
from ragen.env.base import Action, Environment, State
from ragen.errors import ConfigError, nearest_of
from ragen.rollout.collect import World
from ragen.store.run_folder import write_whole
from ragen.types import Episode, EpisodeState, Turn, TurnResult

KEYS = ("messages", "rewards", "success", "metadata", "turns")
BATCH_KEYS = {"input_ids": "ids", "loss_mask": "sampled", "log_probs": "log_probs"}  # published name -> ours
ENDINGS = (".jsonl", ".md", ".html")  # of what an evaluation leaves
NO_PICKLE = "output.format=pkl: rollouts are written as JSON lines; a pickle runs code when it is opened"


# --- an episode as a line -----------------------------------------------------------------------------------------


def record_of(
    episode: Episode,
    world: World,
    custom_id: str = "",
    meta_info: Mapping[str, Any] | None = None,
    num_tokens: Sequence[int | None] | None = None,
) -> dict[str, Any]:
    """Everything about an episode. `num_tokens` are those of its replies, where they are not the ids."""
    final = episode.final
    counts = [len(turn.reply_ids) for turn in episode.turns] if num_tokens is None else num_tokens
    return {
        "custom_id": custom_id,
        "messages": messages_of(episode, world),
        "rewards": [turn.result.reward for turn in episode.turns],
        "success": final.success,
        "metadata": {
            "tag": episode.tag,
            "split": episode.split,
            "seed": episode.seed,
            "group": episode.group,
            "member": episode.member,
            "num_turns": len(episode.turns),
            "num_actions": final.num_actions,
            "total_reward": final.reward,
            "total_penalty": final.penalty,
            "success": final.success,
            "ended_by": final.ended_by,
        },
        "turns": [_turn_record(turn, count) for turn, count in zip(episode.turns, counts, strict=True)],
        "final_text": world.env.render(final.state),
        "meta_info": dict(meta_info or {}),
        "sequences": [
            {
                "ids": list(sequence.ids),
                "sampled": [list(span) for span in sequence.reply_spans],
                "log_probs": [
                    value for start, stop in sequence.reply_spans for value in sequence.log_probs[start:stop]
                ],
            }
            for sequence in episode.sequences()
        ],
    }


def _turn_record(turn: Turn, num_tokens: int | None) -> dict[str, Any]:
    result = turn.result
    return {
        "state_text": turn.state_text,
        "turn_text": turn.turn_text,
        "reply_text": turn.reply_text,
        "stopped_by": turn.stopped_by,
        "reward": result.reward,
        "penalty": result.penalty,
        "is_invalid": is_invalid(turn),
        "actions": [action if isinstance(action, (int, str)) else str(action) for action in result.actions],
        "num_listed": result.num_listed,
        "num_valid": result.num_valid,
        "num_effective": result.num_effective,
        "num_tokens": num_tokens,
    }


def is_invalid(turn: Turn) -> bool:
    """A reply that was malformed or cut off, or that named an unknown action or none."""
    result = turn.result
    return result.penalty != 0 or turn.stopped_by == "length" or result.num_valid < max(1, result.num_listed)


def messages_of(episode: Episode, world: World) -> list[dict[str, str]]:
    """The whole conversation. The reward of a reply stands in the message after it, if the prompt tells it at all."""
    messages = [{"role": "system", "content": episode.system_text}]
    feedback = ""
    for turn in episode.turns:
        messages.append({"role": "user", "content": feedback + turn.turn_text})
        messages.append({"role": "assistant", "content": turn.reply_text})
        feedback = world.view.prompt.feedback_text(turn.result.reward)
    return messages


# --- and back -----------------------------------------------------------------------------------------------------


def episode_of(record: Mapping[str, Any], world: World) -> Episode:
    """The episode of a line that holds all keys and its token ids."""
    missing = [key for key in ("metadata", "turns", "messages", "sequences") if key not in record]
    if missing:
        raise ConfigError(
            f"line {record.get('custom_id', '?')} lacks {', '.join(missing)}; lines are whole with --token-ids and "
            "without output.keep_non_tensor_keys"
        )
    metadata = record["metadata"]
    turns = tuple(_turns(record))
    return Episode(
        tag=metadata["tag"],
        seed=metadata["seed"],
        split=metadata["split"],
        group=metadata["group"],
        member=metadata["member"],
        system_text=record["messages"][0]["content"],
        turns=tuple(_with_actions(turns, record, world)),
        final=_final(record, world),
    )


def _turns(record: Mapping[str, Any]) -> Iterable[Turn]:
    """The turns, cut out of the sequences; actions as the line has them."""
    spans = []
    for sequence in record["sequences"]:
        if set(BATCH_KEYS.values()) - sequence.keys():
            raise ConfigError(f"line {record['custom_id']}: output.keep_batch_keys has left out a part of the tokens")
        end, log_probs = 0, iter(sequence["log_probs"])
        for number, (start, stop) in enumerate(sequence["sampled"]):
            ids = sequence["ids"]
            chosen = tuple(next(log_probs) for _ in range(stop - start))
            spans.append((tuple(ids[end:start]), number > 0, tuple(ids[start:stop]), chosen))
            end = stop
    for (given, continues, reply, log_probs), item in zip(spans, record["turns"], strict=True):
        yield Turn(
            given_ids=given,
            continues=continues,
            reply_ids=reply,
            log_probs=log_probs,
            stopped_by=item["stopped_by"],
            state_text=item["state_text"],
            turn_text=item["turn_text"],
            reply_text=item["reply_text"],
            result=TurnResult(
                reward=item["reward"],
                penalty=item["penalty"],
                actions=tuple(item["actions"]),
                num_listed=item["num_listed"],
                num_valid=item["num_valid"],
                num_effective=item["num_effective"],
            ),
        )


def _with_actions(turns: Sequence[Turn], record: Mapping[str, Any], world: World) -> Iterable[Turn]:
    """Actions as the environment has them: a line holds those that are neither numbers nor texts as texts."""
    played = iter(_play(record, world))
    for turn in turns:
        actions = tuple(next(played)[0] for _ in turn.result.actions)
        yield replace(turn, result=replace(turn.result, actions=actions))


def _final(record: Mapping[str, Any], world: World) -> EpisodeState:
    metadata, turns = record["metadata"], record["turns"]
    state = world.env.reset(metadata["seed"], metadata["split"])
    for _, after in _play(record, world):
        state = after
    return EpisodeState(
        state=state,
        num_turns=len(turns),
        num_actions=metadata["num_actions"],
        reward=metadata["total_reward"],
        penalty=metadata["total_penalty"],
        warn_invalid=bool(turns) and turns[-1]["num_valid"] == 0,
        ended_by=metadata["ended_by"],
    )


def _play(record: Mapping[str, Any], world: World) -> Iterable[tuple[Action, State]]:
    """Each action of the episode and the state after it, by the environment's own rules."""
    metadata = record["metadata"]
    state = world.env.reset(metadata["seed"], metadata["split"])
    noise = noise_stream(metadata["seed"], metadata["group"], metadata["member"])
    stored = [action for turn in record["turns"] for action in turn["actions"]]
    for step, word in enumerate(stored):
        action = _action(world.env, state, word)
        state = world.env.step(state, action, noise(step)).state
        yield action, state


def _action(env: Environment, state: State, stored: int | str) -> Action:
    names = env.action_names(state)
    if stored in names or not names:
        return stored
    found = [action for action in names if str(action) == stored]
    if not found:
        raise ConfigError(f"action {stored!r} is unknown to {type(env).__name__}: the line is of another environment")
    return found[0]


# --- files --------------------------------------------------------------------------------------------------------


def notes_on(output: Output) -> list[str]:
    """What the keys ask for and get in another way; each is said once."""
    notes = []
    if output.format == "pkl":
        notes.append(NO_PICKLE)
    if output.save_pkl_backup:
        notes.append("output.save_pkl_backup: no pickle is written; the JSON lines hold everything")
    if output.save_jsonl_backup:
        notes.append("output.save_jsonl_backup: the rollouts are JSON lines already, a second copy is not needed")
    return notes


def check_keys(output: Output) -> None:
    for name, listed, known in (
        ("keep_batch_keys", output.keep_batch_keys, BATCH_KEYS),
        ("keep_non_tensor_keys", output.keep_non_tensor_keys, KEYS),
    ):
        for key in listed or ():
            if key not in known:
                raise ConfigError(f"output.{name}: there is no {key!r}{nearest_of(key, known)}")


def output_path(output: Output, now: datetime) -> Path:
    """Where the lines go: `output.dir/output.filename`, as JSON lines, with the time if asked for."""
    name = Path(output.filename)
    stem = name.stem if name.suffix in (".pkl", ".jsonl", ".json", ".pickle") else name.name
    if not stem or name.name != output.filename:
        raise ConfigError(f"output.filename={output.filename}: must be a file name; its folder is output.dir")
    stamp = f"_{now:%Y%m%d_%H%M%S}" if output.append_timestamp else ""
    return Path(output.dir) / f"{stem}{stamp}.jsonl"


def claimed(path: Path, evaluation: str, replaces: bool = False) -> Path:
    """The path, or with a number where it holds another evaluation: whose it is stands in a hidden file beside it.

    `replaces` takes the path from any other one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if replaces:
        write_whole(_owner(path), evaluation.encode())
        return path
    return next(chosen for chosen in _with_numbers(path) if _claim(chosen, evaluation))


def created(path: Path) -> Path:
    """The path, or with a number where somebody has it already: an empty file, so that nobody else takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return next(chosen for chosen in _with_numbers(path) if _create(chosen))


def _with_numbers(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))


def _create(path: Path, content: str = "") -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def remove_report(path: Path) -> None:
    """The page and the table of an evaluation whose lines were replaced."""
    for ending in ENDINGS[1:]:
        path.with_suffix(ending).unlink(missing_ok=True)


def _owner(path: Path) -> Path:
    return path.with_name(f".{path.stem}.owner")


def _claim(path: Path, evaluation: str) -> bool:
    owner = _owner(path)
    if not owner.exists() and any(path.with_suffix(ending).exists() for ending in ENDINGS):
        return False
    return _create(owner, evaluation) or owner.read_text(encoding="utf-8") == evaluation


def kept(record: Mapping[str, Any], output: Output, has_ids: bool) -> dict[str, Any]:
    """The part of a record that goes into the file."""
    names = KEYS if output.keep_non_tensor_keys is None else output.keep_non_tensor_keys
    line = {"custom_id": record["custom_id"]} | {key: record[key] for key in KEYS if key in names}
    if output.keep_meta_info:
        line["meta_info"] = record["meta_info"]
    if output.keep_batch_keys and has_ids:
        parts = [BATCH_KEYS[key] for key in output.keep_batch_keys]
        line["sequences"] = [{part: sequence[part] for part in parts} for sequence in record["sequences"]]
    return line


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(path, text.encode("utf-8", errors="replace"))


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file that `write_lines` wrote."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
