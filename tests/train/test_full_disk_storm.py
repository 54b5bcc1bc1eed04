"""A disk that fills up at any moment, on a real small file system: nothing is lost, and the same command resumes.

The run goes on where the space comes back in time, and else ends with one message. The end is that of a run with room.
"""

import random
import re
import subprocess
import time
from contextlib import contextmanager

import pytest
from kills import assert_same, checkpoint_of, unbroken_run
from tiny import ACTOR, ROLLOUT, TINY

SIZE = "24m"  # three checkpoints
WORDS = [
    "train",
    *TINY,
    "es_manager.train.env_groups=3",
    "es_manager.train.group_size=4",
    f"{ROLLOUT}.rollout_filter_value=0.9",
    "trainer.test_freq=2",
    "trainer.val_before_train=True",
    "trainer.log_group_rv_table=True",
    "trainer.save_freq=1",
    "trainer.total_training_steps=6",
]
KINDS = {
    "grpo": [],
    "ppo": ["algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.05"],
    "lora": ["lora.rank=4", "lora.alpha=8"],
}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def filled(folder):
    """Not a byte left."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_at_any_moment(nursery, tmp_path, small_disk, kind):
    words, drawn = [*WORDS, *KINDS[kind]], random.Random(kind)
    unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
    folder, num_full, num_failed = small_disk / "run", 0, 0
    while not (folder / "finished.json").exists() or num_full < 5:
        if (folder / "finished.json").exists():  # it was too quick for us
            subprocess.run(["rm", "-r", folder], check=True)
        child = nursery.start(*words, f"trainer.default_local_dir={folder}")
        while not child.has_ended(drawn.uniform(0, 0.4) * seconds):
            with filled(small_disk):
                num_full += 1
                child.has_ended(drawn.choice([0.05, 0.5, 20.0]))
        ended = child.end()
        assert ended.status in (0, 1), ended.err
        assert "Traceback" not in ended.err
        if ended.status == 1:
            num_failed += 1
            assert re.search("No space left on device|disk", ended.err), ended.err
        assert num_full < 80
        time.sleep(0.01)
    print(f"{kind}: full {num_full} times, {num_failed} failed starts or runs")
    assert_same(folder, unbroken)
    assert checkpoint_of(folder) == checkpoint_of(unbroken)
