"""A run that does not fit into memory: what it says, and that the command it proposes works."""

import re
import shlex
from collections import namedtuple

import pytest
import torch
from tiny import TINY

from ragen.cli import main
from ragen.cli import train as train_verb
from ragen.config.compose import resolve
from ragen.config.model_name import QWEN
from ragen.config.tree import value_at
from ragen.errors import RunFailed
from ragen.run import memory
from ragen.train import learner, rollouts

WORDS = [*TINY, "trainer.total_training_steps=3"]
KEYS = (memory.UPDATE, memory.SCORE, memory.LENGTH)
CPU = torch.device("cpu")
LARGE = f"model_path={QWEN}"


def raises_at(monkeypatch, step, name="update_actor", module=learner):
    """As torch does, in the n-th call."""
    calls = []

    def out_of_memory(*given):
        calls.append(given)
        if len(calls) == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*given)

    original = getattr(module, name)
    monkeypatch.setattr(module, name, out_of_memory)


def proposed(message):
    """The words of the command that a message ends with."""
    return shlex.split(message.splitlines()[-1])


@pytest.mark.parametrize("start", [WORDS, [*WORDS[1:], "--config-name=_2_sokoban"]])
def test_the_message_and_the_command(tmp_path, monkeypatch, capsys, start):
    with monkeypatch.context() as patch:
        raises_at(patch, step=1)
        status = main(["train", *start, f"trainer.default_local_dir={tmp_path / 'run'}"])
    said = capsys.readouterr().err
    assert status == 1 and "Traceback" not in said
    found = re.search(r"out of memory on cpu: ([\d.]+) GiB at the peak, of ([\d.]+) GiB", said)
    peak, total = map(float, found.groups())
    assert 0 < peak < total
    for key, now in zip(KEYS, (64, 64, 1024), strict=True):
        assert re.search(rf"^  {re.escape(key)} +now {now} ", said, re.MULTILINE)
    command = proposed(said)
    assert command[:2] == ["./ragen", "train"]
    assert command[-3:] == [f"{memory.UPDATE}=32", f"{memory.SCORE}=32", f"{memory.LENGTH}=512"]
    assert main(command[1:]) == 0


def test_what_was_saved_is_not_lost(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        raises_at(patch, step=3)
        assert main(["train", *WORDS, "trainer.save_freq=1", f"trainer.default_local_dir={folder}"]) == 1
    command = proposed(capsys.readouterr().err)
    assert f"trainer.resume_from_path={folder}/global_step_2" in command
    assert main(command[1:]) == 0
    said = capsys.readouterr().out
    assert f"{folder}-2 starts after step 2" in said and "\nstep:3 " in said and "\nstep:2 " not in said


@pytest.mark.parametrize("stage", ["collect", "update_critic", "load_model"])
def test_it_may_happen_anywhere(tmp_path, monkeypatch, capsys, stage):
    raises_at(monkeypatch, 1, stage, rollouts if stage == "collect" else learner)
    words = ["algorithm.adv_estimator=gae", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["train", *WORDS, *words]) == 1
    said = capsys.readouterr().err
    assert "out of memory" in said and f"{memory.CRITIC}=32" in proposed(said)


QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
V1 = ["sokoban", f"model.base_model={QWEN}"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (
            [*V1, "training.micro_batch_size=8", "training.max_response_length=200"],
            [f"{memory.UPDATE}=4", f"{memory.SCORE}=4", f"{memory.LENGTH}=1200"],
        ),
        (
            [*V1, "training.micro_batch_size=2", "training.max_start_length=100"],
            [f"{memory.UPDATE}=1", f"{memory.SCORE}=1"],  # the length follows from what was typed
        ),
        (
            [LARGE, "micro_batch_size_per_gpu=8", "actor_rollout_ref.rollout.response_length=2000"],
            [
                f"{memory.UPDATE}=4", f"{memory.CRITIC}=4", f"{memory.SCORE}=4", f"{memory.REPLY}=1000",
                f"{memory.LENGTH}=1800",
            ],
        ),
        (
            [LARGE, f"{memory.UPDATE}=8", f"{memory.LENGTH}=500"],
            [f"{memory.UPDATE}=4", f"{memory.REPLY}=200", f"{memory.LENGTH}=250"],
        ),
    ],
)  # fmt: skip
def test_the_command_is_one_that_can_be_given(words, added):
    """In both dialects. What contradicts a word that was typed is left out."""
    options = train_verb.parser().parse_intermixed_args(words)
    smaller = memory.smaller(resolve(words, environ={}).config)
    assert shlex.split(train_verb.smaller_command(options, words, smaller)) == ["./ragen", "train", *words, *added]
    config = resolve([*words, *added], environ={}).config
    for word in added:
        key, value = word.split("=")
        assert value_at(config, key) == int(value)


def test_what_is_one_already_is_not_halved():
    config = resolve([LARGE, "micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo"], environ={}).config
    assert memory.smaller(config) == [f"{memory.LENGTH}=1800"]
    with (
        pytest.raises(memory.OutOfMemory, match="Sequences are computed one by one already"),
        memory.explained(config, CPU, "nowhere"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_reply_never_leaves_a_prompt_without_room():
    words = [LARGE, "actor_rollout_ref.rollout.max_model_len=1000", "actor_rollout_ref.rollout.response_length=600"]
    config = resolve([*words, "algorithm.adv_estimator=grpo"], environ={}).config
    assert memory.smaller(config) == [f"{memory.REPLY}=300", f"{memory.LENGTH}=500"]


def test_main_memory_counts_too(tmp_path):
    """A real one: no machine has so much."""
    config = resolve([*WORDS], environ={}).config
    with pytest.raises(RunFailed, match="out of memory on cpu"), memory.explained(config, CPU, tmp_path):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_other_errors_are_left_alone(tmp_path):
    config = resolve([*WORDS], environ={}).config
    with pytest.raises(RuntimeError, match="shapes"), memory.explained(config, CPU, tmp_path):
        raise RuntimeError("shapes")


@pytest.mark.parametrize(("free", "others"), [(4.5, ""), (1, ", of which other processes hold 4.0 GiB now")])
def test_the_peak_of_a_gpu_is_its_own_and_what_others_hold_is_told(monkeypatch, free, others):
    properties = namedtuple("Properties", "total_memory")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(8 * 2**30))
    config = resolve([*WORDS], environ={}).config
    message = memory._message(config, torch.device("cuda", 0))
    assert message.startswith(f"out of memory on cuda:0: 3.0 GiB at the peak, of 8.0 GiB{others}. Keys to lower:")
