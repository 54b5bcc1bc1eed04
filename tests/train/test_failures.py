"""Environments that fail during training: groups are played again, dropped whole and counted; then the run stops."""

import json
import math
import os
from collections import Counter

import faulty_line
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import make_episode
from without_clock import metrics_without_clock

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.env.failure import REASONS, EnvironmentFailed, TooManyFailures
from ragen.rollout.collect import FailedGroup, GroupRequest, UnfinishedTurn
from ragen.run.run_logger import NullLogger
from ragen.store import json_lines
from ragen.store.run_folder import RunFolder
from ragen.train.failures import draws_of, play_groups
from ragen.types import Group


class Log(NullLogger):
    def __init__(self):
        self.records, self.notes = [], []

    def failures(self, records):
        self.records += records

    def note(self, text):
        self.notes.append(text)


def config(**values):
    made = resolve([], environ={}).config
    for name, value in values.items():
        setattr(made.es_manager, name, value)
    return made


BASE = config()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(REASONS)), min_size=1, max_size=8),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
)
@settings(deadline=None)
def test_what_is_played_again_dropped_counted_and_stopped(plan, retries, share):
    """`plan`: of each group how often it fails, and why."""
    BASE.es_manager.env_retries, BASE.es_manager.max_failed_share = retries, share
    requests = [GroupRequest("Line", 100 + index, "train", index, 1) for index in range(len(plan))]
    calls, log = Counter(), Log()

    def play(asked, attempt):
        outcomes = []
        for request in asked:
            assert calls[request.group] == attempt
            calls[request.group] += 1
            num_failures, reason = plan[request.group]
            if attempt < num_failures:
                failure = EnvironmentFailed(reason, f"Line, train level {request.seed}", "oh", "trace")
                said = {0: (UnfinishedTurn("look", f"try {attempt}"),)}
                outcomes.append(FailedGroup(request, failure, 0, 1, "system", said))
            else:
                episode = make_episode(request.seed, True, group=request.group)
                outcomes.append(Group("Line", request.seed, "train", request.group, (episode,)))
        return outcomes

    dropped = [index for index, (num_failures, _) in enumerate(plan) if num_failures > retries]
    retried = [index for index, (num_failures, _) in enumerate(plan) if num_failures > 0 and retries > 0]
    if dropped and (len(dropped) > share * len(plan) or len(dropped) == len(plan)):
        with pytest.raises(TooManyFailures, match=rf"Line, train level {100 + dropped[0]}: oh"):
            play_groups(requests, play, BASE, log, 5, "train")
    else:
        groups, metrics = play_groups(requests, play, BASE, log, 5, "train")
        assert [group.group for group in groups] == [index for index in range(len(plan)) if index not in dropped]
        reasons = Counter(plan[index][1] for index in dropped)
        counted = {f"failed/{reason}": count for reason, count in reasons.items()}
        expected = {"retried_groups": len(retried), "failed_groups": len(dropped)} | counted
        assert metrics == (expected if dropped or retried else {})
    assert [calls[index] for index in range(len(plan))] == [min(num, retries) + 1 for num, _ in plan]
    assert len(log.records) == sum(min(num, retries + 1) for num, _ in plan)
    assert {record["group"] for record in log.records if record["dropped"]} == set(dropped)
    assert len(log.notes) <= retries + 1
    for record in log.records:
        assert json.loads(json.dumps(record)) == record
        assert (record["step"], record["seed"]) == (5, 100 + record["group"])
        replies = [turn["reply_text"] for episode in record["episodes"] for turn in episode["turns"]]
        assert replies == [f"try {record['attempt'] - 1}"]


def test_playing_again_gives_other_samples():
    assert draws_of(("train", 1, 2), 0) == ("train", 1, 2)
    assert len({draws_of(("train", 1, 2), attempt) for attempt in range(3)}) == 3


# --- from the command line ------------------------------------------------------------------------------------------

WORDS = (
    "train", "--config-name", "base", "model_path=pocket", "agent_proxy.prompt_style=terse", "agent_proxy.max_turn=2",
    "custom_envs.Line.env_type=faulty_line:FaultyLine", "custom_envs.Line.max_actions_per_traj=4",
    "es_manager.train.env_configs.tags=[Line]", "es_manager.val.env_configs.tags=[Line]",
    "es_manager.train.env_groups=4", "es_manager.train.group_size=2", "es_manager.val.env_groups=2",
    "actor_rollout_ref.rollout.response_length=24", "ppo_mini_batch_size=4", "trainer.total_training_steps=3",
    "actor_rollout_ref.rollout.rollout_filter_value=1", "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
    "trainer.test_freq=3", "trainer.val_before_train=False", "trainer.save_freq=5", "es_manager.env_timeout=0.5",
)  # fmt: skip


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train on the line in a folder; what fails where is for the class to know, so that the command stays the same."""

    def run(name, *more, **faults):
        monkeypatch.setattr(faulty_line, "num_failures", 0)
        for key, value in (
            {"fault": "", "call": "step", "seeds": (), "splits": ("train",), "times": 0} | faults
        ).items():
            monkeypatch.setattr(faulty_line.FaultyLine, key, value, raising=False)
        status = main([*WORDS, f"trainer.default_local_dir={tmp_path / name}", *more])
        return status, RunFolder(tmp_path / name)

    return run


def failures_of(folder):
    return json_lines.read(folder.failures_path).records


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not a number", "raise", "exit", "loop"])
def test_a_level_that_always_fails_is_dropped_and_the_run_goes_on(train, fault, capsys):
    status, folder = train("run", fault=fault, seeds=(10005,))
    rows = metrics_without_clock(folder.path)
    assert status == 0 and [row["step"] for row in rows] == [1, 2, 3]
    reason = {"not a number": "bad_reward", "raise": "raised", "exit": "exited", "loop": "timeout"}[fault]
    counts = {key: rows[1].get(f"rollout/{key}") for key in ("retried_groups", "failed_groups", f"failed/{reason}")}
    assert set(counts.values()) == {1.0}
    assert not any(key.startswith("rollout/failed") for key in {**rows[0], **rows[2]})
    assert rows[1]["rollout/filter_kept_count"] == 3 and all(map(math.isfinite, rows[1].values()))
    stored = [(one["step"], one["seed"], one["reason"], one["attempt"], one["dropped"]) for one in failures_of(folder)]
    assert stored == [(2, 10005, reason, 1, False), (2, 10005, reason, 2, True)]
    assert all(one["episodes"][one["member"]]["turns"][-1]["reply_text"] for one in failures_of(folder))
    out = capsys.readouterr().out
    assert "step 2: 1 group dropped after 2 attempts: Line, train level 10005, turn" in out


@pytest.mark.slow
def test_groups_of_a_step_are_those_of_a_run_without_faults(train):
    """Up to the first update that a dropped group is not part of."""
    _, whole = train("whole")
    status, once = train("once", fault="raise", seeds=(10001, 10002), times=1)
    assert status == 0 and metrics_without_clock(once.path)[0]["rollout/retried_groups"] == 1
    assert metrics_without_clock(once.path)[0]["rollout/failed_groups"] == 0 and len(failures_of(once)) == 1
    _, dropped = train("dropped", fault="raise", seeds=(10001,))
    for folder, others in ((once, (0, 2, 3)), (dropped, (0, 2, 3))):
        before, after = (episodes_of(run) for run in (whole, folder))
        for group in others:
            assert after[group] == before[group]
    assert 1 not in episodes_of(dropped) and episodes_of(once)[1] != episodes_of(whole)[1]
    assert metrics_without_clock(whole.path) == metrics_without_clock(train("again")[1].path), (
        "and without failures nothing is added"
    )


def episodes_of(folder):
    from ragen.store.episodes import read_episodes

    found = {}
    for record in read_episodes(folder.episode_files("train")[0].path):
        found.setdefault(record["group"], []).append(record)
    return found


@pytest.mark.slow
def test_past_the_share_a_run_stops_with_status_4_and_resumes_as_if_nothing_had_happened(train, capsys):
    _, whole = train("whole")
    status, folder = train("run", fault="raise", seeds=(10008, 10009, 10010))  # step 3
    said = capsys.readouterr().err
    assert status == 4 and not folder.finished_path.exists()
    assert "stopped after step 2: the environment failed in 3 of 4 groups (3 raised), more than" in said
    assert "The first: Line, train level 10008, turn 1: the environment raised ValueError: boom" in said
    assert "run the same command to resume" in said and "Traceback" not in said
    assert (folder.path / "global_step_2").is_dir() and {one["step"] for one in failures_of(folder)} == {3}
    status, folder = train("run", fault="raise", seeds=(10008, 10009, 10010))
    assert status == 4, "still broken"
    status, folder = train("run")
    assert status == 0 and metrics_without_clock(folder.path) == metrics_without_clock(whole.path)
    assert failures_of(folder) == []


@pytest.mark.slow
def test_a_validation_that_fails_is_not_scored_as_zero(train, capsys):
    _, whole = train("whole")
    status, folder = train("one", fault="raise", splits=("val",), seeds=(123,), call="names")
    last = metrics_without_clock(folder.path)[-1]
    assert status == 0 and last["val-env/failed_groups"] == last["val-env/failed/raised"] == 1
    assert "random and optimal success of Line are unknown" in capsys.readouterr().out
    assert "val-env/Line/random" not in last and 0 <= last["val-env/Line/success"] <= 1
    assert {one["kind"] for one in failures_of(folder)} == {"val", "val-greedy"}
    status, folder = train("all", fault="exit", splits=("val",))
    assert status == 4 and [row["step"] for row in metrics_without_clock(folder.path)] == [1, 2]
    assert (folder.path / "global_step_3").is_dir() and not folder.finished_path.exists()
    status, folder = train("all")
    assert status == 0 and metrics_without_clock(folder.path) == metrics_without_clock(whole.path), (
        "the weights were saved, and are validated now"
    )


@pytest.mark.slow
def test_an_environment_that_fails_before_the_first_step(train, capsys):
    status, folder = train("run", "trainer.val_before_train=True", fault="exit", splits=("val", "train"), call="reset")
    assert status == 4 and "stopped after step 0: the environment failed in all 2 groups (2 exited)" in (
        capsys.readouterr().err
    )
    assert not folder.finished_path.exists()


@pytest.mark.slow
def test_an_evaluation_excludes_what_fails(train, tmp_path, monkeypatch, capsys):
    train("nothing", "--dry-run", fault="raise", splits=("val",), seeds=(124,))
    words = [word for word in WORDS[3:] if not word.startswith(("trainer.", "model_path"))]
    command = ["eval", "pocket", "--config-name", "base", *words, "es_manager.val.env_groups=4", f"--output={tmp_path}"]
    assert main([*command, "output.append_timestamp=False", "output.filename=some"]) == 1
    captured = capsys.readouterr()
    assert "the environment failed in 1 episode, which are not scored: Line, val level 124" in captured.err
    assert "3 of 4 finished" in captured.out
    (failed,) = json_lines.read(tmp_path / "some.failures.jsonl").records
    assert (failed["seed"], failed["reason"], failed["member"]) == (124, "raised", 0)
    monkeypatch.setattr(faulty_line.FaultyLine, "seeds", ())
    assert main([*command, "output.append_timestamp=False", "output.filename=all", "--fresh"]) == 4


@pytest.mark.slow
def test_two_workers_agree_on_what_to_drop(tmp_path):
    """A failure on one of them neither hangs nor splits them."""
    faults = "custom_envs.Line.env_config={fault: raise, seeds: [10005], splits: [train]}"
    code, together = launch(tmp_path / "together", faults)
    assert code == 0 and [row["step"] for row in metrics_without_clock(together.path)] == [1, 2, 3]
    expected = {"rollout/failed_groups": 1, "rollout/failed/raised": 1, "rollout/filter_kept_count": 3}
    assert {name: metrics_without_clock(together.path)[1][name] for name in expected} == expected
    assert [one["attempt"] for one in failures_of(together)] == [1, 2]
    code, stopped = launch(tmp_path / "stopped", faults.replace("[10005]", "[10008, 10009, 10010]"))
    assert code == 4 and (stopped.path / "global_step_2").is_dir() and len(metrics_without_clock(stopped.path)) == 2


def launch(path, *more):
    """Two workers, as the command line starts them."""
    import subprocess
    import sys

    words = [*WORDS, f"trainer.default_local_dir={path}", "trainer.n_gpus_per_node=2", *more]
    support = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": support, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, "-m", "ragen", *words], env=environment, capture_output=True, timeout=300)
    return ended.returncode, RunFolder(path)
