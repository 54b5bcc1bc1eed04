"""What is written is read back, and a process that dies anywhere leaves files that can be read."""

import gzip
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import made_up_runs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import make_episode, make_groups, make_turn
from processes import started

from ragen.config.schema import Config
from ragen.config.tree import build, leaves, to_dict
from ragen.store.episodes import read_episodes
from ragen.store.fsync import write_whole
from ragen.store.run_folder import FolderInUse, RunFolder
from ragen.types import Group

# --- config -------------------------------------------------------------------------------------------------------


def test_config_is_read_back_equal(folder):
    config = Config()
    config.actor_rollout_ref.actor.optim.lr = 1e-7
    config.trainer.experiment_name = "√ – a: b # c"
    folder.write_config(config)
    tree = folder.read_config()
    assert tree == to_dict(config)
    assert tree["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-7
    assert list(leaves(tree)) == list(leaves(config))


def test_resolved_config_is_rebuilt(folder):
    from ragen.config.compose import resolve

    config = resolve(["sokoban"], environ={}).config
    folder.write_config(config)
    assert build(Config, folder.read_config()) == config


def test_no_config(folder):
    assert folder.read_config() == {}


# --- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_lines(folder):
    folder.append_metrics(0, {"a/b": 0.1 + 0.2, "n": 3})
    folder.append_metrics(1, {"a/b": math.nan, "c": -math.inf, "n": np.int64(4), "d": np.float32(0.5)})
    lines = folder.metrics_path.read_text().splitlines()
    assert lines == [
        '{"step": 0, "a/b": 0.30000000000000004, "n": 3}',
        '{"step": 1, "a/b": "nan", "c": "-inf", "n": 4, "d": 0.5}',
    ]
    metrics = folder.read_metrics()
    assert metrics.notes == []
    assert metrics.rows[0] == {"step": 0, "a/b": 0.1 + 0.2, "n": 3}
    assert math.isnan(metrics.rows[1]["a/b"])
    assert metrics.series("c") == [(1, -math.inf)]
    assert metrics.series("n") == [(0, 3.0), (1, 4.0)]
    assert metrics.series("unknown") == []
    assert metrics.names() == ["a/b", "n", "c", "d"]
    assert metrics.last_step() == 1


@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "step"), st.floats() | st.integers(), max_size=5))
def test_any_number_is_read_back_exactly(tmp_path_factory, values):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.append_metrics(3, values)
    (row,) = folder.read_metrics().rows
    assert row.pop("step") == 3
    assert list(row) == list(values)
    for key, value in values.items():
        assert type(row[key]) is type(value)
        assert row[key] == value or (math.isnan(row[key]) and math.isnan(value))


def test_what_json_cannot_hold_is_refused(folder):
    with pytest.raises(TypeError, match="a/b="):
        folder.append_metrics(0, {"a/b": [1.0]})
    assert not folder.metrics_path.exists()


def test_lines_of_one_step_are_one_row_and_rows_are_in_order(folder):
    for step, metrics in [(2, {"a": 1}), (0, {"a": 0}), (2, {"a": 5, "b": 7})]:
        folder.append_metrics(step, metrics)
    assert folder.read_metrics().rows == [{"step": 0, "a": 0}, {"step": 2, "a": 5, "b": 7}]


def test_a_file_cut_at_any_byte_is_readable_and_can_go_on(folder):
    for step in range(3):
        folder.append_metrics(step, {"a": step / 3})
    whole = folder.metrics_path.read_bytes()
    for length in range(len(whole)):
        folder.metrics_path.write_bytes(whole[:length])
        num_whole = whole[:length].count(b"\n")
        metrics = folder.read_metrics()
        assert [row["step"] for row in metrics.rows] == list(range(num_whole))
        is_torn = length > 0 and whole[length - 1 : length] != b"\n"
        assert len(metrics.notes) == is_torn
        assert all("torn" in note for note in metrics.notes)
        RunFolder(folder.path).append_metrics(9, {"a": 1.0})
        after = folder.read_metrics()
        assert [row["step"] for row in after.rows] == [*range(num_whole), 9]
        assert after.notes == []


def test_a_damaged_line_in_the_middle_is_named(folder):
    folder.metrics_path.parent.mkdir()
    folder.metrics_path.write_bytes(b'{"step": 0}\n\xff\xfe garbage\n[1]\n{"a": 1}\n{"step": 1}\n')
    metrics = folder.read_metrics()
    assert [row["step"] for row in metrics.rows] == [0, 1]
    assert [note.split(" of ")[0] for note in metrics.notes] == ["line 2", "line 3", "line 4"]


def test_rewind(folder):
    for step in range(4):
        folder.append_metrics(step, {"a": step})
        folder.write_episodes(step, "val", make_groups([(1, True)]))
    kept = folder.metrics_path.read_text().splitlines(keepends=True)[:2]
    folder.rewind(1)
    assert folder.metrics_path.read_text() == "".join(kept)
    assert [file.step for file in folder.episode_files()] == [0, 1]
    folder.append_metrics(2, {"a": 2})
    assert [row["step"] for row in folder.read_metrics().rows] == [0, 1, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_rewind_forgets_a_later_line_of_an_earlier_step(folder, step):
    for line in range(3):
        folder.append_metrics(line, {"a": line})
    kept = folder.metrics_path.read_bytes()
    folder.append_metrics(step, {"b": 1})
    folder.rewind(2)
    assert folder.metrics_path.read_bytes() == kept


# --- episodes -----------------------------------------------------------------------------------------------------


def test_episodes_are_read_back(folder):
    groups = make_groups([(123, True), (124, False)])
    path = folder.write_episodes(7, "val", groups)
    assert path == folder.path / "episodes" / "val-000007.jsonl.gz"
    first, second = read_episodes(path)
    assert (first["seed"], first["success"], first["ended_by"]) == (123, True, "won")
    assert (second["seed"], second["success"], second["ended_by"]) == (124, False, "max_turn")
    assert (second["group"], second["member"], second["split"], second["step"]) == (1, 0, "val", 7)
    assert (first["reward"], first["penalty"]) == (9.8, -0.1)
    assert first["final_text"] == "the end"
    assert first["turns"][0]["reply_text"] == "<think>go</think><answer>Up</answer>"
    assert first["turns"][0]["actions"] == [1]
    assert first["sequences"] == [
        {
            "first_turn": 0,
            "ids": [1, 2, 3, 10, 11, 9, 10, 11],
            "sampled": [[3, 5], [6, 8]],
            "log_probs": [-0.123457, -2.5, -0.123457, -2.5],
        }
    ]


def test_windowed_episodes_have_a_sequence_for_each_prompt(folder):
    turns = make_turn(), replace(make_turn(), reply_ids=(5,), log_probs=(-math.inf,))
    group = Group("T", 1, "train", 0, (make_episode(1, False, *turns, split="train"),))
    (record,) = read_episodes(folder.write_episodes(0, "train", [group]))
    assert [(item["first_turn"], item["sampled"]) for item in record["sequences"]] == [(0, [[3, 5]]), (1, [[3, 4]])]
    assert record["sequences"][1]["log_probs"] == [-math.inf]


def test_episode_files_are_plain_json_lines_and_equal_for_equal_episodes(folder):
    groups = make_groups([(1, True), (2, True)])
    path = folder.write_episodes(0, "val", groups)
    content = path.read_bytes()
    lines = gzip.decompress(content).decode("ascii").splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [1, 2]
    time.sleep(1.1)  # gzip would store the time in seconds
    assert folder.write_episodes(0, "val", groups).read_bytes() == content


def test_strange_text_survives(folder):
    text = "√ \ud800 \x00 \u2028 \n end"
    group = Group("T", 1, "val", 0, (make_episode(1, True, make_turn(text)),))
    (record,) = read_episodes(folder.write_episodes(0, "val", [group]))
    assert record["turns"][0]["reply_text"] == text


def test_episode_files_are_found_in_order(folder):
    for step, split in [(10, "val"), (9, "val"), (1000000, "val"), (0, "val-greedy"), (3, "train")]:
        folder.write_episodes(step, split, [])
    (folder.episodes_path / "notes.txt").write_text("mine")
    assert [(file.split, file.step) for file in folder.episode_files()] == [
        ("train", 3), ("val", 9), ("val", 10), ("val", 1000000), ("val-greedy", 0),
    ]  # fmt: skip
    assert [file.step for file in folder.episode_files("val")] == [9, 10, 1000000]


# --- killed while writing -----------------------------------------------------------------------------------------

WRITER = """
import sys
import threading
sys.path.insert(0, sys.argv[2])
from made_up_runs import make_groups
from ragen.config.schema import Config
from ragen.store.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
with folder.owned():
    print("ready", flush=True)
    start = (folder.read_metrics().last_step() or 0) + 1
    for step in range(start, start + 100000):
        folder.write_config(Config())
        folder.write_episodes(step % 5, "val", make_groups((seed, True) for seed in range(40)))
        folder.append_metrics(step, {f"metric/{n}": step / 7 for n in range(50)})
"""


def test_kill_9_leaves_readable_files_and_no_owner(folder):
    draw = random.Random(0)
    last = 0
    for _ in range(8):
        command = [sys.executable, "-c", WRITER, str(folder.path), os.path.dirname(made_up_runs.__file__)]
        with started(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.02, 0.3))
        metrics = folder.read_metrics()
        steps = [row["step"] for row in metrics.rows]
        assert steps == list(range(1, len(steps) + 1)), "no step lost or doubled"
        assert len(steps) >= last
        assert all(len(row) == 51 for row in metrics.rows)
        last = len(steps)
        if folder.config_path.exists():
            assert folder.read_config() == to_dict(Config())
        for file in folder.episode_files():
            assert len(read_episodes(file.path)) == 40
    assert last > 0
    with folder.owned():
        assert not list(folder.path.rglob("*.part")), "leftovers of the dead are swept away"


# --- the owner ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_is_first(folder):
    with folder.owned():
        code = (
            "import sys; from ragen.store.run_folder import RunFolder, FolderInUse\n"
            "try:\n    RunFolder(sys.argv[1]).owned().__enter__()\n"
            "except FolderInUse as error:\n    print(error)"
        )
        told = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=True
        ).stdout
        assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in told
        with pytest.raises(FolderInUse), RunFolder(folder.path).owned():
            pass
    with RunFolder(folder.path).owned():  # free again
        pass


def test_a_dead_owner_is_replaced(folder):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    folder.path.mkdir()
    folder.owner_path.write_text(f"process {process.pid} on {socket.gethostname()}\n")
    assert folder.live_owner() is None
    with folder.owned():
        assert folder.live_owner() == f"process {os.getpid()} on {socket.gethostname()}"
    assert not folder.owner_path.exists() and folder.live_owner() is None


def test_a_process_number_in_use_again_is_not_the_owner(folder):
    folder.path.mkdir()
    folder.owner_path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with folder.owned():
        pass


def test_nothing_is_assumed_about_other_hosts(folder):
    folder.path.mkdir()
    folder.owner_path.write_text("process 1 on far-away\n")
    with pytest.raises(FolderInUse, match=r"process 1 on far-away.*delete .*\.owner"), folder.owned():
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}'])
def test_an_unreadable_owner_is_nobody(folder, content):
    folder.path.mkdir()
    folder.owner_path.write_text(content)
    with folder.owned():
        pass


def test_the_folder_is_free_after_an_error(folder):
    with pytest.raises(RuntimeError), folder.owned():
        raise RuntimeError
    with folder.owned():
        pass


# --- whole or not at all ------------------------------------------------------------------------------------------


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "file"
    contents = {bytes([letter]) * 2_000_000 for letter in b"ab"}
    write_whole(path, b"a" * 2_000_000)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for content in contents:
                write_whole(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(path.read_bytes() in contents for _ in range(300))
    finally:
        stop.set()
        writer.join()


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, impatient):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
