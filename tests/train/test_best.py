"""`trainer.save_best`: the checkpoint with the highest validation success stays, besides the last one."""

import json

import pytest
from tiny import TINY

from ragen.config.compose import resolve
from ragen.run.session import Session
from ragen.store import manifest
from ragen.train import trainer
from ragen.train.rollouts import Rollouts

SUCCESS = "val-env/SimpleSokoban/success"


class Killed(BaseException):
    pass


def config_of(folder, *more, steps=6):
    words = [*TINY, f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.save_best=True"]
    words += ["trainer.test_freq=1", f"trainer.default_local_dir={folder}", *more]
    return resolve(words, environ={}).config


@pytest.fixture
def successes(monkeypatch):
    """Success by step, in place of a validation."""
    values = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.6, 6: 0.1}
    monkeypatch.setattr(Rollouts, "validate", lambda rollouts, step, clock: {SUCCESS: values[step]})
    return values


def kept(folder):
    return sorted(manifest.step_of(path) for path in manifest.checkpoints(folder))


def test_best_and_last_stay(tmp_path, successes):
    folder = trainer.train(config_of(tmp_path / "run")).folder
    assert kept(folder) == [5, 6]
    assert manifest.best(folder).name == "global_step_5" and manifest.latest(folder).name == "global_step_6"
    assert json.loads((folder / "best_checkpoint.json").read_text()) == {"step": 5, "success": 0.6}
    assert manifest.is_resumable(manifest.best(folder))


def test_of_equal_ones_the_first_stays(tmp_path, successes):
    folder = trainer.train(config_of(tmp_path / "run", steps=4)).folder
    assert kept(folder) == [2, 4]


def test_a_better_validation_is_saved_whatever_the_interval(tmp_path, successes):
    folder = trainer.train(config_of(tmp_path / "run", "trainer.save_freq=4")).folder
    assert kept(folder) == [5, 6]


def test_nothing_is_written_where_nothing_is_saved(tmp_path, successes):
    folder = trainer.train(config_of(tmp_path / "run", "trainer.save_freq=-1")).folder
    assert kept(folder) == [] and not (folder / "best_checkpoint.json").exists()


def test_without_the_key_only_the_last_stays(tmp_path, successes):
    folder = trainer.train(config_of(tmp_path / "run", "trainer.save_best=False")).folder
    assert kept(folder) == [6] and manifest.best(folder) is None


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_around_the_save_of_the_best_it_is_found_again(tmp_path, monkeypatch, successes, before):
    config, save = config_of(tmp_path / "run"), Session.save

    def dies(session, step, *rest, **more):
        if step == 5 and before:
            manifest.write_best(session.folder.path, more["best"])
            raise Killed
        save(session, step, *rest, **more)
        if step == 5:
            raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(Session, "save", dies)
        with pytest.raises(Killed):
            trainer.train(config)
    folder = trainer.train(config).folder
    assert kept(folder) == [5, 6] and manifest.best(folder).name == "global_step_5"


def test_the_default_command_of_the_embedded_model_keeps_both():
    """And a typed `save_freq=-1` keeps nothing."""
    by_default = resolve(["sokoban", "model_path=pocket"], environ={}).config.trainer
    assert by_default.save_best and by_default.save_freq > 0
    typed = resolve(["sokoban", "model_path=pocket", "trainer.save_freq=-1"], environ={}).config.trainer
    assert typed.save_freq == -1
