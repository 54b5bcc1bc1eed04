"""The updates: kept samples in, new weights out, for the actor and the critic alike.

    updated = update_actor(model, optimizer, samples, targets, config, workers)
    updated = update_critic(critic, optimizer, samples, targets, config, workers)

Samples are cut into mini-batches, each one optimizer step; a mini-batch is dealt out to the workers, and a worker cuts
its share into micro-batches for memory. The weight of each token is fixed for the mini-batch before that, so workers
and micro-batches only add up. A worker that runs out of memory drops the gradients of its share and redoes it with
smaller micro-batches, before the sum over workers.

An optimizer step whose loss or gradient is not finite is skipped and counted, and its samples are named, so that the
caller can store them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ragen.algo.kl import kl_of_tokens, needs_vocabulary
from ragen.algo.loss import (
    Term,
    add_sums,
    entropy_term,
    kl_sums,
    kl_term,
    policy_metrics,
    policy_sums,
    policy_terms,
    token_weights,
    value_sums,
    value_term,
    weighted_sum,
)
from ragen.config.schema import Config
from ragen.distributed.workers import ALONE, Workers
from ragen.model.activations import token_room
from ragen.model.attention import sent
from ragen.model.critic import Critic
from ragen.model.decoder import TrainableModel
from ragen.model.packing import PackedTokens, pack
from ragen.model.policy import Scored, score
from ragen.model.redo import Batches, Redo
from ragen.model.scoring import micro_batches
from ragen.prng import Coordinate, bits
from ragen.protocols import LanguageModel, TrainingSample
from ragen.train.optimizer import MasterAdamW

GAP, SAMPLER_KL = "rollout/log_prob_diff_mean", "rollout/sampler_learner_kl"
LOSS = "loss"  # the sum of all terms, for the check that it is finite
REDONE = "redone_for_memory"  # how often a mini-batch was, on all workers
TASK, ENTROPY, KL = "task", "entropy", "kl"  # the actor's terms


@dataclass(frozen=True)
class Targets:
    """What the updates aim at: for each sample a tensor with one number per sampled token."""

    advantages: Sequence[Tensor]
    old_log_probs: Sequence[Tensor]
    reference: Sequence[Tensor] | None = None  # log-probs of the reference model, for a KL loss
    values: Sequence[Tensor] | None = None  # what the critic expected, and what it should have
    returns: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Limits:
    """Of the micro-batches of a model's updates, in a run."""

    num_tokens: int | None = None  # by the memory plan; on CUDA only
    redo: Redo = field(default_factory=Redo)

    def capped(self, num_tokens: int) -> int:
        return num_tokens if self.num_tokens is None else min(num_tokens, self.num_tokens)


@dataclass(frozen=True)
class Updated:
    """What an update did."""

    metrics: dict[str, float]
    skipped: list[int] = field(default_factory=list)  # samples of skipped optimizer steps


def update_actor(
    model: TrainableModel,
    optimizer: MasterAdamW,
    samples: Sequence[TrainingSample],
    targets: Targets,
    config: Config,
    workers: Workers = ALONE,
    reference: LanguageModel | None = None,
    step: int = 0,
    on_samples: Callable[[int], None] = lambda count: None,
    limits: Limits | None = None,
) -> Updated:
    """`ppo_epochs` passes over the samples. `reference` is the model itself, for the KL type that needs all of it."""
    actor, limits = config.actor_rollout_ref.actor, limits or Limits()
    most = limits.capped(actor.ppo_micro_batch_size_per_gpu * longest(config))
    num_updates = optimizer.num_updates
    first_gaps: list[Tensor] = []

    def loss_of(indices: Sequence[int], packed: PackedTokens, weights_T: Tensor, means_T: Tensor):
        scored, terms, diagnostics = actor_terms(model, packed, indices, targets, config, reference)
        by_name = {term.name: term.per_token for term in terms}
        sums = policy_sums(by_name[TASK], diagnostics, scored.entropies, weights_T, means_T)
        gap_T = scored.log_probs.detach() - packed.log_probs
        sums |= {GAP: (means_T * gap_T.abs()).sum(), SAMPLER_KL: (means_T * (gap_T.expm1() - gap_T)).sum()}
        if optimizer.num_updates == num_updates:
            first_gaps.append(gap_T.abs())
        if ENTROPY in by_name:
            sums["actor/entropy_loss"] = (weights_T * scored.entropies.detach()).sum()
        if KL in by_name:
            sums |= kl_sums(by_name[KL], weights_T)
        return weighted_sum(terms, weights_T), sums

    def drop_gaps() -> None:
        if optimizer.num_updates == num_updates:  # those of the first mini-batch stay when a later one is redone
            first_gaps.clear()

    passes = Passes(
        samples, optimizer, workers, loss_of, on_samples,
        mini_size=actor.ppo_mini_batch_size,
        micro_size=actor.ppo_micro_batch_size_per_gpu,
        grad_clip=actor.grad_clip,
        finish=policy_metrics,
        epochs=actor.ppo_epochs,
        aggregation=actor.loss_agg_mode,
        norm_length=max_sampled(config),
        room=lambda: token_room(model, most, workers.device),
        order=("order", config.seed.train, step) if actor.shuffle else None,
        redo=limits.redo,
        on_redo=drop_gaps,
    )  # fmt: skip
    history, skipped = passes.run()
    # Before the first optimizer step sampler and learner are the same policy: what differs there is rounding.
    first = {name: history.pop(name)[0] for name in (GAP, SAMPLER_KL) if name in history}
    metrics = _summary(history, "actor", skipped) | first
    gaps = torch.cat(workers.gather([torch.cat([torch.zeros(0), *(part.cpu() for part in first_gaps)])])).sort().values
    metrics["rollout/log_prob_diff_p999"] = float(gaps[math.ceil(0.999 * len(gaps)) - 1])
    metrics["rollout/log_prob_diff_max"] = float(gaps[-1])
    if kl_coefficient := kl_loss_coefficient(config):
        metrics["actor/kl_coef"] = kl_coefficient
    return Updated(metrics | {"train/num_mini_batches": len(history["lr"])}, skipped)


def update_critic(
    critic: Critic,
    optimizer: MasterAdamW,
    samples: Sequence[TrainingSample],
    targets: Targets,
    config: Config,
    workers: Workers = ALONE,
    on_samples: Callable[[int], None] = lambda count: None,
    limits: Limits | None = None,
) -> Updated:
    """As many passes as the actor has. A value's loss is a mean over tokens, whatever the actor's aggregation is."""
    settings, limits = config.critic, limits or Limits()
    micro_size = settings.ppo_micro_batch_size_per_gpu
    most = limits.capped(micro_size * longest(config))

    def loss_of(indices: Sequence[int], packed: PackedTokens, weights_T: Tensor, means_T: Tensor):
        values_T = critic.values(packed)
        old_T, returns_T = (_tokens(part, indices, packed) for part in (targets.values, targets.returns))
        term, clipped_T = value_term(values_T, old_T, returns_T, settings.cliprange_value)
        return weighted_sum([term], weights_T), value_sums(term, clipped_T, values_T, weights_T, means_T)

    passes = Passes(
        samples, optimizer, workers, loss_of, on_samples,
        mini_size=settings.ppo_mini_batch_size,
        micro_size=micro_size,
        grad_clip=settings.grad_clip,
        epochs=config.actor_rollout_ref.actor.ppo_epochs,
        room=lambda: token_room(critic.backbone, most, workers.device),
        redo=limits.redo,
    )  # fmt: skip
    history, skipped = passes.run()
    return Updated(_summary(history, "critic", skipped), skipped)


def imitate(
    model: LanguageModel,
    optimizer: MasterAdamW,
    samples: Sequence[TrainingSample],
    micro_size: int,
    grad_clip: float,
    workers: Workers = ALONE,
    on_samples: Callable[[int], None] = lambda count: None,
    redo: Redo | None = None,
) -> Updated:
    """One optimizer step of cross-entropy on the sampled tokens, which all weigh the same: supervised fine-tuning."""

    def loss_of(indices: Sequence[int], packed: PackedTokens, weights_T: Tensor, means_T: Tensor):
        scored = score(model, packed, temperature=1.0)
        loss = weighted_sum([Term(TASK, 1.0, -scored.log_probs)], weights_T)
        return loss, {"train/loss": loss.detach(), "entropy": (means_T * scored.entropies.detach()).sum()}

    passes = Passes(
        samples, optimizer, workers, loss_of, on_samples, len(samples), micro_size, grad_clip, redo=redo or Redo()
    )
    history, skipped = passes.run()
    return Updated(_summary(history, "train", skipped), skipped)


def max_sampled(config: Config) -> int:
    """The most tokens that can be sampled in one sequence: those of all turns, or of one in a windowed context."""
    num_turns = config.agent_proxy.max_turn if config.agent_proxy.context_window_mode == "full" else 1
    return num_turns * config.actor_rollout_ref.rollout.response_length


def longest(config: Config) -> int:
    """The most tokens that a sequence can have."""
    return config.actor_rollout_ref.rollout.max_model_len


# --- the actor's loss ---------------------------------------------------------------------------------------------


class ActorTerms(NamedTuple):
    """The terms of the actor's loss on some samples, and what they were made of."""

    scored: Scored
    terms: list[Term]
    diagnostics: dict[str, Tensor]  # of the task term, see `policy_terms`


def actor_terms(
    model: LanguageModel,
    packed: PackedTokens,
    indices: Sequence[int],
    targets: Targets,
    config: Config,
    reference: LanguageModel | None = None,
) -> ActorTerms:
    """One forward pass, and the loss as named terms. Updates add them; gradient analysis differentiates each alone.

    `indices` say which of the targets' samples are packed.
    """
    actor, names = config.actor_rollout_ref.actor, term_names(config)
    whole = reference if KL in names and needs_vocabulary(actor.kl_loss_type) else None
    scored = score(model, packed, config.actor_rollout_ref.rollout.temperature, whole)
    task, diagnostics = task_term(scored.log_probs, packed, indices, targets, config)
    terms = [task]
    if ENTROPY in names:
        terms.append(entropy_term(scored.entropies, actor.entropy_coeff))
    if KL in names:
        reference_T = _tokens(targets.reference, indices, packed)
        kl_T = kl_of_tokens(actor.kl_loss_type, scored.log_probs, reference_T, scored.full_kl)
        terms.append(kl_term(kl_T, kl_loss_coefficient(config)))
    return ActorTerms(scored, terms, diagnostics)


def task_term(
    log_probs_T: Tensor, packed: PackedTokens, indices: Sequence[int], targets: Targets, config: Config
) -> tuple[Term, dict[str, Tensor]]:
    """The policy loss alone, from log-probs that are there already, and its diagnostics."""
    actor = config.actor_rollout_ref.actor
    losses_T, diagnostics = policy_terms(
        log_probs_T,
        _tokens(targets.old_log_probs, indices, packed),
        _tokens(targets.advantages, indices, packed),
        actor.clip_ratio_low,
        actor.clip_ratio_high,
        actor.clip_ratio_c,
    )
    return Term(TASK, 1.0, losses_T), diagnostics


def term_names(config: Config) -> list[str]:
    """The terms that the actor's loss has under a config, in their order."""
    entropy, kl = config.actor_rollout_ref.actor.entropy_coeff, kl_loss_coefficient(config)
    return [name for name, coefficient in ((TASK, 1.0), (ENTROPY, entropy), (KL, kl)) if coefficient]


def kl_loss_coefficient(config: Config) -> float:
    """0 where there is no KL term."""
    actor = config.actor_rollout_ref.actor
    return actor.kl_loss_coef if actor.use_kl_loss else 0.0


# --- passes over the samples --------------------------------------------------------------------------------------


# From samples (indices, their tokens, the tokens' weights in the loss and in plain means) to a loss, and to sums for
# the metrics.
LossOf = Callable[[Sequence[int], PackedTokens, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def _as_numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


@dataclass(frozen=True)
class Passes:
    """Optimizer steps over the samples."""

    samples: Sequence[TrainingSample]
    optimizer: MasterAdamW
    workers: Workers
    loss_of: LossOf
    on_samples: Callable[[int], None]
    mini_size: int
    micro_size: int
    grad_clip: float
    finish: Callable[[dict[str, Tensor]], dict[str, float]] = _as_numbers  # from sums to metrics
    epochs: int = 1
    aggregation: str = "token-mean"
    norm_length: int | None = None
    room: Callable[[], int | None] = lambda: None  # tokens of a micro-batch; None: count sequences
    order: tuple[Coordinate, ...] | None = None  # what a random order is drawn from; None leaves the samples in theirs
    redo: Redo = field(default_factory=Redo)  # where memory does not suffice
    on_redo: Callable[[], None] = lambda: None  # drops what `loss_of` has kept of the attempt that failed

    def run(self) -> tuple[dict[str, list[float]], list[int]]:
        """The metrics of the optimizer steps taken, and the samples of those skipped."""
        optimizer = self.optimizer
        history: dict[str, list[float]] = defaultdict(list)
        skipped: list[int] = []
        for epoch in range(self.epochs):
            order = list(range(len(self.samples)))
            if self.order is not None:
                draws = (*self.order, epoch)
                order.sort(key=lambda index: bits(*draws, index, num_bits=64))
            for start in range(0, len(order), self.mini_size):
                mini = order[start : start + self.mini_size]
                sums = self._gradients(mini)
                loss, norm, num_redone = float(sums.pop(LOSS)), optimizer.norm(), float(sums.pop(REDONE))
                if num_redone:
                    history[REDONE].append(num_redone)
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    optimizer.clear()
                    skipped += mini
                    history["lr"].append(optimizer.lr)
                    continue
                optimizer.step(self.grad_clip, norm)
                for name, value in (self.finish(sums) | {"lr": optimizer.lr, "grad_norm": norm}).items():
                    history[name].append(value)
        return history, skipped

    def _gradients(self, mini: Sequence[int]) -> dict[str, Tensor]:
        """The gradients of a mini-batch, summed over workers and left with the optimizer; returns the metrics' sums."""
        samples, workers = [self.samples[index] for index in mini], self.workers
        counts = torch.tensor([sample.num_sampled for sample in samples])
        weights = token_weights(counts, self.aggregation, norm_length=self.norm_length).split(counts.tolist())
        means = token_weights(counts, "token-mean").split(counts.tolist())
        lengths = [len(sample.sequence.ids) for sample in samples]
        mine = workers.mine(sorted(range(len(mini)), key=lengths.__getitem__))  # everyone has long and short ones
        num_done = 0

        def batches_of(divisor: int) -> Batches:
            self.optimizer.prepare()  # the room is what gradients leave
            room, max_samples = self.room(), max(1, self.micro_size // divisor)
            room = None if room is None else room // divisor
            return micro_batches([lengths[place] for place in mine], max_samples, workers.device, room)

        def compute(batches: Sequence[list[int]]) -> dict[str, Tensor]:
            nonlocal num_done
            sums: dict[str, Tensor] = {}
            for places in batches:
                micro = [mine[place] for place in places]
                packed = pack([samples[place].sequence for place in micro], workers.device)
                weights_T, means_T = (
                    sent(torch.cat([part[place] for place in micro]), workers.device) for part in (weights, means)
                )
                loss, parts = self.loss_of([mini[place] for place in micro], packed, weights_T, means_T)
                loss.backward()
                sums = add_sums(sums, parts | {LOSS: loss.detach()})
                self.on_samples(len(micro))
                num_done += len(micro)
            return sums

        def undo() -> None:
            nonlocal num_done
            self.optimizer.clear()
            self.on_redo()
            self.on_samples(-num_done)
            num_done = 0

        num_redone = self.redo.count
        sums = self.redo(batches_of, compute, undo)
        if sums:  # a worker without a sample adds nothing
            sums[REDONE] = torch.tensor(float(self.redo.count - num_redone))
        workers.add_up(self.optimizer.gradients())
        return reduce(add_sums, workers.gather([{name: value.cpu() for name, value in sums.items()}]))


def _tokens(of_samples: Sequence[Tensor] | None, indices: Sequence[int], packed: PackedTokens) -> Tensor:
    assert of_samples is not None
    tokens_T = torch.cat([of_samples[index] for index in indices])
    return sent(tokens_T.to(packed.log_probs.dtype), packed.log_probs.device)


def _summary(history: dict[str, list[float]], who: str, skipped: Sequence[int]) -> dict[str, float]:
    redone = {f"{who}/{REDONE}": sum(history.pop(REDONE))} if REDONE in history else {}
    means = {name if "/" in name else f"{who}/{name}": fmean(values) for name, values in history.items()}
    return means | {f"{who}/nonfinite_samples": float(len(skipped))} | redone
