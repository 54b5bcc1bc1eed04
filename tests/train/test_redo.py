"""Out of memory in a step: the share is redone with smaller micro-batches, the gradient is that of a clean start."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.config.schema import Optimizer
from ragen.distributed.launcher import SHARED
from ragen.distributed.workers import ALONE
from ragen.model.critic import Critic
from ragen.model.decoder import Decoder, Shape
from ragen.model.packing import Sample
from ragen.model.redo import Redo
from ragen.model.scoring import Scorer
from ragen.train.offload import make_optimizer
from ragen.train.update import Limits, Targets, imitate, update_actor, update_critic
from ragen.types import Episode, EpisodeState, TokenSequence

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LENGTHS = (5, 9, 3, 7, 12, 4, 8, 6)


def samples():
    episode, made = Episode("T", 0, "train", 0, 0, "", (), EpisodeState(None)), []
    for index, length in enumerate(LENGTHS):
        ids = tuple((7 * index + place) % 30 for place in range(length))
        sampled = tuple(place > 1 for place in range(length))
        sequence = TokenSequence(ids, sampled, tuple(-3.4 if flag else 0.0 for flag in sampled), 0, ())
        made.append(Sample(sequence, episode, index, 0))
    return made


def targets(batch):
    tokens = [torch.full((sample.num_sampled,), -3.4) for sample in batch]
    advantages = [torch.linspace(-1, 2, len(part)) for part in tokens]
    return Targets(advantages, tokens, tokens, [0 * part for part in tokens], advantages)


@cache
def config(micro):
    words = ["model_path=x", "es_manager.train.env_groups=64", "ppo_mini_batch_size=4"]
    return resolve([*words, f"micro_batch_size_per_gpu={micro}"], environ={}).config


def decoder(dtype=torch.float32):
    torch.manual_seed(1)
    return Decoder(Shape(30, 32, 48, 2, 4, 2, 8, 1e4, 1e-6, True, True)).to(dtype)


class Card:
    """Memory for `limit` sequences: passes with more fail, in the forward or in the backward pass."""

    def __init__(self, monkeypatch, limit, where="forward", skip=0):
        self.limit, self.where, self.num_failed, self.skip = limit, where, 0, skip
        original = Decoder.hidden

        def hidden(decoder, ids, positions, attend, rows=None):
            found = original(decoder, ids, positions, attend, rows)
            too_much = rows is not None and int((positions == 0).sum()) > self.limit
            if too_much and self.skip > 0:
                self.skip -= 1
            elif too_much and where == "forward":
                self.fail()
            elif too_much and found.requires_grad:
                # Some gradients of this pass are there already: those of the head and of the last layer.
                decoder.layers[0].down.weight.register_hook(self.fail_once())
            return found

        monkeypatch.setattr(Decoder, "hidden", hidden)

    def fail(self, *ignored):
        self.num_failed += 1
        raise ERROR

    def fail_once(self):
        def hook(gradient):
            if not failed:
                failed.append(True)
                self.fail()

        failed = []
        return hook


def update(who, model, micro, redo=None, offload=False):
    batch, limits = samples(), Limits(redo=redo or Redo())
    module = Critic(model) if who == "critic" else model
    optimizer = make_optimizer(module.parameters(), Optimizer(lr=1e-2), 10, offload)
    done = []
    if who == "actor":
        made = update_actor(
            module, optimizer, batch, targets(batch), config(micro), ALONE, None, 0, done.append, limits
        )
    elif who == "critic":
        made = update_critic(module, optimizer, batch, targets(batch), config(micro), ALONE, done.append, limits)
    else:
        made = imitate(module, optimizer, batch, micro, 1.0, ALONE, done.append, limits.redo)
    assert sum(done) == len(batch), "progress counts nothing twice"
    return module.state_dict(), made.metrics


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("who", ["actor", "critic", "sft"])
@pytest.mark.parametrize("skip", [0, 1])
def test_weights_are_those_of_a_run_with_the_smaller_micro_batches(monkeypatch, who, where, skip):
    """Bit for bit, also where micro-batches before the one that failed had added their gradients."""
    wanted, clean = update(who, decoder(), micro=1)
    with monkeypatch.context() as patch:
        card = Card(patch, limit=1, where=where, skip=skip)
        redo, notes = Redo(f"the {who}'s update"), []
        redo.note = notes.append
        got, metrics = update(who, decoder(), micro=2, redo=redo)
    assert card.num_failed == redo.count == len(notes) >= 1
    assert f"out of memory in the {who}'s update: redone with micro-batches of 1/2 of their size" in notes[0]
    who = {"sft": "train"}.get(who, who)
    assert metrics[f"{who}/redone_for_memory"] == redo.count and f"{who}/redone_for_memory" not in clean
    if skip == 0:
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        same = {name: value for name, value in metrics.items() if not name.endswith("redone_for_memory")}
        assert same == clean, "the failed attempt is in no metric"
    else:  # the first mini-batch was computed in the larger ones
        assert all(torch.allclose(got[name], wanted[name], atol=1e-5) for name in wanted)


@pytest.mark.parametrize("who", ["actor", "critic"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_mini_batch_is_redone_and_what_the_first_has_measured_stays(monkeypatch, who, where):
    _, clean = update(who, decoder(), micro=4)
    with monkeypatch.context() as patch:
        Card(patch, limit=2, where=where, skip=1)
        redo = Redo()
        _, metrics = update(who, decoder(), micro=4, redo=redo)
    assert redo.count == 1
    measured = [name for name in clean if name.startswith("rollout/")]
    assert bool(measured) == (who == "actor")
    assert all(metrics[name] == clean[name] for name in measured)


@pytest.mark.parametrize("offload", [False, True])
def test_bf16_masters_start_clean_too(monkeypatch, offload):
    wanted, _ = update("actor", decoder(torch.bfloat16), micro=1, offload=offload)
    with monkeypatch.context() as patch:
        Card(patch, limit=1, where="backward")
        got, _ = update("actor", decoder(torch.bfloat16), micro=4, offload=offload)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_it_halves_until_it_fits_and_stays_there(monkeypatch):
    card, redo = Card(monkeypatch, limit=1), Redo()
    update("actor", decoder(), micro=4, redo=redo)
    assert (card.num_failed, redo.divisor) == (2, 4)
    update("actor", decoder(), micro=4, redo=redo)
    assert card.num_failed == 2, "the next update starts with what fitted"


@pytest.mark.parametrize("who", ["actor", "critic", "sft"])
def test_one_sequence_that_does_not_fit_is_an_error(monkeypatch, who):
    Card(monkeypatch, limit=0)
    with pytest.raises(torch.OutOfMemoryError):
        update(who, decoder(), micro=4)


def test_the_plan_caps_micro_batches_and_enlarges_none():
    assert [Limits(num).capped(3600) for num in (None, 512, 9000)] == [3600, 512, 3600]


def test_other_errors_are_not_redone(monkeypatch):
    def broken(*given):
        raise RuntimeError("shapes")

    monkeypatch.setattr(Decoder, "hidden", broken)
    redo = Redo()
    with pytest.raises(RuntimeError, match="shapes"):
        update("actor", decoder(), micro=4, redo=redo)
    assert redo.count == 0


def test_scores_are_redone(monkeypatch):
    batch, model = samples(), decoder()
    wanted = Scorer(ALONE, 1.0, 1).log_probs(model, batch)
    Card(monkeypatch, limit=1)
    scorer = Scorer(ALONE, 1.0, 4)
    assert all(map(torch.equal, scorer.log_probs(model, batch), wanted)) and scorer.redo.count == 2
    Card(monkeypatch, limit=0)
    with pytest.raises(torch.OutOfMemoryError):
        scorer.log_probs(model, batch)


def test_main_memory_is_redone_too(monkeypatch):
    def attempt(batches):
        if len(batches) == 1:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            )
        return batches

    assert Redo()(lambda divisor: [[0], [1]] if divisor > 1 else [[0, 1]], attempt) == [[0], [1]]


# --- whole runs ---------------------------------------------------------------------------------------------------

WORDS = [*TINY, "trainer.total_training_steps=2", "algorithm.adv_estimator=gae", "ppo_mini_batch_size=3"]


def run(folder, *words):
    status = main(["train", *WORDS, "trainer.save_freq=2", *words, f"trainer.default_local_dir={folder}"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return status, rows, load_file(folder / "global_step_2/actor/model.safetensors") if status == 0 else {}


@pytest.mark.slow
def test_a_run_on_a_card_that_is_too_small_reports_and_learns_the_same(tmp_path, monkeypatch, capsys):
    _, _, wanted = run(tmp_path / "small", "micro_batch_size_per_gpu=1", "log_prob_micro_batch_size_per_gpu=1")
    capsys.readouterr()
    Card(monkeypatch, limit=1)
    status, rows, got = run(tmp_path / "run", "micro_batch_size_per_gpu=2", "log_prob_micro_batch_size_per_gpu=2")
    said = " ".join(capsys.readouterr())
    assert status == 0 and all(torch.equal(got[name], wanted[name]) for name in wanted)
    for who in ("the actor's update", "the critic's update", "a scoring pass"):
        assert len(re.findall(f"out of memory in {who}: redone with micro-batches of 1/2", said)) == 1
    names = ("actor/redone_for_memory", "critic/redone_for_memory", "perf/scores_redone_for_memory")
    assert [rows[0][name] for name in names] == [1, 1, 1]
    assert not any(name in rows[1] for name in names)


@pytest.mark.slow
def test_a_run_that_cannot_shrink_ends_with_the_advice(tmp_path, monkeypatch, capsys):
    Card(monkeypatch, limit=0, skip=3)
    assert main(["train", *WORDS, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err
    assert "out of memory on cpu" in said and "Keys to lower:" in said and "Traceback" not in said


@pytest.mark.slow
def test_offloaded_runs_and_their_checkpoints_are_bit_equal(tmp_path):
    """With the keys, without them, and resumed from each other's checkpoint."""
    keys = [f"{key}.fsdp_config.optimizer_offload=True" for key in ("actor_rollout_ref.actor", "critic.model")]
    _, plain, wanted = run(tmp_path / "plain")
    _, offloaded, got = run(tmp_path / "offloaded", *keys)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    for part in ("actor_optimizer", "critic_optimizer", "critic"):
        files = [
            sorted((tmp_path / run / "global_step_2" / part).rglob("*.safetensors")) for run in ("plain", "offloaded")
        ]
        assert files[0] and [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]
    same = [{name: value for name, value in row.items() if not name.startswith(("timing", "perf"))} for row in plain]
    assert same == [{name: row[name] for name in first} for first, row in zip(same, offloaded, strict=True)]
    for start, more in (("plain", keys), ("offloaded", [])):
        words = [*WORDS, *more, "trainer.save_freq=4", "trainer.total_training_steps=4"]
        assert main(["train", *words, f"trainer.default_local_dir={tmp_path / start}"]) == 0
    ends = [load_file(tmp_path / start / "global_step_4/actor/model.safetensors") for start in ("plain", "offloaded")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


WORKER = """
import sys, torch
sys.path[:0] = [{tests!r}, {support!r}]
from ragen.distributed.workers import Workers
from ragen.train import update as module
import test_redo as here
from ragen.model.redo import Redo
workers, model, batch = Workers.join(), here.decoder(), here.samples()
class Patch:
    setattr = staticmethod(setattr)
if workers.rank == 1 and {fails}:
    here.Card(Patch, limit=1)
optimizer = here.make_optimizer(model.parameters(), here.Optimizer(lr=1e-2), 10, False)
made = here.update_actor(model, optimizer, batch, here.targets(batch), here.config(2), workers)
torch.save((model.state_dict(), made.metrics), {out!r} + str(workers.rank))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_one_of_two_workers_redoes_its_share_and_the_other_waits(tmp_path):
    found = {}
    for fails in (True, False):
        folder = tmp_path / str(fails)
        folder.mkdir()
        code = WORKER.format(
            tests=str(Path(__file__).parent), support=str(Path(__file__).parents[1] / "support"), fails=fails,
            out=str(folder / "out"),
        )  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {SHARED: str(folder), "RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        found[fails] = [torch.load(folder / f"out{rank}") for rank in range(2)]
    weights = [state for state, _ in (*found[True], *found[False])]
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), "both workers hold the same weights"
        assert torch.allclose(weights[0][name], weights[2][name], atol=1e-6)
    assert [metrics.get("actor/redone_for_memory") for _, metrics in found[True]] == [1, 1]
