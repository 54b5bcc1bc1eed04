"""A run obeys its memory plan: slots, micro-batches, offloaded optimizers; and is refused before a folder is made."""

from dataclasses import replace

import pytest
import torch
from tiny import TINY

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.engine.native.engine import NativeEngine
from ragen.model.activations import CONTEXT
from ragen.model.load import Source
from ragen.run.memory_plan import ACTOR, CRITIC, plan
from ragen.run.model_shape import POCKET
from ragen.train import learner, trainer
from ragen.train.offload import OffloadedAdamW
from ragen.train.optimizer import MasterAdamW

WORDS = [*TINY, "algorithm.adv_estimator=gae", "trainer.total_training_steps=1"]
GB = 10**9


@pytest.mark.parametrize("keeps_slots", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_follows_its_plan(tmp_path, monkeypatch, capsys, keeps_slots):
    def planned(config, sources, device):
        made = plan(POCKET, config, 8 * GB)
        return replace(made, keeps_slots=keeps_slots, offloaded=(CRITIC,), num_slots=5, num_tokens=4242)

    seen, events = [], []
    original, release, update = trainer.Trainer.__init__, NativeEngine.release, learner.update_actor
    monkeypatch.setattr(trainer, "plan_memory", planned)
    monkeypatch.setattr(trainer.Trainer, "__init__", lambda self, *given: original(self, *given) or seen.append(self))
    monkeypatch.setattr(NativeEngine, "release", lambda self: events.append("released") or release(self))
    monkeypatch.setattr(learner, "update_actor", lambda *given: events.append("updated") or update(*given))
    assert main(["train", *WORDS, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 0
    assert events == (["updated"] if keeps_slots else ["released", "updated"])
    (job,) = seen
    assert job.rollouts.engine.max_rows == 5 and job.learner.actor_limits.num_tokens == 4242
    assert type(job.learner.actor_optimizer) is MasterAdamW
    assert type(job.learner.critic_optimizer) is OffloadedAdamW
    said = " ".join(capsys.readouterr())
    assert "memory: " in said and "the critic's masters and Adam" in said


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def card(monkeypatch):
    """A GPU with these bytes, of which other processes hold some, and a cap on this process's share."""

    def make(total, others=0, fraction=1.0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - others - CONTEXT // 2, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
        monkeypatch.setattr(learner, "ram_bytes", lambda: (500 * GB, 500 * GB))

    return make


def sized(*words, model="random:Qwen2.5-3B"):
    config = resolve([f"model_path={model}", *words], "_2_sokoban", environ={}).config
    return config, learner.find_models(config)


def test_the_plan_of_the_card_that_is_here(card):
    config, sources = sized("algorithm.adv_estimator=gae")
    cuda = torch.device("cuda", 0)
    card(141 * GB)
    assert learner.plan_memory(config, sources, cuda).offloaded == ()
    card(141 * GB, fraction=80 / 141)
    capped = learner.plan_memory(config, sources, cuda)
    assert capped.offloaded == (CRITIC,) and round(capped.capacity / GB) == 80 and capped.fits
    card(141 * GB, others=101 * GB)
    assert learner.plan_memory(config, sources, cuda).offloaded == (CRITIC, ACTOR)
    assert learner.plan_memory(config, sources, torch.device("cpu")) is None


def test_a_model_of_an_unknown_shape_has_no_plan(card, tmp_path):
    card(80 * GB)
    config, _ = sized("algorithm.adv_estimator=grpo")
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    assert learner.plan_memory(config, {"actor": Source("x", tmp_path)}, torch.device("cuda")) is None


def test_what_cannot_fit_is_refused_before_anything_is_loaded_or_claimed(card, tmp_path, monkeypatch, capsys):
    card(24 * GB)
    on_gpu, cuda = learner.plan_memory, torch.device("cuda")
    monkeypatch.setattr(trainer, "plan_memory", lambda config, sources, device: on_gpu(config, sources, cuda))
    monkeypatch.setattr(learner, "load_model", lambda *given: pytest.fail("loaded"))
    folder = tmp_path / "run"
    words = ["model_path=random:Qwen2.5-7B", "algorithm.adv_estimator=gae", f"trainer.default_local_dir={folder}"]
    assert main(["train", "--config-name=_2_sokoban", *words]) == 2
    said = capsys.readouterr().err
    assert "random:Qwen2.5-7B needs" in said and "this one has 24 GB" in said and "nearest setting that fits" in said
    assert not folder.exists()
