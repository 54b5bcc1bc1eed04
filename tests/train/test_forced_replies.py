"""`forced_reply_tokens` sets the length of every reply of a run, for measuring."""

import pytest

from ragen.config.compose import resolve
from ragen.errors import ConfigError
from ragen.store.run_folder import RunFolder
from ragen.train.trainer import train

FORCED = "actor_rollout_ref.rollout.forced_reply_tokens"
TINY = (
    "sokoban",
    "model_path=pocket-blank",
    "es_manager.train.env_groups=2",
    "es_manager.train.group_size=2",
    "ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)


@pytest.mark.slow
def test_every_reply_has_the_length(tmp_path):
    config = resolve([*TINY, f"{FORCED}=7", f"trainer.default_local_dir={tmp_path / 'run'}"], environ={}).config
    metrics = RunFolder(train(config).folder).read_metrics().rows[-1]
    assert metrics["train/response_length"] == 7 * metrics["train/num_turns"] == 35


@pytest.mark.parametrize("value", ["0", "-3", "normal:100", "lognormal:", "1.5"])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match="takes a number of tokens, or lognormal:MEAN"):
        resolve(["sokoban", f"{FORCED}={value}"], environ={})
