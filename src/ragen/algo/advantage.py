"""Advantages: one pure function per estimator.

    settings = AdvantageSettings(norm_by_std=True, gamma=1.0, lam=1.0, bi_level=False, high_level_gamma=0.95)
    estimate = ESTIMATORS["grpo"](experience, settings)
    advantages_T, metrics = shape_advantages(estimate, experience, shape, kept_ratio)

An estimator gets the sampled tokens of the kept episodes (`experience.py`) and returns an advantage for each. R is the
total reward of an episode; r, V and A belong to a token; t+1 is the next sampled token of the same episode, skipping
given tokens and the cut between two turns.

| estimator                      | compared with                | A                                                   |
|--------------------------------|------------------------------|-----------------------------------------------------|
| `gae`                          | what the critic expected     | r_t + gamma V_t+1 - V_t + gamma lam A_t+1, whitened |
| `grpo`                         | episodes of the same group   | (R - mean) / (std + 1e-6), or R - mean              |
| `brpo`                         | all episodes of the batch    | (R - mean) / (std + 1e-6)                           |
| `arpo`                         | nothing                      | R                                                   |
| `rloo`                         | the others of the same group | R - mean of the others                              |
| `reinforce_plus_plus`          | all tokens of the batch      | G_t = r_t + gamma G_t+1, whitened                   |
| `reinforce_plus_plus_baseline` | episodes of the same group   | R - mean, whitened                                  |

`grpo` divides by the std only with `norm_by_std`. Those with R give every token of the episode the same advantage, and
an episode counts once, however many sequences it was cut into. `std` is the sample standard deviation (n - 1). An
episode without peers gets mean 0 and std 1. Whitening, the last step, is (A - mean) / sqrt(variance + 1e-8) over all
tokens of the batch, with the sample variance; the critic's targets are A + V before it. An episode that ran out of
turns ends like any other: the value after its last token is 0.

GRPO here differs from the paper (arXiv 2402.03300) in the rule for single episodes and in the small constant under the
fraction.

**Bi-level GAE** (`bi_level`) discounts turns by `high_level_gamma` and tokens by gamma. First GAE runs over turns: a
turn's reward is the sum over its tokens, its value that of its last token. The resulting return of the turn then
replaces its reward, at its last token, and GAE runs over the tokens of each turn alone, with value 0 after its end.
Turns are told apart by their number, so a turn without reward counts too. With one turn it is plain GAE; with gamma,
lam and high_level_gamma 1, A + V is the sum of the rewards to come, as in plain GAE.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen.algo.experience import Experience, sum_by
from ragen.algo.groups import Groups, compare

STD_EPS = 1e-6
VARIANCE_EPS = 1e-8


@dataclass(frozen=True)
class AdvantageSettings:
    """Settings of the estimators; each reads those that it uses."""

    norm_by_std: bool  # grpo: divide by the group's std; False is the advantage of "Dr. GRPO" (arXiv 2503.20783)
    gamma: float  # gae, reinforce_plus_plus: discount per token
    lam: float  # gae: how far to trust rewards over the critic's values
    bi_level: bool  # gae: turns have their own discount
    high_level_gamma: float  # gae with bi_level: discount per turn


@dataclass(frozen=True, eq=False)
class AdvantageEstimate:
    advantages_T: Tensor
    returns_T: Tensor | None  # the critic's targets; only `gae` has them


def gae(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """Generalised advantage estimation (arXiv 1506.02438), whitened."""
    if experience.values_T is None:
        raise ValueError("gae needs the critic's value of each token: pass values_T to Experience")
    values_T = experience.values_T.double()
    rewards_T, ends_T = experience.rewards_T.double(), experience.ends_episode_T
    if settings.bi_level:
        rewards_T, ends_T = _turn_returns_at_ends(experience, settings), experience.ends_turn_T
    advantages_T = _gae(rewards_T, values_T, ends_T, settings.gamma, settings.lam)
    dtype = experience.rewards_T.dtype
    return AdvantageEstimate(_whiten(advantages_T).to(dtype), (advantages_T + values_T).to(dtype))


def grpo(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """Relative to the episode's own group."""
    groups = _groups(experience)
    return _per_episode(experience, _over_std(groups) if settings.norm_by_std else groups.centred_E)


def brpo(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """Relative to the whole batch, as one group. It does not need several episodes of a level."""
    batch = compare(experience.returns_E, torch.zeros_like(experience.group_E))
    return _per_episode(experience, _over_std(batch))


def arpo(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """The return itself."""
    return _per_episode(experience, experience.returns_E)


def rloo(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """Relative to the mean of the others in the group (arXiv 2402.14740): R - mean of all, times n / (n - 1)."""
    groups = _groups(experience)
    factor_G = groups.size_G.double() / (groups.size_G - 1).clamp(min=1)
    return _per_episode(experience, groups.centred_E * factor_G[groups.index_E])


def reinforce_plus_plus(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """The discounted rewards to come, whitened (arXiv 2501.03262)."""
    to_come_T = _sums_to_come(experience.rewards_T.double(), _carry(experience.ends_episode_T, settings.gamma))
    return AdvantageEstimate(_whiten(to_come_T).to(experience.rewards_T.dtype), None)


def reinforce_plus_plus_baseline(experience: Experience, settings: AdvantageSettings) -> AdvantageEstimate:
    """Relative to the mean of the group, whitened over all tokens."""
    centred_T = _groups(experience).centred_E[experience.episode_T]
    return AdvantageEstimate(_whiten(centred_T).to(experience.rewards_T.dtype), None)


Estimator = Callable[[Experience, AdvantageSettings], AdvantageEstimate]
ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "brpo": brpo,
    "arpo": arpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


# --- shaping ------------------------------------------------------------------------------------------------------

LOSS_SCALINGS: dict[str, Callable[[float], float]] = {"none": lambda ratio: 1.0, "linear": float, "sqrt": math.sqrt}


@dataclass(frozen=True)
class ShapeSettings:
    """Changes to the estimated advantages, in this order. Two of them are for grpo only."""

    estimator: str
    soft_reweight: bool  # grpo: weight groups by their std relative to the largest
    loss_scaling: str  # a key of LOSS_SCALINGS: a smaller step if the filter kept few groups
    length_weight: bool  # grpo: longer episodes count less
    zero_task: bool  # no task gradient at all; entropy and KL terms stay

    def __post_init__(self):
        assert self.loss_scaling in LOSS_SCALINGS, self
        assert self.estimator == "grpo" or not (self.soft_reweight or self.length_weight), self


def shape_advantages(
    estimate: AdvantageEstimate, experience: Experience, settings: ShapeSettings, kept_ratio: float
) -> tuple[Tensor, dict[str, float]]:
    """The advantages for the loss. `kept_ratio` is the share of groups that the filter kept.

    Soft reweighting, w = std / (largest std + 1e-6) for each group; the filter's scaling, r or sqrt(r); the length
    weight, A / ((length + 1e-6) / mean length) for each episode; zero. Critic targets do not change.
    """
    assert 0 < kept_ratio <= 1, kept_ratio
    advantages_T, metrics = estimate.advantages_T, dict[str, float]()
    if settings.soft_reweight:
        weights_G, index_E = _soft_weights(experience)
        advantages_T = advantages_T * _on_tokens(weights_G[index_E], experience)
        metrics = {f"train/soft_reweight_{name}": float(getattr(weights_G, name)()) for name in ("min", "max", "mean")}
    advantages_T = advantages_T * LOSS_SCALINGS[settings.loss_scaling](kept_ratio)
    if settings.length_weight:
        lengths_E = experience.num_tokens_E.double()
        advantages_T = advantages_T / _on_tokens((lengths_E + 1e-6) / lengths_E.mean(), experience)
    if settings.zero_task:
        advantages_T = torch.zeros_like(advantages_T)
    return advantages_T, metrics


def _soft_weights(experience: Experience) -> tuple[Tensor, Tensor]:
    """The weight of each group, and the group of each episode. A group of one has std 1, as in `grpo`."""
    groups = _groups(experience)
    return groups.std_G / (groups.std_G.max() + STD_EPS), groups.index_E


# --- parts --------------------------------------------------------------------------------------------------------


def _groups(experience: Experience) -> Groups:
    return compare(experience.returns_E, experience.group_E)


def _over_std(groups: Groups) -> Tensor:
    return groups.centred_E / (groups.std_G + STD_EPS)[groups.index_E]


def _on_tokens(values_E: Tensor, experience: Experience) -> Tensor:
    return values_E[experience.episode_T].to(experience.rewards_T.dtype)


def _per_episode(experience: Experience, advantages_E: Tensor) -> AdvantageEstimate:
    return AdvantageEstimate(_on_tokens(advantages_E, experience), None)


def _turn_returns_at_ends(experience: Experience, settings: AdvantageSettings) -> Tensor:
    """Rewards of the lower level: the turn's return at its end, minus the rewards of its other tokens."""
    assert experience.values_T is not None
    ends_T = experience.ends_turn_T
    rewards_T, values_U = experience.rewards_T.double(), experience.values_T.double()[ends_T]
    earned_U = sum_by(rewards_T, experience.segment_T, len(values_U))
    last_U = experience.ends_episode_T[ends_T]
    returns_U = values_U + _gae(earned_U, values_U, last_U, settings.high_level_gamma, settings.lam)
    return rewards_T.masked_scatter(ends_T, rewards_T[ends_T] + returns_U - earned_U)


def _gae(rewards_N: Tensor, values_N: Tensor, ends_N: Tensor, gamma: float, lam: float) -> Tensor:
    """Over consecutive tokens or turns; nothing is carried across an end."""
    next_N = torch.where(ends_N, 0.0, values_N.roll(-1))
    errors_N = rewards_N + gamma * next_N - values_N
    return _sums_to_come(errors_N, _carry(ends_N, gamma * lam))


def _carry(ends_N: Tensor, factor: float) -> Tensor:
    return (~ends_N).double() * factor


def _sums_to_come(values_N: Tensor, carry_N: Tensor) -> Tensor:
    """S_n = values_n + carry_n * S_n+1, from the back; a carry of 0 ends a stretch.

    By doubling: each round an entry covers twice as many positions, so a batch of any length takes about twenty calls
    on whole tensors.
    """
    reach = 1
    while reach < len(values_N):
        here, there = slice(None, -reach), slice(reach, None)
        values_N = torch.cat([values_N[here] + carry_N[here] * values_N[there], values_N[-reach:]])
        carry_N = torch.cat([carry_N[here] * carry_N[there], carry_N[-reach:]])
        reach *= 2
    return values_N


def _whiten(values_T: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all tokens; a single token gets mean 0 and variance 1."""
    batch = compare(values_T, torch.zeros_like(values_T, dtype=torch.long))
    return batch.centred_E / (batch.std_G.square() + VARIANCE_EPS).sqrt()[batch.index_E]
