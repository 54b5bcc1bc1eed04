"""The reference model: there only for a KL term that counts, frozen, and compared token by token or over all words."""

import copy

import pytest
import torch
from tiny import ACTOR, ROLLOUT, TINY
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.config.compose import resolve
from ragen.config.schema import KL_TYPES, Optimizer
from ragen.model import policy
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.packing import Sample, pack
from ragen.store.run_folder import RunFolder
from ragen.train import learner, trainer
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import Targets, update_actor
from ragen.types import Episode, EpisodeState, TokenSequence

WORDS = [*TINY, "trainer.total_training_steps=2", "collapse_detection.compute_freq=0"]
LOSS, COEFFICIENT = f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef"
REWARD, IN_REWARD = "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef"


def config_of(folder, *words):
    return resolve([*WORDS, *words, f"trainer.default_local_dir={folder}"], environ={}).config


@pytest.fixture
def watched(monkeypatch):
    """Which models were loaded, and how often each computed hidden states for the learner."""
    loaded = []

    def load_model(*given):
        result = original(*given)
        result.model.num_passes = 0
        hidden = result.model.hidden

        def counted(ids, positions, attend, rows=None):
            result.model.num_passes += rows is not None  # the sampler's passes have none
            return hidden(ids, positions, attend, rows)

        result.model.hidden = counted
        loaded.append((result.model, {name: weight.clone() for name, weight in result.model.state_dict().items()}))
        return result

    original = learner.load_model
    monkeypatch.setattr(learner, "load_model", load_model)
    return loaded


@pytest.mark.parametrize(
    "words",
    [
        [],
        [LOSS, f"{COEFFICIENT}=0"],
        [LOSS, f"{COEFFICIENT}=0.0"],
        [LOSS, f"{COEFFICIENT}=0e-3"],
        [LOSS, "optimization.kl_coef=0"],
        ["training.use_kl_loss=True", "optimization.kl_coef=0.0"],
        ["training.use_kl_loss=False", "optimization.kl_coef=0"],
        [f"{ACTOR}.use_kl_loss=False", f"{COEFFICIENT}=0.5"],
        [REWARD, f"{IN_REWARD}=0"],
        [REWARD, f"{IN_REWARD}=0.0", LOSS, f"{COEFFICIENT}=0"],
        [f"{IN_REWARD}=0.5"],
    ],
    ids=" ".join,
)
def test_without_a_coefficient_there_is_none(tmp_path, watched, words):
    folder = RunFolder(trainer.train(config_of(tmp_path, *words, "trainer.total_training_steps=1")).folder)
    ((actor, _),) = watched
    assert actor.num_passes == 1  # the update's own: one mini-batch, nothing else was computed
    (row,) = folder.read_metrics().rows
    assert not {"rollout/ref_log_prob", "timing_s/ref", "actor/kl_loss", "actor/reward_kl_penalty"} & row.keys()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([LOSS, f"{COEFFICIENT}=0.1", f"{ACTOR}.kl_loss_type=low_var_kl"], "actor/kl_loss"),
        ([LOSS, f"{COEFFICIENT}=0.1", f"{ACTOR}.kl_loss_type=full"], "actor/kl_loss"),
        ([REWARD, f"{IN_REWARD}=0.1", "algorithm.kl_penalty=low_var_kl"], "actor/reward_kl_penalty"),
    ],
)
def test_with_one_it_is_frozen_and_first_of_all_the_policy_itself(tmp_path, watched, words, name):
    folder = RunFolder(trainer.train(config_of(tmp_path, *words)).folder)
    (actor, begun), (reference, initial) = watched
    assert reference.num_passes > 0
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(
        weight.equal(initial[key]) and weight.equal(begun[key]) for key, weight in reference.state_dict().items()
    )
    assert any(not weight.equal(begun[key]) for key, weight in actor.state_dict().items())
    first, second = (row[name] for row in folder.read_metrics().rows)
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-6


# --- every type of KL, against a plain computation ----------------------------------------------------------------

VOCAB, TEMPERATURE = 30, 0.8


@pytest.fixture(scope="module")
def models():
    """A policy and its reference, as modules of ours and as those of transformers."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = [Qwen2ForCausalLM(config).eval() for _ in range(2)]
    ours = [Decoder(Shape.of(config)) for _ in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        from_huggingface(mine, {name: 3 * weight for name, weight in their.state_dict().items()})
        their.load_state_dict({name: 3 * weight for name, weight in their.state_dict().items()})
    return ours, theirs


def sequence(seed):
    """Given, sampled, given and sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 7, (4,), generator=generator).tolist()
    sampled = [flag for count, flag in zip(counts, [False, True] * 2, strict=True) for _ in range(count)]
    ids = torch.randint(0, VOCAB, (len(sampled),), generator=generator).tolist()
    return TokenSequence(tuple(ids), tuple(sampled), tuple(-3.0 if flag else 0.0 for flag in sampled), 0, ())


@pytest.fixture(scope="module")
def batch():
    episode = Episode("T", 0, "train", 0, 0, "", (), EpisodeState(None))
    return [Sample(sequence(seed), episode, seed, 0) for seed in range(5)]


def plain_kl(kind, here, there, token):
    """Of one token; `here` and `there` are log-probs over the vocabulary."""
    difference = here[token] - there[token]
    square = difference**2 / 2
    value = {
        "kl": lambda: difference,
        "k1": lambda: difference,
        "abs": lambda: abs(difference),
        "mse": lambda: square,
        "k2": lambda: square,
        "low_var_kl": lambda: (torch.exp(-difference) + difference - 1).clamp(max=10),
        "full": lambda: sum(here[word].exp() * (here[word] - there[word]) for word in range(VOCAB)),
    }[{"k3": "low_var_kl", "low-var-kl": "low_var_kl"}.get(kind.rstrip("+"), kind.rstrip("+"))]()
    return value.detach() + square - square.detach() if kind.endswith("+") else value


def plain_loss(kind, policy, reference, batch):
    """The mean over all sampled tokens, one sequence at a time, in float64."""
    found = []
    for sample in batch:
        ids = torch.tensor(sample.sequence.ids)
        here, there = (
            torch.log_softmax(model(ids[None]).logits[0].double() / TEMPERATURE, -1) for model in (policy, reference)
        )
        places = [place for place, sampled in enumerate(sample.sequence.sampled) if sampled]
        found += [plain_kl(kind, here[place - 1], there[place - 1].detach(), ids[place]) for place in places]
    return torch.stack(found).mean()


def scored(model, batch):
    with torch.no_grad():
        return [policy.score(model, pack([sample.sequence], "cpu"), TEMPERATURE).log_probs for sample in batch]


@pytest.mark.parametrize("kind", KL_TYPES)
def test_a_step_with_every_type(models, batch, kind, tmp_path):
    """The KL alone, so that value and gradient are its own."""
    (ours, our_reference), (theirs, their_reference) = models
    words = [LOSS, f"{COEFFICIENT}=0.5", f"{ACTOR}.kl_loss_type={kind}", "micro_batch_size_per_gpu=2"]
    words += [f"{ROLLOUT}.temperature={TEMPERATURE}", f"{ACTOR}.entropy_coeff=0"]
    settings = config_of(tmp_path, *words, "ppo_mini_batch_size=5")
    model, gradients = copy.deepcopy(ours), {}

    class Spy(MasterAdamW):
        def step(self, max_norm, norm=None):
            gradients.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
            return super().step(max_norm, norm)

    targets = Targets(
        advantages=[torch.zeros(sample.num_sampled) for sample in batch],
        old_log_probs=scored(ours, batch),
        reference=scored(our_reference, batch),
    )
    optimizer = Spy(model.parameters(), Optimizer(lr=1e-3), 10)
    updated = update_actor(model, optimizer, batch, targets, settings, reference=our_reference)
    theirs.zero_grad()
    loss = plain_loss(kind, theirs, their_reference, batch)
    (0.5 * loss).backward()
    assert updated.metrics["actor/kl_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert updated.metrics["actor/kl_coef"] == 0.5 and updated.skipped == []
    wanted = Decoder(model.shape)
    from_huggingface(wanted, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted.state_dict()[name], atol=1e-5), name
    assert any(
        not torch.equal(before, after) for before, after in zip(ours.parameters(), model.parameters(), strict=True)
    )


def test_over_the_vocabulary_in_chunks(models, batch, monkeypatch):
    (ours, reference), _ = models
    packed = pack([sample.sequence for sample in batch], "cpu")
    whole = policy.score(ours, packed, TEMPERATURE, reference)
    monkeypatch.setattr(policy, "MAX_CHUNK_LOGITS", 3 * VOCAB)
    chunked = policy.score(ours, packed, TEMPERATURE, reference)
    assert torch.allclose(whole.full_kl, chunked.full_kl, atol=1e-6) and bool((whole.full_kl > 0).all())
    chunked.full_kl.sum().backward()
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert all(parameter.grad is not None for parameter in ours.parameters())
    ours.zero_grad()
