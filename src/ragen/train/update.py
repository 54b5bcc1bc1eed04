"""The update: kept episodes in, new weights out.

    metrics = update_actor(model, optimizer, samples, advantages_E, config)

Samples are cut into mini-batches, each one optimizer step; a mini-batch is cut into micro-batches for memory. The
weight of each token is fixed for the mini-batch before that, so micro-batches only add up.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ragen.algo.loss import (
    Term,
    add_sums,
    entropy_term,
    policy_metrics,
    policy_sums,
    policy_terms,
    token_weights,
    weighted_sum,
)
from ragen.config.schema import Config
from ragen.model.policy import score
from ragen.rollout.batch import Sample, pack
from ragen.train.optimizer import MasterAdamW


def update_actor(
    model: Any,
    optimizer: MasterAdamW,
    samples: Sequence[Sample],
    advantages_E: Sequence[float],
    config: Config,
    on_samples: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """One pass (or `ppo_epochs`) over the samples. `advantages_E` is indexed by the samples' `episode_index`."""
    actor = config.actor_rollout_ref.actor
    history: dict[str, list[float]] = defaultdict(list)
    for _ in range(actor.ppo_epochs):
        for start in range(0, len(samples), actor.ppo_mini_batch_size):
            mini = samples[start : start + actor.ppo_mini_batch_size]
            metrics = _update_on(model, mini, advantages_E, config, on_samples)
            metrics["actor/lr"] = optimizer.lr
            metrics["actor/grad_norm"] = optimizer.step(actor.grad_clip)
            for name, value in metrics.items():
                history[name].append(value)
    means = {name: fmean(values) for name, values in history.items()}
    # Before the first optimizer step sampler and learner are the same policy: what differs there is rounding.
    means["rollout/log_prob_diff_max"] = history["rollout/log_prob_diff_max"][0]
    return means | {"train/num_mini_batches": len(history["actor/lr"])}


def _update_on(
    model: Any, mini: Sequence[Sample], advantages_E: Sequence[float], config: Config, on_samples: Callable[[int], None]
) -> dict[str, float]:
    """Gradients of one mini-batch, left in the module, and its metrics."""
    actor, temperature = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.temperature
    device = next(model.parameters()).device
    counts = torch.tensor([sample.num_sampled for sample in mini], device=device)
    weights = token_weights(counts, actor.loss_agg_mode).split(counts.tolist())
    means = token_weights(counts, "token-mean").split(counts.tolist())
    sums: dict[str, Tensor] = {}
    largest_difference = 0.0
    size = actor.ppo_micro_batch_size_per_gpu
    for start in range(0, len(mini), size):
        micro = mini[start : start + size]
        packed = pack([sample.sequence for sample in micro], device)
        log_probs, entropies = score(model, packed, temperature)
        advantages = torch.tensor([advantages_E[sample.episode_index] for sample in micro], device=device)
        losses, diagnostics = policy_terms(
            log_probs,
            packed.log_probs,
            advantages[packed.sequence],
            actor.clip_ratio_low,
            actor.clip_ratio_high,
            actor.clip_ratio_c,
        )
        terms = [Term("task", 1.0, losses)]
        if actor.entropy_coeff:
            terms.append(entropy_term(entropies, actor.entropy_coeff))
        weights_T, means_T = torch.cat(weights[start : start + size]), torch.cat(means[start : start + size])
        weighted_sum(terms, weights_T).backward()
        sums = add_sums(sums, policy_sums(losses, diagnostics, entropies, weights_T, means_T))
        difference = (log_probs.detach() - packed.log_probs).abs().max()
        largest_difference = max(largest_difference, float(difference))
        on_samples(len(micro))
    return policy_metrics(sums) | {"rollout/log_prob_diff_max": largest_difference}
