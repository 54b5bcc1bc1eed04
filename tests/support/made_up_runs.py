"""Hand-written episodes, metrics, checkpoints and run folders."""

import zlib

from ragen.store import manifest
from ragen.store.manifest import FileSum, Manifest
from ragen.store.run_folder import RunFolder
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
    return Episode(tag, seed, split, group, member, "You play.", tuple(turns), final, "the end")


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


def make_run(path, config, steps=(), checkpoints=(), contents=("model", "optimizer"), finished=None):
    """A run folder with the traces that a run leaves."""
    folder = RunFolder(path)
    folder.write_config(config)
    for step in steps:
        folder.append_metrics(step, {"actor/entropy": step / 8})
        folder.write_episodes(step, "train", [])
    for step in checkpoints:
        make_checkpoint(folder.path, step, contents)
    if finished:
        folder.write_finished(finished, steps[-1], "empty_filtered_steps" if finished == "early_stopped" else None)
    return folder


def make_checkpoint(folder, step, contents=("model", "optimizer"), tracked=True):
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "model.safetensors").write_bytes(b"weights")
    files = {"actor/model.safetensors": FileSum(7, zlib.crc32(b"weights"))}
    has_state = "optimizer" in contents
    manifest.write_manifest(path, Manifest(step, {"actor": list(contents)}, has_state, not tracked, tracked, files))
    if tracked:
        manifest.write_tracker(folder, step)
    return path
