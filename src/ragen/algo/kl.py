"""KL between the policy and its reference, as a loss or in the reward.

    kl_T = kl_of_tokens("low_var_kl", log_probs_T, ref_log_probs_T)                      # with gradient: for the loss
    experience, metrics = pay_kl(experience, kl_of_tokens("kl", old_T, ref_T), control)  # without: in the reward

For a sampled token, d is its log-prob under the policy minus that under the reference. All kinds but the last estimate
KL(policy || reference) from the sampled token:

| kind                             | value                                        | its mean over samples is       |
|----------------------------------|----------------------------------------------|--------------------------------|
| `kl`, `k1`                       | d                                            | the KL                         |
| `abs`                            | abs(d)                                       | not a KL; never negative       |
| `mse`, `k2`                      | d^2 / 2                                      | nearly the KL where d is small |
| `low_var_kl`, `low-var-kl`, `k3` | exp(-d) + d - 1, at most 10; -d within 20    | the KL; never negative         |
| `full`                           | sum over the vocabulary of p (log p - log q) | the KL, without sampling noise |

In a loss the gradient counts, not the value. On average over samples of the policy, that of `k1` is zero: it only adds
noise. That of `k2` is the gradient of KL(policy || reference), and that of `k3`, where nothing is clipped, the gradient
of KL(reference || policy). A trailing `+` (`k1+`, `low_var_kl+`, …) has the value of its kind and the gradient of `k2`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragen.algo.experience import Experience, sum_by

MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0
MAX_ERROR = 0.2  # the adaptive coefficient clips the error to this


def _low_var_kl(difference_T: Tensor) -> Tensor:
    inverse_T = (-difference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (inverse_T.expm1() - inverse_T).clamp(max=MAX_LOW_VAR_KL)


def _half_square(difference_T: Tensor) -> Tensor:
    return 0.5 * difference_T.square()


FULL = "full"
# (log-prob minus reference log-prob) -> penalty of the token
SAMPLED_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda difference_T: difference_T,
    "k1": lambda difference_T: difference_T,
    "abs": torch.abs,
    "mse": _half_square,
    "k2": _half_square,
    "low_var_kl": _low_var_kl,
    "low-var-kl": _low_var_kl,
    "k3": _low_var_kl,
}
KINDS = (*SAMPLED_KINDS, FULL)


def needs_vocabulary(kind: str) -> bool:
    """Whether `kl_of_tokens` needs `full_T`."""
    return kind.removesuffix("+") == FULL


def kl_of_tokens(kind: str, log_probs_T: Tensor, ref_log_probs_T: Tensor, full_T: Tensor | None = None) -> Tensor:
    """The penalty of each sampled token. `full_T` is `full_kl` of the same tokens; only `full` needs it."""
    assert log_probs_T.shape == ref_log_probs_T.shape and log_probs_T.ndim == 1, (log_probs_T.shape, ref_log_probs_T)
    base = kind.removesuffix("+")
    assert base in KINDS, kind
    difference_T = log_probs_T - ref_log_probs_T
    if base == FULL:
        if full_T is None:
            raise ValueError("KL type full needs the distributions over the vocabulary: pass full_T=full_kl(…)")
        assert full_T.shape == log_probs_T.shape, (full_T.shape, log_probs_T.shape)
        value_T = full_T
    else:
        value_T = SAMPLED_KINDS[base](difference_T)
    if kind == base:
        return value_T
    slope_T = _half_square(difference_T)
    return value_T.detach() + slope_T - slope_T.detach()


def full_kl(log_probs_T_V: Tensor, ref_log_probs_T_V: Tensor) -> Tensor:
    """KL(policy || reference) of each row: log-probs over the whole vocabulary in, one number per token out."""
    assert log_probs_T_V.shape == ref_log_probs_T_V.shape, (log_probs_T_V.shape, ref_log_probs_T_V.shape)
    probs_T_V = log_probs_T_V.exp()
    # A token of probability 0 costs nothing, even if its log-prob is minus infinity.
    costs_T_V = torch.where(probs_T_V > 0, log_probs_T_V - ref_log_probs_T_V, 0.0)
    return (probs_T_V * costs_T_V).sum(dim=-1)


# --- in the reward ------------------------------------------------------------------------------------------------


@dataclass
class KlController:
    """The coefficient of the KL in the reward: fixed, or adapted to a target.

    control = KlController("adaptive", coefficient=0.001, target=0.1, horizon=10000)
    control.update(kl, num_episodes=128)

    Adaptive (arXiv 1909.08593): times 1 + e * num_episodes / horizon, where e = KL / target - 1, clipped to 0.2.
    """

    type: str  # fixed | adaptive
    coefficient: float
    target: float  # adaptive only
    horizon: float  # adaptive only: episodes over which an error of 0.2 changes the coefficient by a fifth

    def __post_init__(self):
        assert self.type in ("fixed", "adaptive"), self
        assert self.type == "fixed" or (self.target > 0 and self.horizon > 0), self

    def update(self, kl: float, num_episodes: int) -> None:
        if self.type == "adaptive":
            error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coefficient *= 1 + error * num_episodes / self.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def pay_kl(experience: Experience, kl_T: Tensor, control: KlController) -> tuple[Experience, dict[str, float]]:
    """Subtract coefficient * KL from each token's reward, then update the control with this step's KL.

    That KL is the mean over episodes of the mean over their tokens.
    """
    assert kl_T.shape == experience.rewards_T.shape, (kl_T.shape, experience.rewards_T.shape)
    kl_T, num_episodes = kl_T.detach(), len(experience.group_E)
    if not num_episodes:
        return experience, {}
    paid = replace(experience, rewards_T=experience.rewards_T - control.coefficient * kl_T.to(experience.rewards_T))
    mean_kl = float((sum_by(kl_T, experience.episode_T, num_episodes) / experience.num_tokens_E).mean())
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": control.coefficient}
    control.update(mean_kl, num_episodes)
    return paid, metrics
