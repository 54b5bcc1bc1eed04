"""The update against a plain computation with transformers and torch.optim."""

import copy
from functools import partial

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.config.compose import resolve
from ragen.config.model_name import QWEN
from ragen.config.schema import Optimizer
from ragen.model.decoder import Decoder, Shape, from_huggingface, to_huggingface
from ragen.model.packing import Sample, pack
from ragen.model.policy import score
from ragen.model.scoring import micro_batches
from ragen.model.vocabulary import token_scores
from ragen.train.optimizer import MasterAdamW, schedule
from ragen.train.update import Targets, update_actor
from ragen.types import Episode, EpisodeState, TokenSequence

VOCAB = 30
MODE = "actor_rollout_ref.actor.loss_agg_mode"


@pytest.fixture
def models():
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = Qwen2ForCausalLM(config).eval()
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


def sequence(seed: int) -> TokenSequence:
    """Given and sampled stretches of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    ids, sampled = [], []
    for _ in range(number(1, 4)):
        for flag, count in ((False, number(1, 6)), (True, number(1, 7))):
            ids += [number(0, VOCAB) for _ in range(count)]
            sampled += [flag] * count
    log_probs = [-3.4 + 0.1 * number(-3, 4) if flag else 0.0 for flag in sampled]
    return TokenSequence(tuple(ids), tuple(sampled), tuple(log_probs), 0, ())


def samples(num: int) -> list[Sample]:
    episode = Episode("T", 0, "train", 0, 0, "", (), EpisodeState(None))
    return [Sample(sequence(index), episode, index, 0) for index in range(num)]


def config(**changes):
    words = [f"{key}={value}" for key, value in changes.items()]
    return resolve([*words, f"model_path={QWEN}", "es_manager.train.env_groups=64"], environ={}).config


def naive_loss(model, batch, advantages, temperature, low, high, dual, entropy_coeff):
    """Token by token, one sequence at a time, in float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in batch:
        ids = torch.tensor(sample.sequence.ids)
        logits = model(ids[None]).logits[0].double() / temperature
        for place, flag in enumerate(sample.sequence.sampled):
            if not flag:
                continue
            distribution = torch.distributions.Categorical(logits=logits[place - 1])
            ratio = (distribution.log_prob(ids[place]) - sample.sequence.log_probs[place]).exp()
            advantage = advantages[sample.episode_index]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
            if advantage < 0:
                loss = torch.minimum(loss, torch.tensor(-advantage * dual, dtype=torch.float64))
            total = total + loss - entropy_coeff * distribution.entropy()
            count += 1
    return total / count


def on_tokens(batch, advantages_E):
    """An advantage for each sampled token of each sample: that of its episode."""
    return [torch.full((sample.num_sampled,), advantages_E[sample.episode_index]) for sample in batch]


def gradients_of(model, batch, advantages, settings):
    taken = {}

    class Spy(MasterAdamW):
        def step(self, max_norm, norm=None):
            taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return super().step(max_norm, norm)

    if not torch.is_tensor(advantages[0]):
        advantages = on_tokens(batch, advantages)
    optimizer = Spy(model.parameters(), Optimizer(), 10)
    return taken, update_actor(model, optimizer, batch, targets_of(batch, advantages), settings).metrics


def targets_of(batch, advantages):
    return Targets(advantages, [torch.tensor(sample.log_probs) for sample in batch])


def test_loss_and_gradient_equal_the_naive_computation(models):
    ours, theirs = models
    batch = samples(6)
    advantages = [1.5, -0.7, 0.0, 2.2, -3.0, 0.4]
    changed = {"actor_rollout_ref.actor.entropy_coeff": 0.01, "actor_rollout_ref.rollout.temperature": 0.8}
    settings = config(ppo_mini_batch_size=6, micro_batch_size_per_gpu=2, **changed)
    loss = naive_loss(theirs, batch, advantages, 0.8, 0.2, 0.28, 3.0, 0.01)
    loss.backward()
    wanted = Decoder(ours.shape)
    from_huggingface(wanted, {name: p.grad for name, p in theirs.named_parameters()})
    got, metrics = gradients_of(ours, batch, advantages, settings)
    for name, gradient in got.items():
        assert torch.allclose(gradient, wanted.state_dict()[name], atol=1e-6), name
    assert metrics["actor/pg_loss"] - 0.01 * metrics["actor/entropy"] == pytest.approx(loss.item(), abs=1e-6)


def test_each_token_has_its_own_advantage(models):
    """Before the first step a gradient is linear in the advantages: those of even and of odd tokens add up."""
    ours, _ = models
    batch, settings = samples(3), config(ppo_mini_batch_size=3, **{"actor_rollout_ref.actor.entropy_coeff": 0.0})
    whole = on_tokens(batch, [1.0, 2.0, 0.5])
    evens = [vector * (torch.arange(len(vector)) % 2 == 0) for vector in whole]
    odds = [vector - even for vector, even in zip(whole, evens, strict=True)]
    all_, even, odd = (gradients_of(copy.deepcopy(ours), batch, part, settings)[0] for part in (whole, evens, odds))
    for name in all_:
        assert torch.allclose(even[name] + odd[name], all_[name], atol=1e-6), name
        assert not torch.allclose(even[name], all_[name], atol=1e-6), name


@pytest.mark.parametrize(("window", "length"), [("full", 5 * 7), ("single_turn", 7), ("limited_multi_turn", 7)])
def test_the_length_of_the_norm_is_what_the_config_allows(models, window, length):
    ours, _ = models
    words = {
        "ppo_mini_batch_size": 4,
        "agent_proxy.max_turn": 5,
        "agent_proxy.context_window_mode": window,
        "actor_rollout_ref.rollout.response_length": 7,
    }
    losses = [
        gradients_of(copy.deepcopy(ours), samples(4), [1.0, -1.0, 0.5, 2.0], config(**words, **{MODE: mode}))[1]
        for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    ]
    assert losses[1]["actor/pg_loss"] == pytest.approx(losses[0]["actor/pg_loss"] / length, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 5, 7])
def test_gradient_does_not_depend_on_the_micro_batch(models, micro):
    ours, _ = models
    batch, advantages = samples(7), [1.0, -1.0, 0.5, 0.3, -2.0, 1.1, 0.2]
    whole, _ = gradients_of(
        copy.deepcopy(ours), batch, advantages, config(ppo_mini_batch_size=7, micro_batch_size_per_gpu=7)
    )
    parts, _ = gradients_of(
        copy.deepcopy(ours), batch, advantages, config(ppo_mini_batch_size=7, micro_batch_size_per_gpu=micro)
    )
    assert all(torch.allclose(whole[name], parts[name], atol=1e-6) for name in whole)


def test_gradient_does_not_depend_on_the_order(models):
    ours, _ = models
    batch, advantages = samples(7), [1.0, -1.0, 0.5, 0.3, -2.0, 1.1, 0.2]
    settings = config(ppo_mini_batch_size=7, micro_batch_size_per_gpu=3)
    straight, _ = gradients_of(copy.deepcopy(ours), batch, advantages, settings)
    reverse, _ = gradients_of(copy.deepcopy(ours), batch[::-1], advantages, settings)
    assert all(torch.allclose(straight[name], reverse[name], atol=1e-6) for name in straight)


def test_the_last_mini_batch_is_smaller_and_none_is_dropped(models):
    ours, _ = models
    _, metrics = gradients_of(ours, samples(7), [1.0] * 7, config(ppo_mini_batch_size=3))
    assert metrics["train/num_mini_batches"] == 3


def test_a_step_equals_torch_adamw_on_the_same_gradient(models):
    ours, theirs = models
    batch, advantages = samples(4), [1.0, -1.0, 0.5, -0.5]
    naive_loss(theirs, batch, advantages, 1.0, 0.2, 0.28, 3.0, 0.001).backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01).step()
    settings = config(ppo_mini_batch_size=4)
    optimizer = MasterAdamW(ours.parameters(), Optimizer(lr=1e-3), 10)
    metrics = update_actor(ours, optimizer, batch, targets_of(batch, on_tokens(batch, advantages)), settings).metrics
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    after = to_huggingface(ours)
    for name, parameter in theirs.named_parameters():
        assert torch.allclose(after[name], parameter, atol=2e-6), name


def test_bf16_weights_have_float32_masters():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], Optimizer(lr=1e-4, weight_decay=0.0), 1000)
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1.0)
    assert optimizer.masters[0].dtype == torch.float32
    assert optimizer.masters[0][0].item() == pytest.approx(1 - 60e-4, abs=1e-5)
    assert weight[0].item() < 1  # each step alone is below what bf16 can show next to 1


def test_gradients_of_micro_batches_are_added_in_float32_at_once():
    """In bf16, 1 + 1/512 is 1. No gradient of the module is left behind."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], Optimizer(), 10)
    for scale in (1.0, 1 / 512, 1 / 512):
        (scale * weight).sum().backward()
        assert weight.grad is None
    assert optimizer.gradients()[0].tolist() == [1 + 1 / 256] * 3
    assert optimizer.norm() == pytest.approx(3**0.5 * (1 + 1 / 256))


def test_the_norm_is_computed_once(models, monkeypatch):
    ours, _ = models
    calls, batch = [], samples(3)
    counted = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *given: calls.append(1) or counted(*given))
    taken, _ = gradients_of(ours, batch, [1.0, -1.0, 0.5], config(ppo_mini_batch_size=3))
    assert taken and len(calls) == 1


def test_micro_batches_with_room_count_tokens():
    lengths, cuda = [30, 10, 20, 60, 10], torch.device("cuda")
    assert micro_batches(lengths, 2, cuda) == [[1, 4], [2, 0], [3]]
    assert micro_batches(lengths, 1, cuda, room=70) == [[1, 4, 2, 0], [3]]
    assert micro_batches(lengths, 1, cuda, room=5) == [[1], [4], [2], [0], [3]]  # one that is too long is alone


@pytest.mark.parametrize("chunk_logits", [2 * VOCAB, 1000 * VOCAB])
def test_the_head_without_logits_scores_and_learns_alike(models, monkeypatch, chunk_logits):
    """What runs on CUDA, here with plain passes. Embeddings are tied, so their gradient has two parts."""
    ours, _ = models
    packed = pack([sample.sequence for sample in samples(5)], "cpu")
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr("ragen.model.policy.has_kernels", lambda x, answer=has_kernels: answer)
        monkeypatch.setattr("ragen.model.policy.token_scores", partial(token_scores, chunk_logits=chunk_logits))
        scored = score(ours, packed, 0.9)
        loss = scored.log_probs.sum() + 0.1 * scored.entropies.sum()
        found.append((*scored[:2], *torch.autograd.grad(loss, [*ours.parameters()])))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


def test_schedules():
    def factors(**settings):
        return [schedule(Optimizer(**settings), step, 10) for step in range(11)]

    assert factors() == [1.0] * 11
    assert factors(lr_warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(lr_warmup_steps_ratio=0.2)[:3] == [0.5, 1.0, 1.0]
    assert factors(lr_scheduler_type="linear")[::5] == [1.0, 0.5, 0.0]
    assert factors(lr_scheduler_type="cosine", min_lr_ratio=0.1)[::5] == pytest.approx([1.0, 0.55, 0.1])


def test_chunked_scores_equal_whole_ones(models, monkeypatch):
    ours, _ = models
    packed = pack([sample.sequence for sample in samples(5)], "cpu")
    whole = score(ours, packed, 0.9)
    monkeypatch.setattr("ragen.model.policy.MAX_CHUNK_LOGITS", 3 * VOCAB)
    chunked = score(ours, packed, 0.9)
    assert torch.allclose(whole[0], chunked[0], atol=1e-6) and torch.allclose(whole[1], chunked[1], atol=1e-6)
    chunked[0].sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
