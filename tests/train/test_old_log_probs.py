"""`old_log_probs`: whose log-probs the update starts from. In float32 sampler and learner agree to rounding."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_reference import watched
from tiny import ACTOR, ROLLOUT, TINY

from ragen.config.compose import resolve
from ragen.config.identity_keys import different_keys
from ragen.errors import ConfigError
from ragen.store.run_folder import RunFolder
from ragen.train import learner, trainer

__all__ = ["watched"]  # a fixture
KEY = f"{ACTOR}.old_log_probs"
# All that touches old log-probs at once: temperature, filter, epochs, critic, KL in the loss and in the reward.
WORDS = [
    *TINY,
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "collapse_detection.compute_freq=0",
    "es_manager.train.env_groups=3",
    "seed.train=77",
    "ppo_mini_batch_size=4",
    "algorithm.adv_estimator=gae",
    f"{ROLLOUT}.temperature=0.7",
    f"{ROLLOUT}.top_p=0.9",
    f"{ROLLOUT}.rollout_filter_strategy=top_k_abs",
    f"{ROLLOUT}.rollout_filter_value=2",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.1",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.kl_coef=0.01",
]


def played(folder, monkeypatch, *words):
    """The metrics of a run, and the old log-probs that its updates got, of all tokens of each step."""
    given = []

    def spied(model, optimizer, samples, targets, *more):
        given.append(torch.cat(list(targets.old_log_probs)))
        return update(model, optimizer, samples, targets, *more)

    update = learner.update_actor
    with monkeypatch.context() as patch:
        patch.setattr(learner, "update_actor", spied)
        config = resolve([*WORDS, *words, f"trainer.default_local_dir={folder}"], environ={}).config
        rows = RunFolder(trainer.train(config).folder).read_metrics().rows
    clocks = ("timing_s/", "perf/")
    return [{key: value for key, value in row.items() if not key.startswith(clocks)} for row in rows], given


def test_sampler_and_learner_give_the_same_and_the_samplers_cost_no_pass(tmp_path, monkeypatch, watched):
    runs, passes = {}, {}
    for whose in ("auto", "sampler", "learner"):
        watched.clear()
        runs[whose] = played(tmp_path / whose, monkeypatch, f"{KEY}={whose}")
        passes[whose] = watched[0][0].num_passes
    assert runs["auto"][0] == runs["sampler"][0], "in float32 `auto` is the sampler's"
    assert passes["auto"] == passes["sampler"] < passes["learner"]
    ours, theirs = runs["sampler"], runs["learner"]
    assert len(ours[1]) == len(theirs[1]) == 2
    difference = (ours[1][0] - theirs[1][0]).abs()
    assert 0 < difference.max() < 1e-4, "of the same tokens at the same temperature, computed by another pass"
    for name in ("actor/pg_loss", "critic/advantages/mean", "actor/kl_loss", "actor/reward_kl_penalty"):
        left, right = (rows[0][name] for rows in (ours[0], theirs[0]))
        assert math.isclose(left, right, rel_tol=1e-3, abs_tol=1e-4), name


def test_the_gap_is_a_metric_whosever_they_are(tmp_path, monkeypatch):
    rows, _ = played(tmp_path, monkeypatch, f"{KEY}=sampler", "trainer.total_training_steps=1")
    gaps = [rows[0][f"rollout/log_prob_diff_{kind}"] for kind in ("mean", "p999", "max")]
    assert 0 < gaps[0] <= gaps[1] <= gaps[2] < 1e-4


@pytest.mark.parametrize(("whose", "expected"), [("auto", "learner"), ("sampler", "sampler"), ("learner", "learner")])
def test_in_bfloat16_auto_is_the_learners(whose, expected):
    scorer = SimpleNamespace(log_probs=lambda model, samples: [torch.tensor([-2.0])])
    config = resolve([*WORDS, f"{KEY}={whose}"], environ={}).config
    one = SimpleNamespace(config=config, model=torch.nn.Linear(1, 1, dtype=torch.bfloat16), scorer=scorer)
    found = learner.Learner._old_log_probs(one, [SimpleNamespace(log_probs=[-1.0])])
    assert found == [torch.tensor([{"sampler": -1.0, "learner": -2.0}[expected]])]


def test_another_value_is_refused():
    with pytest.raises(ConfigError, match="old_log_probs"):
        resolve([*WORDS, f"{KEY}=rollout"], environ={})


def test_another_value_is_another_run():
    """It changes what a run computes, so a run does not resume with another value."""
    one, other = (resolve([*WORDS, f"{KEY}={value}"], environ={}).config for value in ("sampler", "learner"))
    assert different_keys(one, other) == [KEY]
