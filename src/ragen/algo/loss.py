"""The loss of a mini-batch: a sum of named terms, each a weighted sum over its sampled tokens.

    weights_T = token_weights(num_tokens_S, loss_agg_mode)           # once for the mini-batch
    means_T = token_weights(num_tokens_S, "token-mean")              # for the metrics, with any aggregation
    for micro in micro_batches:                                      # any split, any order; inside, T is one part
        losses_T, diagnostics = policy_terms(log_probs_T, old_log_probs_T, advantages_T, 0.2, 0.28, 3.0)
        terms = [Term("task", 1.0, losses_T), entropy_term(entropies_T, 0.001), kl_term(kl_T, 0.01)]
        weighted_sum(terms, weights_T[micro]).backward()
        sums = add_sums(sums, policy_sums(losses_T, diagnostics, entropies_T, weights_T[micro], means_T[micro]))
    metrics = policy_metrics(sums)

T runs over sampled tokens only, so there is no mask. The weights are fixed for the mini-batch before it is split.
Micro-batches, packing and workers then only decide the order in which the same numbers are added. (With means per
micro-batch the memory budget would change the loss.)

The sum of weight times loss is, for S sequences (sequences without a sampled token do not count) of n tokens each:

| `loss_agg_mode`           | weight of a token | the sum is                                                      |
|---------------------------|-------------------|-----------------------------------------------------------------|
| `token-mean`              | 1 / (all tokens)  | the mean over tokens: long sequences count more                 |
| `seq-mean-token-mean`     | 1 / (S n)         | the mean over sequences of their means (GRPO)                   |
| `seq-mean-token-sum`      | 1 / S             | the mean over sequences of their sums                           |
| `seq-mean-token-sum-norm` | 1 / (S L)         | the same, divided by a constant length L (Dr. GRPO)             |

L is `norm_length`: the most tokens that a sequence may have, one constant for the whole run, so that a token's weight
does not depend on any length. By default it is the longest sequence of the mini-batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0

ESS = "actor/effective_sample_size"
RATIO_MEAN = "ratio_mean"  # additive parts of ESS, not metrics themselves
RATIO_SQUARE_MEAN = "ratio_square_mean"

# (tokens of each sequence, number of sequences, length L) -> what a sequence's losses are divided by
AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "token-mean": lambda num_tokens_S, num, length: num_tokens_S.sum(),
    "seq-mean-token-mean": lambda num_tokens_S, num, length: num * num_tokens_S,
    "seq-mean-token-sum": lambda num_tokens_S, num, length: num,
    "seq-mean-token-sum-norm": lambda num_tokens_S, num, length: num * length,
}


def token_weights(
    num_tokens_S: Tensor, mode: str, dtype: torch.dtype = torch.float32, norm_length: int | None = None
) -> Tensor:
    """The token weights, sequence by sequence, that make a sum over tokens the aggregate of the mini-batch."""
    assert mode in AGGREGATIONS, mode
    if norm_length is not None and norm_length < 1:
        raise ValueError(f"norm_length={norm_length}: must be at least 1 token")
    if not bool((num_tokens_S > 0).any()):
        return torch.zeros(0, dtype=dtype, device=num_tokens_S.device)
    length = norm_length or int(num_tokens_S.max())
    exact_S = num_tokens_S.double()
    weights_S = torch.ones_like(exact_S) / AGGREGATIONS[mode](exact_S, (exact_S > 0).sum(), length)
    return weights_S.repeat_interleave(num_tokens_S).to(dtype)


@dataclass(frozen=True, eq=False)
class Term:
    """One named part of the loss. Training adds the terms; gradient analysis differentiates them one by one."""

    name: str
    coefficient: float
    per_token: Tensor

    def weighted(self, weights_T: Tensor) -> Tensor:
        assert self.per_token.shape == weights_T.shape, (self.name, self.per_token.shape, weights_T.shape)
        return self.coefficient * (weights_T * self.per_token).sum()


def entropy_term(entropies_T: Tensor, coefficient: float) -> Term:
    """A bonus: a positive coefficient rewards entropy, so the loss subtracts it."""
    return Term("entropy", -coefficient, entropies_T)


def kl_term(kl_T: Tensor, coefficient: float) -> Term:
    """A cost: a positive coefficient keeps the policy near its reference. `kl_T` comes from `kl.kl_of_tokens`."""
    return Term("kl", coefficient, kl_T)


def value_term(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float) -> tuple[Term, Tensor]:
    """The critic's loss of each token, and which tokens were clipped.

    Half the squared distance to the return, (V - R)^2 / 2, or that of V clipped to within `clip` of the old value,
    whichever is larger: a value that moved too far has no gradient, unless it moved away from the return.
    """
    assert values_T.shape == old_values_T.shape == returns_T.shape and values_T.ndim == 1
    assert clip >= 0, clip
    held_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    free_T, bounded_T = (values_T - returns_T).square(), (held_T - returns_T).square()
    return Term("value", 1.0, 0.5 * torch.maximum(free_T, bounded_T)), bounded_T.detach() > free_T.detach()


def weighted_sum(terms: Iterable[Term], weights_T: Tensor) -> Tensor:
    """The loss of the tokens with these weights; over the parts of a mini-batch these add up to its loss."""
    by_name: dict[str, Tensor] = {}
    for term in terms:
        assert term.name not in by_name, f"two terms are called {term.name!r}"
        by_name[term.name] = term.weighted(weights_T)
    assert by_name, "a loss without terms"
    return torch.stack(list(by_name.values())).sum()


def policy_terms(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss of each token, and diagnostics.

    PPO (arXiv 1707.06347) with two bounds, "clip-higher" (arXiv 2503.14476), and dual clip (arXiv 1912.09729): where
    A < 0 the loss is at most -A * clip_c, so that a token that became far more likely cannot dominate the update.

    The diagnostics carry no gradient: `ratio`; `clipped`, the bounds clip the objective; `clipped_lower`, dual clip
    does; `approx_kl`, old - new log-prob, whose mean under the old policy estimates KL(old || new).
    """
    assert log_probs_T.shape == old_log_probs_T.shape == advantages_T.shape and log_probs_T.ndim == 1
    if not (0 <= clip_low <= 1 and clip_high >= 0 and clip_c > 1):
        raise ValueError(
            "the clip ratios must satisfy 0 <= low <= 1, high >= 0 and c > 1, "
            f"got low {clip_low}, high {clip_high}, c {clip_c}"
        )
    log_ratio_T = (log_probs_T - old_log_probs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    free_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    clipped_T = torch.maximum(free_T, bounded_T)
    ceiling_T = -advantages_T * clip_c
    negative_T = advantages_T < 0
    losses_T = torch.where(negative_T, torch.minimum(clipped_T, ceiling_T), clipped_T)
    diagnostics = {
        "ratio": ratio_T.detach(),
        "clipped": bounded_T.detach() > free_T.detach(),
        "clipped_lower": negative_T & (clipped_T.detach() > ceiling_T),
        "approx_kl": -log_ratio_T.detach(),
    }
    return losses_T, diagnostics


def policy_sums(
    losses_T: Tensor, diagnostics: dict[str, Tensor], entropies_T: Tensor, weights_T: Tensor, means_T: Tensor
) -> dict[str, Tensor]:
    """Parts of the metrics from some tokens of a mini-batch: sums on the device, to be added over its parts.

    The loss uses its own weights; fractions and means over tokens use those of `token-mean`.
    """
    ratio_T = diagnostics["ratio"]
    return {
        "actor/pg_loss": (weights_T * losses_T.detach()).sum(),
        "actor/pg_clipfrac": (means_T * diagnostics["clipped"]).sum(),
        "actor/pg_clipfrac_lower": (means_T * diagnostics["clipped_lower"]).sum(),
        "actor/ppo_kl": (means_T * diagnostics["approx_kl"]).sum(),
        "actor/entropy": (means_T * entropies_T.detach()).sum(),
        RATIO_MEAN: (means_T * ratio_T).sum(),
        RATIO_SQUARE_MEAN: (means_T * ratio_T.square()).sum(),
    }


def kl_sums(kl_T: Tensor, weights_T: Tensor) -> dict[str, Tensor]:
    """Added to `policy_sums` if there is a KL term."""
    return {"actor/kl_loss": (weights_T * kl_T.detach()).sum()}


def value_sums(
    term: Term, clipped_T: Tensor, values_T: Tensor, weights_T: Tensor, means_T: Tensor
) -> dict[str, Tensor]:
    """The critic's parts, like `policy_sums`; summed over the mini-batch they are the metrics."""
    return {
        "critic/vf_loss": term.weighted(weights_T).detach(),
        "critic/vf_clipfrac": (means_T * clipped_T).sum(),
        "critic/vpred_mean": (means_T * values_T.detach()).sum(),
    }


def add_sums(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add by name; an empty dict adds nothing."""
    assert not left or not right or left.keys() == right.keys(), (sorted(left), sorted(right))
    return {name: left[name] + right[name] for name in left} if left and right else {**left, **right}


def policy_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """The metrics of the mini-batch from the sums over all its tokens.

    The effective sample size is that of the ratios as importance weights, as a share of the tokens:
    (sum r)^2 / (n * sum r^2), 1 when all ratios are equal, 1/n when one token has all the weight.
    """
    metrics = {name: float(value) for name, value in sums.items()}
    ratio_mean, ratio_square_mean = metrics.pop(RATIO_MEAN), metrics.pop(RATIO_SQUARE_MEAN)
    metrics[ESS] = ratio_mean**2 / ratio_square_mean if ratio_square_mean > 0 else 0.0
    return metrics
