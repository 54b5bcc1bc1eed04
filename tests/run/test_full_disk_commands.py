"""The whole command on a real small disk, and in a folder that is removed under it."""

import shutil

import pytest
from small_disk import fill, small_disk
from tiny import TINY

from ragen.store import manifest
from ragen.store.run_folder import RunFolder

pytestmark = pytest.mark.slow


def command(folder, *words):
    return ["train", *TINY, f"trainer.default_local_dir={folder}", "trainer.total_training_steps=6", *words]


def steps_of(folder):
    return [row["step"] for row in folder.read_metrics().rows]


def errors_of(child):
    return (child.log / "err").read_text()


def test_a_disk_that_is_full_for_a_moment_loses_no_step(nursery, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as place:
        folder = RunFolder(place / "run")
        child = nursery.start(*command(folder))
        assert child.wait_until(lambda: len(steps_of(folder)) >= 2)
        filler = fill(place)
        assert child.wait_until(lambda: "trying again" in errors_of(child))
        filler.unlink()
        assert child.end().status == 0
        assert steps_of(folder) == [1, 2, 3, 4, 5, 6] and folder.read_metrics().notes == []


def test_a_disk_that_stays_full_stops_the_run_which_resumes(nursery, tmp_path):
    with small_disk(tmp_path / "disk", "40m") as place:
        folder, words = RunFolder(place / "run"), ("trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1")
        child = nursery.start(*command(folder, *words))
        assert child.wait_until(lambda: len(steps_of(folder)) >= 3)
        filler = fill(place)
        ended = child.end()
        assert ended.status == 1 and "Traceback" not in ended.err
        assert str(folder) in ended.err and "Fix: free some disk space" in ended.err
        assert manifest.is_resumable(manifest.latest(folder.path))
        filler.unlink()
        again = nursery.run(*command(folder, *words))
        assert again.status == 0 and "resumes after step" in again.out
        assert steps_of(folder) == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_is_removed_stops_the_run(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    child = nursery.start(*command(folder))
    assert child.wait_until(lambda: len(steps_of(folder)) >= 2)
    shutil.rmtree(folder.path)
    ended = child.end()
    assert ended.status == 1 and "was removed or moved while the run was writing to it" in ended.err
    assert not folder.path.exists()
