"""What a run finds broken on disk: one clear message, the right exit status, no traceback, and nothing is lost."""

import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from tiny import TINY
from transformers import Qwen2Config

from ragen.checkpoint.parts import Part, Parts
from ragen.checkpoint.save import CheckpointStore
from ragen.config.schema import Optimizer
from ragen.model.decoder import Decoder, Shape
from ragen.store.run_folder import RunFolder
from ragen.train.optimizer import MasterAdamW

WORDS = ["train", *TINY, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9"]
WEIGHTS = "actor/model.safetensors"


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """What a run of three steps leaves that was killed in its third: two steps, each saved."""
    folder = RunFolder(tmp_path_factory.mktemp("trained") / "run")
    ended = nursery.run(*WORDS, "trainer.total_training_steps=2", f"trainer.default_local_dir={folder}")
    assert ended.status == 0, ended.err
    text = folder.config_path.read_text()
    assert text.count("total_training_steps: 2\n") == 1
    folder.config_path.write_text(text.replace("total_training_steps: 2\n", "total_training_steps: 3\n"))
    folder.finished_path.unlink()
    return folder.path


@pytest.fixture
def run(nursery, trained, tmp_path):
    """A copy of the trained run, and how to go on with it."""

    class Copy:
        folder = tmp_path / "run"

        def go_on(self, *words, **options):
            all_words = [*WORDS, "trainer.total_training_steps=3", f"trainer.default_local_dir={self.folder}", *words]
            return nursery.run(*all_words, **options)

        def steps(self):
            return [row["step"] for row in RunFolder(self.folder).read_metrics().rows]

    shutil.copytree(trained, Copy.folder)
    return Copy()


def damage(path, how):
    if how == "truncated":
        os.truncate(path, 100)
    elif how == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def files(folder):
    """Everything but who owns it."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and path.name != ".owner"}


def assert_refused(ended, status, *parts):
    assert ended.status == status, (ended.out, ended.err)
    assert "Traceback" not in ended.err
    (message,) = [line for line in ended.err.splitlines() if line.startswith("ragen train: ")]
    for part in parts:
        assert part in message


# --- checkpoints --------------------------------------------------------------------------------------------------

FILES = [WEIGHTS, "actor_optimizer/optimizer.safetensors", "trainer_state.json", "manifest.json"]


@pytest.mark.parametrize("how", ["truncated", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_only_checkpoint_is_refused(run, name, how):
    shutil.rmtree(run.folder / "global_step_1")
    damage(run.folder / "global_step_2" / name, how)
    before = files(run.folder)
    told = ["global_step_2", "trainer.resume_mode=disable", *([] if name == "manifest.json" else [f"{name} "])]
    assert_refused(run.go_on(), 2, *told)
    assert files(run.folder) == before


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_where_another_checkpoint_is_whole_it_is_taken(run, how):
    damage(run.folder / "global_step_2" / WEIGHTS, how)
    ended = run.go_on()
    assert ended.status == 0, ended.err
    assert f"{run.folder} resumes after step 1" in ended.out and "is damaged" in ended.out
    assert run.steps() == [1, 2, 3]


def test_a_changed_byte_is_noticed(run):
    """The size is right, so only reading it can tell."""
    damage(run.folder / "global_step_2" / WEIGHTS, "changed")
    before = (run.folder / "global_step_1" / WEIGHTS).read_bytes()
    assert_refused(run.go_on(), 2, f"{WEIGHTS} has changed", f"{run.folder}/global_step_1 is whole")
    assert (run.folder / "global_step_1" / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("how", ["truncated", "missing", "changed"])
def test_a_damaged_checkpoint_that_was_asked_for_is_refused(run, tmp_path, how):
    path = run.folder / "global_step_2"
    damage(path / WEIGHTS, how)
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    ended = run.go_on(*words, f"trainer.default_local_dir={tmp_path / 'other'}")
    assert_refused(ended, 2, str(path), "is damaged", WEIGHTS, "global_step_1 is whole")


def test_a_checkpoint_that_is_not_there_is_refused(run, tmp_path):
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_7"]
    assert_refused(run.go_on(*words), 2, f"{tmp_path}/global_step_7 is not a directory")


def test_another_models_checkpoint_is_refused(run, tmp_path):
    config = Qwen2Config(
        vocab_size=622, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(Shape.of(config))
    part = Part(model, config, optimizer=MasterAdamW(model.parameters(), Optimizer(), 3))
    path = CheckpointStore(tmp_path / "theirs").save(1, Parts(part))
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    ended = run.go_on(*words, f"trainer.default_local_dir={tmp_path / 'other'}")
    assert_refused(ended, 2, f"checkpoint {path} is of another model", "hidden_size is 64 there", "set model_path")


def test_a_checkpoint_without_the_critic_is_refused(run, tmp_path):
    path = run.folder / "global_step_2"
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}", "algorithm.adv_estimator=gae"]
    ended = run.go_on(*words, f"trainer.default_local_dir={tmp_path / 'other'}")
    assert_refused(ended, 2, f"checkpoint {path} holds no critic")


# --- the config ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("val_first", "level"), [(False, "train level 10000"), (True, "val level 123")])
def test_a_first_prompt_without_room_is_refused(nursery, tmp_path, val_first, level):
    words = ["actor_rollout_ref.rollout.max_model_len=60", f"trainer.val_before_train={val_first}"]
    ended = nursery.run(*WORDS, *words, f"trainer.default_local_dir={tmp_path / 'run'}")
    assert_refused(ended, 2, "max_model_len=60 less response_length=48 has no room", f"SimpleSokoban, {level}")


# --- the folder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only():
    """Take the right to write away, and give it back."""
    changed = []

    def lock(folder):
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            changed.append((path, stat.S_IMODE(path.stat().st_mode)))
            path.chmod(0o555)

    yield lock
    for path, mode in changed:
        path.chmod(mode)


def test_a_folder_that_must_not_be_written_is_named(run, read_only):
    before = files(run.folder)
    read_only(run.folder)
    ended = run.go_on(obey_permissions=True)
    assert_refused(ended, 1, "Permission denied", str(run.folder))
    assert files(run.folder) == before


def test_a_place_where_no_folder_can_be_made_is_named(run, tmp_path, read_only):
    place = tmp_path / "closed"
    place.mkdir()
    read_only(place)
    ended = run.go_on(f"trainer.default_local_dir={place / 'run'}", obey_permissions=True)
    assert_refused(ended, 1, "Permission denied", str(place / "run"))


def test_a_full_disk_loses_only_the_checkpoint_that_did_not_fit(run, nursery, trained):
    whole = files(run.folder / "global_step_2")
    ended = run.go_on(max_file_size=1_000_000)  # metrics fit, weights do not
    assert_refused(
        ended, 1, "the checkpoint of step 3 was not written (File too large)", f"{run.folder}/global_step_2 is whole",
        "run the same command to resume from it",
    )  # fmt: skip
    assert files(run.folder / "global_step_2") == whole
    assert not [path for path in run.folder.iterdir() if path.name.endswith(".part")]
    assert run.steps() == [1, 2, 3]
    again = run.go_on()
    assert again.status == 0 and f"{run.folder} resumes after step 2" in again.out
    assert run.steps() == [1, 2, 3] and (run.folder / "global_step_3").exists()


def test_a_full_disk_at_the_first_checkpoint(nursery, tmp_path):
    words = [*WORDS, "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}"]
    ended = nursery.run(*words, max_file_size=1_000_000)
    assert_refused(ended, 1, "the checkpoint of step 1 was not written", "there is no earlier checkpoint")
    assert nursery.run(*words).status == 0


def test_a_folder_has_one_owner(run, nursery):
    words = [*WORDS, "trainer.total_training_steps=3", f"trainer.default_local_dir={run.folder}"]
    first = nursery.start(*words)
    assert first.wait_for("rollout")
    first.send(signal.SIGSTOP)  # it must not end before the second looks
    assert_refused(run.go_on(), 2, f"{run.folder} is in use by process {first.pid}", "trainer.default_local_dir")
    first.send(signal.SIGCONT)
    assert first.end().status == 0
    assert run.steps() == [1, 2, 3]
