"""Which folder a run gets and where it begins there: decided from files alone, changed by nobody but the owner."""

import dataclasses
import os
import subprocess
import sys

import pytest
import yaml
from made_up_runs import make_checkpoint, make_run

from ragen.config.compose import resolve
from ragen.errors import ConfigError
from ragen.store import manifest
from ragen.store.manifest import Damaged, Manifest, NotACheckpoint
from ragen.store.resume import claimed, decide
from ragen.store.run_folder import FolderInUse, RunFolder


@pytest.fixture(scope="module")
def resolved():
    return resolve(["model_path=pocket", "trainer.total_training_steps=10"], environ={}).config


@pytest.fixture
def base(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def config(resolved, base):
    return changed(resolved, **{"trainer.default_local_dir": str(base)})


def changed(config, **values):
    """A copy with other values at dotted keys."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner = changed(getattr(config, name), **{rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})
    return config


def traces(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(decision):
    checkpoint = decision.checkpoint and f"{decision.checkpoint.parent.name}/{decision.checkpoint.name}"
    return decision.folder.path.name, checkpoint, decision.first_step


# --- the table ----------------------------------------------------------------------------------------------------

FRESH, AGAIN, BESIDE = ("run", None, 1), ("run", None, 1), ("run-2", None, 1)
TABLE = {
    # name: (how the folder was left, the outcome, a part of the reason)
    "nothing there": (None, FRESH, ""),
    "a config and nothing else": ({}, FRESH, ""),
    "killed before a checkpoint": (
        {"steps": [0, 1, 2]}, AGAIN, "holds this run without a checkpoint: it starts again"),
    "killed after a checkpoint": (
        {"steps": range(8), "checkpoints": [2, 4]}, ("run", "run/global_step_4", 5), "resumes after step 4"),
    "killed after the last checkpoint": (
        {"steps": range(11), "checkpoints": [10]}, ("run", "run/global_step_10", 11), "resumes after step 10"),
    "finished": (
        {"steps": range(11), "checkpoints": [10], "finished": "finished"}, BESIDE, "is finished: it is left untouched"),
    "finished without a checkpoint": ({"steps": range(11), "finished": "finished"}, BESIDE, "is finished"),
    "finished before there were records of it": ({"steps": range(11)}, BESIDE, "is finished"),
    "finished, and its last checkpoint is gone": (
        {"steps": range(11), "checkpoints": [5], "finished": "finished"}, BESIDE, "is finished"),
    "stopped early": (
        {"steps": range(4), "checkpoints": [3], "finished": "early_stopped"}, BESIDE,
        "was stopped early (empty_filtered_steps)"),
    "model only": (
        {"steps": range(8), "checkpoints": [5], "contents": ["model"]}, BESIDE,
        "was saved without its optimizer (global_step_5 holds the model only)"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_table(config, base, name):
    left, wanted, reason = TABLE[name]
    if left is not None:
        make_run(base, config, **left)
    before = traces(base.parent)
    decision = decide(config)
    assert outcome(decision) == wanted
    assert reason in decision.reason and bool(reason) == bool(decision.reason) and "\n" not in decision.reason
    assert traces(base.parent) == before, "deciding changes nothing"


@pytest.mark.parametrize("name", TABLE)
def test_the_table_when_resuming_is_off(config, base, name):
    left, _, _ = TABLE[name]
    if left is not None:
        make_run(base, config, **left)
    decision = decide(changed(config, **{"trainer.resume_mode": "disable"}))
    assert outcome(decision) == (BESIDE if left else FRESH)
    assert ("trainer.resume_mode=disable" in decision.reason) == bool(left)


def test_a_metric_tells_of_an_early_stop_too(config, base):
    folder = make_run(base, config, range(4), [3])
    folder.append_metrics(4, {"early_stopped/low_validation_success": 0.0})
    assert outcome(decide(config)) == ("run", "run/global_step_3", 4)
    folder.append_metrics(4, {"early_stopped/reward_variance_collapse": 1.0})
    assert "stopped early (reward_variance_collapse)" in decide(config).reason


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"])
def test_a_record_that_cannot_be_read_is_still_an_end(config, base, content):
    make_run(base, config, range(4), [3]).finished_path.write_bytes(content)
    assert outcome(decide(config)) == BESIDE


def test_checkpoints_to_look_at_are_no_reason_to_begin_again_over_them(config, base):
    make_run(base, config, range(4))
    make_checkpoint(base, 1, ["model"], tracked=False)
    assert outcome(decide(config)) == BESIDE


# --- equal configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("system.CUDA_VISIBLE_DEVICES", "3"),
        ("trainer.n_gpus_per_node", 4),
        ("trainer.nnodes", 2),
        ("trainer.resume_mode", "disable"),
        ("trainer.total_training_steps", 9),
        ("trainer.total_epochs", 3),
    ],
)
def test_devices_and_a_longer_budget_make_no_difference(config, base, key, value):
    make_run(base, changed(config, **{key: value}), range(8), [4])
    assert outcome(decide(config)) == ("run", "run/global_step_4", 5)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("seed.train", 3, "holds a run with seed.train=3, not 10000"),
        ("actor_rollout_ref.actor.optim.lr", 1e-7, "actor_rollout_ref.actor.optim.lr=1e-07, not"),
        ("trainer.test_freq", 7, "trainer.test_freq=7, not"),
        ("trainer.total_training_steps", 11, "the longer budget trainer.total_training_steps=11, not 10"),
    ],
)
@pytest.mark.parametrize("checkpoints", [[], [4]])
def test_a_run_of_another_config_is_left_alone(config, base, key, value, reason, checkpoints):
    make_run(base, changed(config, **{key: value}), range(8), checkpoints)
    decision = decide(config)
    assert outcome(decision) == BESIDE and reason in decision.reason


def test_several_differences_are_counted(config, base):
    make_run(base, changed(config, **{"seed.train": 3, "seed.val": 4, "trainer.test_freq": 2}), range(2))
    assert "seed.train=3, not 10000, and 2 more differences" in decide(config).reason


@pytest.mark.parametrize("how", ["missing key", "extra key", "no config", "damaged", "a text"])
def test_a_config_of_another_version_is_another_one(config, base, how):
    folder = make_run(base, config, range(2))
    tree = folder.read_config()
    if how == "missing key":
        del tree["seed"]["val"]
    elif how == "extra key":
        tree["seed"]["test"] = 5
    text = {"damaged": "a: [", "a text": "hello"}.get(how) or yaml.safe_dump(tree)
    folder.config_path.write_text(text)
    if how == "no config":
        folder.config_path.unlink()
    decision = decide(config)
    assert outcome(decision) == BESIDE
    words = {"missing key": "seed.val=nothing, not 123", "extra key": "seed.test=5, not nothing"}
    assert words.get(how, "without a readable config") in decision.reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 2),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.2),
        ("trainer.logger", ["console", "tensorboard"]),
        ("trainer.save_freq", 7),
        ("trainer.n_gpus_per_node", 2),
        ("data.val_batch_size", 3),
    ],
)
def test_memory_speed_and_logging_do_not_make_another_run(config, base, key, value):
    make_run(base, changed(config, **{key: value}), range(8), [4])
    assert outcome(decide(config)) == ("run", "run/global_step_4", 5)


def test_a_longer_budget_goes_on_with_a_finished_run(config, base):
    make_run(base, config, range(11), [10], finished="finished")
    decision = decide(changed(config, **{"trainer.total_training_steps": 25}))
    assert outcome(decision) == ("run", "run/global_step_10", 11)
    assert decision.reason.endswith("resumes after step 10 (with 25 steps in all, not 10)")


@pytest.mark.parametrize(
    "left",
    [
        {"steps": range(11), "finished": "finished"},
        {"steps": range(11)},
        {"steps": range(11), "checkpoints": [10], "finished": "finished", "contents": ["model"]},
        {"steps": range(11), "checkpoints": [10], "finished": "early_stopped"},
    ],
)
def test_a_longer_budget_needs_something_to_go_on_from(config, base, left):
    make_run(base, config, **left)
    assert outcome(decide(changed(config, **{"trainer.total_training_steps": 25}))) == BESIDE


# --- siblings -----------------------------------------------------------------------------------------------------


def test_the_first_free_number_is_taken(config, base):
    for name in ("run", "run-2", "run-3"):
        make_run(base.with_name(name), config, range(11), finished="finished")
    assert outcome(decide(config)) == ("run-4", None, 1)
    assert str(base) in decide(config).reason and "run-3" not in decide(config).reason


def test_a_sibling_that_was_killed_goes_on(config, base):
    make_run(base, config, range(11), [10], finished="finished")
    make_run(base.with_name("run-2"), changed(config, **{"seed.train": 1}), range(3), [2])
    make_run(base.with_name("run-3"), config, range(6), [5])
    assert outcome(decide(config)) == ("run-3", "run-3/global_step_5", 6)


def test_another_folder_can_be_asked_about(config, base):
    make_run(base.with_name("other"), config, range(6), [5])
    assert outcome(decide(config, base.with_name("other"))) == ("other", "other/global_step_5", 6)


# --- damage -------------------------------------------------------------------------------------------------------


def test_the_one_before_a_damaged_checkpoint_is_taken_and_said(config, base):
    make_run(base, config, range(8), [2, 4])
    (base / "global_step_4" / "actor" / "model.safetensors").write_bytes(b"half")
    decision = decide(config)
    assert outcome(decision) == ("run", "run/global_step_2", 3)
    assert "actor/model.safetensors has 4 bytes, not 7" in decision.reason


def test_without_a_whole_checkpoint_nothing_is_begun_over_it(config, base):
    make_run(base, config, range(8), [4])
    (base / "global_step_4" / "actor" / "model.safetensors").unlink()
    with pytest.raises(Damaged, match=r"model\.safetensors is missing.*trainer\.resume_mode=disable"):
        decide(config)
    assert outcome(decide(changed(config, **{"trainer.resume_mode": "disable"}))) == BESIDE


def test_lost_checkpoints_are_not_forgotten(config, base):
    make_run(base, config, range(8))
    manifest.write_tracker(base, 4)
    with pytest.raises(Damaged, match=r"has lost its checkpoints: .*names step 4"):
        decide(config)


# --- a checkpoint by its path -------------------------------------------------------------------------------------


def from_path(config, path):
    return changed(config, **{"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(path)})


def test_a_named_checkpoint_of_another_run(config, base, tmp_path):
    path = make_checkpoint(tmp_path / "other", 51)
    decision = decide(from_path(config, f"{path}/"))
    assert outcome(decision) == ("run", "other/global_step_51", 52)
    assert decision.reason == f"{base} starts after step 51 of {path}"


def test_a_named_checkpoint_may_hold_the_model_only(config, tmp_path):
    path = make_checkpoint(tmp_path / "other", 51, ["model"])
    decision = decide(from_path(config, path))
    assert outcome(decision) == ("run", "other/global_step_51", 52)
    assert "holds no optimizer state: the optimizer starts fresh" in decision.reason


def test_the_latest_checkpoint_of_the_same_run_goes_on_in_its_folder(config, base):
    make_run(base, config, range(8), [2, 4])
    assert outcome(decide(from_path(config, base / "global_step_4"))) == ("run", "run/global_step_4", 5)


def test_an_earlier_checkpoint_begins_a_run_of_its_own(config, base):
    make_run(base, config, range(8), [2, 4])
    decision = decide(from_path(config, base / "global_step_2"))
    assert outcome(decision) == ("run-2", "run/global_step_2", 3)
    assert "is at global_step_4: it is left untouched" in decision.reason


def test_a_finished_run_is_not_touched_by_its_own_checkpoint(config, base):
    make_run(base, config, range(11), [10], finished="finished")
    assert outcome(decide(from_path(config, base / "global_step_10"))) == ("run-2", "run/global_step_10", 11)


def test_a_run_from_a_named_checkpoint_that_was_killed(config, base, tmp_path):
    """The same command resumes it, or starts it again; `auto` does not take it for one from the start."""
    config = changed(config, **{"trainer.total_training_steps": 100})
    asked = from_path(config, make_checkpoint(tmp_path / "other", 51))
    folder = make_run(base, asked, range(52, 55))
    assert outcome(decide(asked)) == ("run", "other/global_step_51", 52)
    assert outcome(decide(config)) == BESIDE
    assert outcome(decide(from_path(config, make_checkpoint(tmp_path / "third", 7)))) == (
        "run-2", "third/global_step_7", 8)  # fmt: skip
    make_checkpoint(folder.path, 54)
    assert outcome(decide(asked)) == outcome(decide(config)) == ("run", "run/global_step_54", 55)


def test_a_named_checkpoint_that_is_not_there(config, base, tmp_path):
    make_checkpoint(tmp_path / "other", 50)
    missing = tmp_path / "other" / "global_step_51"
    with pytest.raises(NotACheckpoint, match=r"trainer\.resume_from_path=.*: not found.*has global_step_50"):
        decide(from_path(config, missing))
    with pytest.raises(ConfigError, match="is not a directory"):
        decide(from_path(config, tmp_path / "nowhere" / "global_step_1"))


def test_a_named_checkpoint_that_is_damaged(config, tmp_path):
    path = make_checkpoint(tmp_path / "other", 50)
    (path / "actor" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match=r"trainer\.resume_from_path=.*has 0 bytes, not 7"):
        decide(from_path(config, path))


def test_a_named_checkpoint_without_an_actor(config, tmp_path):
    path = tmp_path / "global_step_5"
    path.mkdir()
    manifest.write_manifest(path, Manifest(5, {"critic": ["model"]}))
    with pytest.raises(ConfigError, match="no longer holds an actor"):
        decide(from_path(config, path))


# --- taking the folder --------------------------------------------------------------------------------------------


def test_a_claimed_folder_is_as_it_was_at_the_checkpoint(config, base):
    folder = make_run(base, config, range(8), [4])
    with claimed(config) as decision:
        assert outcome(decision) == ("run", "run/global_step_4", 5)
        with pytest.raises(FolderInUse), claimed(config):
            pass
    assert [row["step"] for row in folder.read_metrics().rows] == [0, 1, 2, 3, 4]
    assert [file.step for file in folder.episode_files()] == [0, 1, 2, 3, 4]
    assert (base / "global_step_4").is_dir()


def test_a_claimed_run_that_begins_again_has_nothing_left(config, base):
    folder = make_run(base, config, range(8))
    with claimed(config) as decision:
        assert outcome(decision) == AGAIN
    assert folder.read_metrics().rows == [] and folder.episode_files() == []


def test_a_claimed_run_with_a_longer_budget_is_no_longer_finished(config, base):
    folder = make_run(base, config, range(11), [10], finished="finished")
    with claimed(changed(config, **{"trainer.total_training_steps": 25})):
        assert folder.read_finished() is None
    assert folder.read_metrics().last_step() == 10


def test_a_claimed_sibling_touches_nothing(config, base):
    make_run(base, config, range(11), [10], finished="finished")
    before = traces(base)
    with claimed(config) as decision:
        assert outcome(decision) == BESIDE
        assert decision.folder.path.is_dir()
    assert traces(base) == before


def test_a_run_from_elsewhere_begins_in_an_empty_folder(config, base, tmp_path):
    path = make_checkpoint(tmp_path / "other", 51)
    RunFolder(base).write_episodes(3, "train", [])  # of a run that was killed before its first metrics
    with claimed(from_path(config, path)) as decision:
        assert outcome(decision) == ("run", "other/global_step_51", 52)
        assert decision.folder.episode_files() == []


def test_a_run_that_ends_while_we_come_is_not_begun_again(config, base, monkeypatch):
    folder = make_run(base, config, range(8))
    owned = RunFolder.owned

    def slowly(self, key):
        if self.path == base:
            folder.write_finished("finished", 10)  # its owner's last act before it leaves
        return owned(self, key)

    monkeypatch.setattr(RunFolder, "owned", slowly)
    with claimed(config) as decision:
        assert outcome(decision) == BESIDE
    assert folder.read_metrics().last_step() == 7


# --- the record of the end ----------------------------------------------------------------------------------------


def test_the_record_of_the_end(base):
    folder = RunFolder(base)
    assert folder.read_finished() is None
    folder.write_finished("early_stopped", 40, "low_validation_success", "val-env/A/success was below 1%")
    assert folder.read_finished() == {
        "status": "early_stopped",
        "step": 40,
        "rule": "low_validation_success",
        "explanation": "val-env/A/success was below 1%",
    }
    folder.finished_path.write_text("{")
    assert folder.read_finished() == {"status": "unknown"}
    folder.rewind(10)
    assert folder.read_finished() is None


def test_half_written_checkpoints_of_a_dead_owner_are_swept(base):
    (base / ".global_step_5.part" / "actor").mkdir(parents=True)
    (base / ".config.yaml.77.part").write_text("half")
    with RunFolder(base).owned():
        assert sorted(path.name for path in base.iterdir()) == [".owner"]


def test_deciding_needs_no_torch(config, base, tmp_path):
    make_run(base, config, range(8), [4])
    code = (
        "import sys\n"
        "from ragen.config.schema import Config\n"
        "from ragen.config.tree import build\n"
        "from ragen.store.run_folder import RunFolder\n"
        "from ragen.store.resume import decide\n"
        "print(decide(build(Config, RunFolder(sys.argv[1]).read_config())).first_step)\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", code, str(base)], capture_output=True, text=True, check=True, env=environ
    )
    assert told.stdout == "5\n"
