"""SIGTERM: a step that has not changed weights is dropped, any other is finished; the run saves, and ends with 143.

Whenever it comes, the resumed run ends like one that was never stopped, bit for bit.
"""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import PATIENCE, started
from tiny import ROLLOUT, TINY
from without_clock import metrics_without_clock

from ragen.config.compose import resolve
from ragen.run import session as session_module
from ragen.run.interrupt import Interrupt, Preempted
from ragen.sft import run as sft_run
from ragen.store import manifest
from ragen.store.run_folder import RunFolder
from ragen.train import learner, rollouts, trainer, validation

SOURCES = Path(__file__).parents[2] / "src"
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.horizon=100",
]
KINDS = {"grpo": [], "ppo": PPO}
COMMON = [
    *TINY,
    "trainer.total_training_steps=3",
    "trainer.save_freq=100",
    "trainer.test_freq=2",
    "trainer.val_before_train=True",
]


def config_of(folder, kind="grpo", *more):
    return resolve([*COMMON, *KINDS[kind], *more, f"trainer.default_local_dir={folder}"], environ={}).config


def comparable(folder):
    folder = RunFolder(folder)
    rows = metrics_without_clock(folder.path)
    latest = manifest.latest(folder.path)
    weights = {path.relative_to(latest): path.read_bytes() for path in latest.rglob("*.safetensors")}
    episodes = {path.name: path.read_bytes() for path in folder.episodes_path.iterdir()}
    state = json.loads((latest / "trainer_state.json").read_text())
    del state["totals"]
    return latest.name, rows, weights, episodes, state


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Comparable results of runs that were never stopped, by kind."""
    found = {}

    def result(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind) / "run"
            assert trainer.train(config_of(folder, kind)).status == "finished"
            found[kind] = comparable(folder)
        return found[kind]

    return result


def terminate_at(monkeypatch, owner, name, call):
    """SIGTERM as the n-th call of a function begins."""
    real, calls = getattr(owner, name), []

    def terminated(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, terminated)


# Where SIGTERM comes, which step the run then has saved, and whether that step still has to be validated.
MOMENTS = {
    "validation before training": (validation, "collect", 1, 0, False),
    "first rollout": (rollouts, "collect", 1, 0, False),
    "second rollout": (rollouts, "collect", 2, 1, False),
    "collapse metrics": (rollouts.CollapseWatch, "measure", 2, 1, False),
    "scoring": (learner.Learner, "score", 2, 1, False),
    "targets": (learner.Learner, "make_targets", 2, 1, False),
    "critic update": (learner.Learner, "update_critic", 2, 2, True),
    "actor update": (learner.Learner, "update_actor", 2, 2, True),
    "actor update, no validation due": (learner.Learner, "update_actor", 1, 1, False),
    "validation": (validation, "collect", 3, 2, True),  # the first one takes two calls
    "logging": (session_module.Session, "log_step", 3, 2, False),
}


QUICK = ("critic update", "validation")
BY_SPEED = [moment if moment in QUICK else pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS]


@pytest.mark.parametrize("moment", BY_SPEED)
def test_sigterm_at_any_moment_loses_nothing(tmp_path, monkeypatch, unbroken, moment):
    owner, name, call, saved, is_unfinished = MOMENTS[moment]
    config = config_of(tmp_path / "run", "ppo")
    with monkeypatch.context() as terminated:
        terminate_at(terminated, owner, name, call)
        ended = trainer.train(config)
    assert (ended.status, ended.num_steps) == ("preempted", saved)
    latest = manifest.latest(ended.folder)
    assert not (ended.folder / "finished.json").exists()
    if saved == 0:
        assert latest is None
    else:
        assert latest.name == f"global_step_{saved}"
        assert ("unfinished" in json.loads((latest / "trainer_state.json").read_text())) is is_unfinished
        assert RunFolder(ended.folder).read_metrics().last_step() == saved - is_unfinished
    assert trainer.train(config).status == "finished"
    assert comparable(ended.folder) == unbroken("ppo")


def test_a_dropped_step_that_is_saved_already_is_not_saved_again(tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", "grpo", "trainer.save_freq=1", "trainer.val_before_train=False")
    with monkeypatch.context() as terminated:
        terminate_at(terminated, rollouts, "collect", 3)
        ended = trainer.train(config)
    assert ended.num_steps == 2
    steps = []
    monkeypatch.setattr(session_module.Session, "save", lambda run, step, *rest, **more: steps.append(step))
    assert trainer.train(config).status == "finished" and steps == [3]


@pytest.mark.slow
def test_twice_in_a_row_with_nothing_in_between(tmp_path, monkeypatch, unbroken):
    """In the validation of step 2, and again in it after resuming."""
    config = config_of(tmp_path / "run")
    for call in (3, 1):
        with monkeypatch.context() as terminated:
            terminate_at(terminated, validation, "collect", call)
            ended = trainer.train(config)
        assert (ended.status, ended.num_steps) == ("preempted", 2)
    assert trainer.train(config).status == "finished"
    assert comparable(ended.folder) == unbroken("grpo")


def test_without_checkpoints_the_run_starts_again(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path / "run", "grpo", "trainer.save_freq=-1")
    terminate_at(monkeypatch, rollouts, "collect", 2)
    ended = trainer.train(config)
    assert ended.status == "preempted" and not list(ended.folder.glob("global_step_*"))
    assert "preempted after step 1; nothing was saved (trainer.save_freq=-1)" in capsys.readouterr().out


def test_ctrl_c_then_sigterm_is_a_preemption(tmp_path, monkeypatch):
    real = rollouts.collect

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(rollouts, "collect", interrupted)
    assert trainer.train(config_of(tmp_path / "run")).status == "preempted"


def test_an_environment_that_swallows_everything_cannot_hold_a_run(tmp_path, monkeypatch):
    real = rollouts.collect

    def swallowed(*arguments, **options):
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(rollouts, "collect", swallowed)
    ended = trainer.train(config_of(tmp_path / "run"))
    assert (ended.status, ended.num_steps) == ("preempted", 0)


@pytest.mark.parametrize(
    "aim", ["rollout", *(pytest.param(aim, marks=pytest.mark.slow) for aim in ("update", "validation"))]
)
def test_the_command_ends_with_143_and_resumes(nursery, tmp_path, unbroken, aim):
    folder = RunFolder(tmp_path / "run")
    command = ["train", *COMMON, f"trainer.default_local_dir={folder}"]
    child = nursery.start(*command)
    assert child.wait_for(aim, times=2)
    child.send(signal.SIGTERM)
    ended = child.end()
    assert ended.status == 143, ended.err
    assert "SIGTERM: saving and stopping, within 120 s" in ended.out and "Traceback" not in ended.err
    assert nursery.run(*command).status == 0
    assert comparable(folder.path) == unbroken("grpo")


@pytest.mark.slow
def test_fine_tuning_is_preempted_and_resumes(nursery, tmp_path):
    words = ["train", "sokoban", "rl_or_sft=sft", "model_path=pocket", "sft.data_generation.train_size=12"]
    words += ["sft.data_generation.test_size=4", "sft.training.epochs=2", "sft.training.train_batch_size=4"]
    words += ["sft.training.micro_batch_size=4", "sft.training.logger=[console]", "es_manager.val.env_groups=2"]
    folders = [tmp_path / name for name in ("unbroken", "stopped")]
    assert nursery.run(*words, f"sft.output_dir={folders[0]}").status == 0
    command = [*words, f"sft.output_dir={folders[1]}"]
    child = nursery.start(*command)
    assert child.wait_for("update", times=2)
    child.send(signal.SIGTERM)
    assert child.end().status == 143
    assert nursery.run(*command).status == 0
    one, two = (folder / "merged_model" / "model.safetensors" for folder in folders)
    assert one.read_bytes() == two.read_bytes()
    assert sft_run.MERGED == "merged_model"


HANGS = """
import signal, sys, time
from ragen.run.interrupt import Interrupt
with Interrupt(seconds=0.5):
    print("ready", flush=True)
    {hang}
"""
# The first runs no Python handler while it waits.
HANG_IN_C = "import ctypes; libc = ctypes.CDLL(None); [libc.pause() for _ in range(9)]"
HANG_IN_PYTHON = "[time.sleep(0.1) for _ in iter(int, 1)]"


@pytest.mark.parametrize("hang", [HANG_IN_C, HANG_IN_PYTHON])
def test_a_hanging_process_exits_with_143_all_the_same(hang):
    command, pipe = [sys.executable, "-c", HANGS.format(hang=hang)], subprocess.PIPE
    with started(command, env={"PYTHONPATH": str(SOURCES)}, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
        assert "not saved in time" in process.stderr.read()


def test_no_deadline_after_the_work_is_done():
    with Interrupt(lambda text: None, seconds=0.05) as interrupt:
        with pytest.raises(Preempted), interrupt.droppable():
            signal.raise_signal(signal.SIGTERM)
        interrupt.commit()
        signal.raise_signal(signal.SIGTERM)  # a second one changes nothing
    time.sleep(0.2)
    assert interrupt.status == "preempted"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_storm_of_sigterms(nursery, tmp_path, workers):
    """Terminated at random moments until it is done: the end is that of an undisturbed run."""
    drawn = random.Random(workers)
    words = ["train", *COMMON, *PPO, "trainer.total_training_steps=6", f"trainer.n_gpus_per_node={workers}"]
    words += [f"{ROLLOUT}.rollout_filter_value=0.9", "es_manager.train.env_groups=4"]
    started = time.monotonic()
    assert nursery.run(*words, f"trainer.default_local_dir={tmp_path / 'unbroken'}").status == 0
    seconds, statuses = time.monotonic() - started, []
    while 0 not in statuses:
        child = nursery.start(*words, f"trainer.default_local_dir={tmp_path / 'stopped'}")
        child.has_ended(drawn.uniform(0.2, 1.0) * seconds)
        if not child.has_ended():
            child.send(signal.SIGTERM)
        ended = child.end()
        assert ended.status in (0, 143, -15), ended.err
        assert "Traceback" not in ended.err
        statuses.append(ended.status)
        assert len(statuses) < 60
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "unbroken")
