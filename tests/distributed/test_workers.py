"""Several workers compute what one does, and end as one: with one exit status and one message."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import PATIENCE
from safetensors.torch import load_file
from tiny import ACTOR, ROLLOUT, TINY
from without_clock import metrics_without_clock

from ragen.distributed import launcher
from ragen.distributed.launcher import launch
from ragen.distributed.workers import Workers
from ragen.errors import ConfigError
from ragen.model.load import find_model
from ragen.store.run_folder import RunFolder

SOURCES = Path(__file__).parents[2] / "src"
WORDS = [
    "train",
    *TINY,
    "es_manager.train.env_groups=4",
    "es_manager.val.env_groups=3",
    # Of four groups three, and of their nine episodes five and four: nothing divides by two.
    f"{ROLLOUT}.rollout_filter_strategy=top_k_abs",
    f"{ROLLOUT}.rollout_filter_value=3",
    "ppo_mini_batch_size=5",
    "micro_batch_size_per_gpu=2",
    "trainer.total_training_steps=5",
    "trainer.save_freq=5",
    f"{ACTOR}.optim.lr=5e-5",  # rounding grows with every update, the faster the larger it is
]
# Four actions are not enough for any of these levels, so that the fifth validation ends the run.
STOPPED = ["trainer.test_freq=1", "seed.val=102"]
PPO = [
    "trainer.test_freq=5",
    "algorithm.adv_estimator=gae",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.1",
]
TWO = "trainer.n_gpus_per_node=2"


class Launched:
    """`python -m ragen …`, as a user starts it; its output goes to files."""

    def __init__(self, folder, *words):
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ragen", *words], stdout=out, stderr=err, env=environment
            )

    def wait_for(self, text):
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.02)

    def status(self):
        return self.process.wait(PATIENCE)


def assert_equal_runs(one, two):
    left, right = metrics_without_clock(one), metrics_without_clock(two)
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for row, other in zip(left, right, strict=True):
        assert other == pytest.approx(row, abs=1e-5, rel=1e-5)
    begun = load_file(find_model("pocket").folder / "model.safetensors")
    for part in (path.relative_to(one) for path in one.glob("global_step_5/*/model.safetensors")):
        weights, others = load_file(one / part), load_file(two / part)
        assert weights.keys() == others.keys()
        assert all(torch.allclose(weights[name], others[name], rtol=0, atol=1e-5) for name in weights), part
        assert max(float((weights[name] - begun[name]).abs().max()) for name in weights) > 5e-5  # there was learning


@pytest.mark.slow
def test_two_equal_one_grpo_and_a_rule_ends_both(nursery, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = nursery.run(*WORDS, *STOPPED, f"trainer.default_local_dir={one}")
    launched = Launched(tmp_path, *WORDS, *STOPPED, TWO, f"trainer.default_local_dir={two}")
    assert (alone.status, launched.status()) == (3, 3), launched.err.read_text()
    for told in (alone.out, launched.out.read_text()):
        assert told.count("stopped early by the rule low_validation_success") == 1
    assert "Traceback" not in launched.err.read_text()
    assert [row["train/batch_size"] for row in metrics_without_clock(one)] == [9.0] * 5
    assert_equal_runs(one, two)


@pytest.mark.slow
def test_two_equal_one_ppo_and_go_on_after_an_interrupt(nursery, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert nursery.run(*WORDS, *PPO, f"trainer.default_local_dir={one}").status == 0
    words = [*WORDS, *PPO, f"trainer.default_local_dir={two}"]
    launched = Launched(tmp_path, *words, TWO)
    launched.wait_for("\nstep:2 ")
    launched.process.send_signal(signal.SIGINT)  # the launcher alone hears it
    assert launched.status() == 130, launched.err.read_text()
    assert f"saved in {two}/global_step_" in launched.out.read_text()
    assert "Traceback" not in launched.err.read_text() and "again to stop at once" in launched.out.read_text()
    assert [child.end().status for child in start_two(nursery, tmp_path, *words)] == [0, 0]
    assert_equal_runs(one, two)


@pytest.mark.slow
def test_two_steer_and_resample_as_one(nursery, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*WORDS, "es_manager.train.level_sampling=steered", f"{ROLLOUT}.rollout_filter_resample=True"]
    assert nursery.run(*words, f"trainer.default_local_dir={one}").status == 0
    children = start_two(nursery, tmp_path, *words, f"trainer.default_local_dir={two}")
    assert [child.end().status for child in children] == [0, 0]
    assert any(row["rollout/resampled_groups"] > 0 for row in metrics_without_clock(one))
    assert_equal_runs(one, two)


def test_a_worker_may_have_nothing_to_do(nursery, tmp_path):
    """One level, and mini-batches of one episode: the second of two workers plays and computes nothing."""
    words = [*WORDS, "es_manager.train.env_groups=1", "es_manager.val.env_groups=1", "ppo_mini_batch_size=1"]
    words += [f"{ROLLOUT}.rollout_filter_value=1", "trainer.total_training_steps=2", "trainer.test_freq=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert nursery.run(*words, f"trainer.default_local_dir={one}").status == 0
    children = start_two(nursery, tmp_path, *words, f"trainer.default_local_dir={two}")
    assert [child.end().status for child in children] == [0, 0]
    for row, other in zip(metrics_without_clock(one), metrics_without_clock(two), strict=True):
        assert other == pytest.approx(row, abs=1e-5, rel=1e-5)


# --- their parts --------------------------------------------------------------------------------------------------

SHARES = """
import json
import torch
from ragen.distributed import workers
from ragen.distributed.workers import Workers

workers.MAX_BUCKET = 7
us = Workers.join()
found = {"rank": us.rank, "size": us.size, "mine": [], "gathered": [], "sums": []}
with us.together():
    for num in range(6):
        found["mine"].append(us.mine(range(num)))
        found["gathered"].append(us.gather([f"{item}" for item in us.mine(range(num))]))
    for num in (0, 1, 3, 5):
        mixed = [torch.full((size,), float(us.rank + size), dtype=dtype)
                 for size, dtype in zip(range(1, num + 1), [torch.float32, torch.float64] * 3)]
        mixed.append(torch.tensor(us.rank + 1))
        us.add_up(mixed)
        found["sums"].append([part.tolist() for part in mixed])
    found["agreed"] = us.agree(["mine", "yours"][us.rank])
    (found["tensor"],) = [part.tolist() for part in us.gather([torch.ones(2)] if us.rank == 0 else [])]
print(json.dumps(found))
"""


def start_two(nursery, tmp_path, *words, **options):
    environment = {"WORLD_SIZE": "2", "RAGEN_WORKERS": str(tmp_path)}
    return [
        nursery.start(*words, environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(2)
    ]


def test_shares_with_odd_counts_and_without_anything(nursery, tmp_path):
    ended = [child.end() for child in start_two(nursery, tmp_path, code=SHARES)]
    assert [one.status for one in ended] == [0, 0], ended
    first, second = (json.loads(one.out) for one in ended)
    assert (first["rank"], second["rank"], first["size"]) == (0, 1, 2)
    assert first["mine"] == [[], [0], [0], [0, 2], [0, 2], [0, 2, 4]]
    assert second["mine"] == [[], [], [1], [1], [1, 3], [1, 3]]
    assert first["gathered"] == [[str(item) for item in range(num)] for num in range(6)]
    # A tensor of n numbers holds n on one worker and n + 1 on the other; the last one holds 1 and 2.
    assert first["sums"] == [[*([float(2 * n + 1)] * n for n in range(1, num + 1)), 3] for num in (0, 1, 3, 5)]
    assert first["agreed"] == "mine" and first["tensor"] == [1.0, 1.0]
    assert {key: value for key, value in first.items() if key not in ("rank", "mine")} == {
        key: value for key, value in second.items() if key not in ("rank", "mine")
    }


def test_alone_everything_is_ones_own():
    us = Workers()
    tensor = torch.ones(3)
    us.add_up([tensor])
    assert us.mine([1, 2, 3]) == us.gather([1, 2, 3]) == [1, 2, 3]
    assert us.agree("x") == "x" and us.is_first and tensor.tolist() == [1.0] * 3


# --- how they end -------------------------------------------------------------------------------------------------


def test_of_two_that_fail_one_tells_why(nursery, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.owned():
        children = start_two(nursery, tmp_path, *WORDS, f"trainer.default_local_dir={folder}")
        first, second = (child.end() for child in children)
    assert (first.status, second.status) == (2, 1)
    assert f"is in use by process {os.getpid()}" in first.err and "Traceback" not in first.err + second.err
    assert "belongs" not in second.err
    assert (tmp_path / "failed").read_text() == "0"


def test_who_loses_the_others_says_so(nursery, tmp_path):
    first, second = start_two(nursery, tmp_path, *WORDS, f"trainer.default_local_dir={tmp_path / 'run'}")
    assert first.wait_for("rollout")
    second.kill()
    ended = first.end()
    assert ended.status == 1
    assert "worker 0 lost contact with the others" in ended.err and "Traceback" not in ended.err


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Stand-ins for workers: what each rank does, as lines of a shell."""

    def write(*lines):
        path = tmp_path / "worker"
        cases = "".join(f"{rank}) {line} ;;\n" for rank, line in enumerate(lines))
        path.write_text(f"#!/bin/sh\ncase $RANK in\n{cases}esac\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))
        return len(lines)

    monkeypatch.setattr(launcher, "GRACE", 0.2)
    monkeypatch.setattr(launcher, "IMPATIENCE", 0.2)
    return write


@pytest.mark.parametrize("status", [0, 3, 4, 130, 143])
def test_a_run_ends_with_the_status_of_its_workers(ranks, status):
    assert launch(ranks(f"exit {status}", f"sleep 0.5; exit {status}"), 1, []) == status


def test_the_first_that_failed_decides_and_the_others_are_ended(ranks, capfd):
    failing = "echo -n 1 > $RAGEN_WORKERS/failed; exit 2"
    assert launch(ranks("exit 1", failing, "exec sleep 100"), 1, []) == 2
    assert capfd.readouterr().err == ""


def test_a_worker_that_was_killed_is_named(ranks, capfd):
    assert launch(ranks("exec sleep 100", "kill -9 $$"), 1, []) == 1
    assert capfd.readouterr().err == "worker 1 was killed by signal 9\n"


def test_the_arguments_reach_every_worker(ranks, tmp_path):
    assert launch(ranks(*[f'echo "$@" > {tmp_path}/$RANK-$LOCAL_RANK-of-$WORLD_SIZE'] * 3), 1, ["sokoban", "a=b"]) == 0
    for rank in range(3):
        assert (tmp_path / f"{rank}-{rank}-of-3").read_text() == "-m ragen train sokoban a=b\n"


def interrupt_when(path, times, number=signal.SIGINT):
    """Send this process a signal, several times, once the workers are there."""

    def wait_and_send():
        wait_for(path)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    threading.Thread(target=wait_and_send, daemon=True).start()


def wait_for(path):
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "forwarded", "status"), [(signal.SIGINT, "USR1", 130), (signal.SIGTERM, "TERM", 143)]
)
def test_a_signal_is_passed_on_once_and_waited_for(ranks, tmp_path, number, forwarded, status):
    """Ctrl-C in another form: from a terminal every worker gets its own as well, and two would end it at once."""
    ready = tmp_path / "ready"
    patient = (
        f"trap 'echo told >> {tmp_path}/told; sleep 0.5; exit {status}' {forwarded}; touch {ready}; "
        "while :; do sleep 0.05; done"
    )
    interrupt_when(ready, 1, number)
    assert launch(ranks(patient), 1, []) == status
    assert (tmp_path / "told").read_text() == "told\n"


def test_a_signal_that_comes_while_workers_start_is_not_lost(ranks, tmp_path, monkeypatch):
    """The worker is there before the launcher has heard of it."""
    ready, popen = tmp_path / "ready", subprocess.Popen

    def slow_start(*given, **options):
        process = popen(*given, **options)
        wait_for(ready)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", slow_start)
    assert launch(ranks(f"trap 'exit 130' USR1; touch {ready}; for _ in $(seq 600); do sleep 0.05; done"), 1, []) == 130


def test_a_second_interrupt_ends_those_who_do_not_listen(ranks, tmp_path, capfd):
    ready = tmp_path / "ready"
    interrupt_when(ready, times=2)
    assert launch(ranks(f"trap '' TERM INT USR1; touch {ready}; while :; do sleep 0.05; done"), 1, []) == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_several_nodes_are_left_to_torchrun():
    with pytest.raises(ConfigError, match=r"torchrun --nnodes 2 --nproc-per-node 4 .* -m ragen train sokoban"):
        launch(4, 2, ["sokoban"])
