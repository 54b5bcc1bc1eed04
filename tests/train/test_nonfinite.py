"""A loss or a gradient that is not finite: the optimizer step is skipped, counted and stored."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tiny import TINY
from without_clock import metrics_without_clock

from ragen.config.compose import resolve
from ragen.model.load import find_model, load_model
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder
from ragen.train import learner, trainer, update
from ragen.train.optimizer import MasterAdamW

WORDS = [*TINY, "trainer.total_training_steps=3", "algorithm.adv_estimator=gae"]
POISONED_STEP = 2


def config_of(folder, *words):
    return resolve([*WORDS, *words, f"trainer.default_local_dir={folder}"], environ={}).config


def snapshot(model, optimizer):
    """Weights, moments and counts, as bytes."""
    tensors = model.state_dict() | {f"optimizer/{name}": value for name, value in optimizer.tensors(model).items()}
    return {name: value.detach().clone().numpy().tobytes() for name, value in tensors.items()}


def with_poison(values, place, poison):
    """The same tensors, with one number of one sample spoilt."""
    spoilt = [part.clone() for part in values]
    spoilt[place][0] = poison
    return spoilt


def spoil_gradient(model):
    """The next gradient of one weight is infinite; the loss stays finite."""
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    return handle.remove


class Poison:
    """Spoils one update of a run, and keeps what was there before and after each."""

    def __init__(self, monkeypatch, who, poison):
        self.who, self.poison, self.step, self.pairs = who, poison, 0, []
        self.original = getattr(learner, f"update_{who}")
        monkeypatch.setattr(learner, f"update_{who}", self)

    def __call__(self, model, optimizer, samples, targets, *rest):
        self.step += 1
        before, undo = snapshot(model, optimizer), lambda: None
        if self.step == POISONED_STEP:
            if self.poison == "gradient":
                undo = spoil_gradient(model)
            else:
                field = {"actor": "advantages", "critic": "returns"}[self.who]
                targets = replace(targets, **{field: with_poison(getattr(targets, field), 4, self.poison)})
        updated = self.original(model, optimizer, samples, targets, *rest)
        undo()
        self.pairs.append((before, snapshot(model, optimizer)))
        return updated


@pytest.mark.parametrize(
    ("who", "poison"), [("actor", math.nan), ("actor", "gradient"), ("critic", math.inf), ("critic", "gradient")]
)
def test_a_run_leaves_the_step_out_and_goes_on(tmp_path, monkeypatch, capsys, who, poison):
    poisoned = Poison(monkeypatch, who, poison)
    folder = RunFolder(trainer.train(config_of(tmp_path / "run")).folder)
    changed = [before != after for before, after in poisoned.pairs]
    assert changed == [True, False, True]
    rows = folder.read_metrics().rows
    assert [row[f"{who}/nonfinite_samples"] for row in rows] == [0, 6, 0]
    other = {"actor": "critic", "critic": "actor"}[who]
    assert [row[f"{other}/nonfinite_samples"] for row in rows] == [0, 0, 0]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    (kept,) = folder.episode_files(f"nonfinite_{who}")
    played = {(one["seed"], one["member"]) for one in read_episodes(folder.episode_files("train")[1].path)}
    assert kept.step == POISONED_STEP
    assert {(one["seed"], one["member"]) for one in read_episodes(kept.path)} == played and len(played) == 6
    said = f"step 2: the {who}'s loss or gradient was not finite: the update is skipped, and its 6 episodes"
    assert capsys.readouterr().out.count(said) == 1


def test_a_spoilt_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    saving = ["trainer.save_freq=1"]
    with monkeypatch.context() as patch:
        Poison(patch, "actor", math.nan)
        unbroken = trainer.train(config_of(tmp_path / "unbroken", *saving)).folder
    with monkeypatch.context() as patch:
        Poison(patch, "actor", math.nan)
        broken = trainer.train(config_of(tmp_path / "broken", *saving, "trainer.total_training_steps=2")).folder
    assert trainer.train(config_of(broken, *saving)).folder == broken
    left, right = map(metrics_without_clock, (unbroken, broken))
    assert left == right and len(left) == 3
    for part in ("actor/model", "actor_optimizer/optimizer", "critic/model", "critic_optimizer/optimizer"):
        name = f"global_step_3/{part}.safetensors"
        assert (unbroken / name).read_bytes() == (broken / name).read_bytes()


# --- one of several mini-batches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Samples and targets of a real step."""
    taken = []

    def update_actor(model, optimizer, samples, targets, *rest):
        taken.append((samples, targets))
        return original(model, optimizer, samples, targets, *rest)

    with pytest.MonkeyPatch.context() as patch:
        original = learner.update_actor
        patch.setattr(learner, "update_actor", update_actor)
        folder = tmp_path_factory.mktemp("captured")
        trainer.train(config_of(folder, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"))
    return taken[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_the_other_mini_batches_are_taken(captured, place, poison):
    """Bit for bit what an update with them alone does."""
    samples, targets = captured
    config = config_of("unused", "ppo_mini_batch_size=3", "algorithm.adv_estimator=grpo")
    model = load_model(find_model("pocket"), "cpu").model
    models = [model, copy.deepcopy(model)]
    optimizers = [MasterAdamW(one.parameters(), config.actor_rollout_ref.actor.optim, 10) for one in models]
    spoilt = replace(targets, advantages=with_poison(targets.advantages, place, poison))
    whole = update.update_actor(models[0], optimizers[0], samples, spoilt, config)
    healthy = slice(3, 6) if place < 3 else slice(0, 3)
    rest = replace(targets, **{name: getattr(targets, name)[healthy] for name in ("advantages", "old_log_probs")})
    alone = update.update_actor(models[1], optimizers[1], samples[healthy], rest, config)
    assert snapshot(models[0], optimizers[0]) == snapshot(models[1], optimizers[1])
    assert whole.skipped == ([0, 1, 2] if place < 3 else [3, 4, 5]) and alone.skipped == []
    assert whole.metrics["actor/nonfinite_samples"] == 3
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert whole.metrics[name] == alone.metrics[name]


def test_nothing_is_left_of_a_spoilt_gradient(captured):
    """The next update starts from none."""
    samples, targets = captured
    config = config_of("unused", "algorithm.adv_estimator=grpo")
    model = load_model(find_model("pocket"), "cpu").model
    optimizer = MasterAdamW(model.parameters(), config.actor_rollout_ref.actor.optim, 10)
    before = snapshot(model, optimizer)
    spoilt = replace(targets, advantages=with_poison(targets.advantages, 1, math.nan))
    updated = update.update_actor(model, optimizer, samples, spoilt, config)
    assert snapshot(model, optimizer) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert updated.metrics.keys() >= {"actor/lr", "actor/nonfinite_samples"} and "actor/pg_loss" not in updated.metrics
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
