"""How much better an episode was than its peers: one pure function per estimator.

    advantages_E = ESTIMATORS["grpo"](returns_E, group_ids_E, AdvantageSettings(norm_by_std=True))

An estimator sees one return and one group id per episode and gives one advantage per episode; every sampled token of
the episode carries it. An episode counts once, however many sequences it was cut into. Group ids are any integers and
identity is all that they mean: rows may come in any order, and nothing is read from their position.

| estimator | compared with                  | A                                                            |
|-----------|--------------------------------|--------------------------------------------------------------|
| `grpo`    | the episodes of the same group | (R - mean) / (std + 1e-6), or R - mean without `norm_by_std` |
| `brpo`    | all episodes of the batch      | (R - mean) / (std + 1e-6)                                    |

`std` is the sample standard deviation (n - 1). An episode without peers is measured against mean 0 and std 1. GRPO here
differs from the paper (arXiv 2402.03300) in that, and in the small constant under the fraction.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-6


@dataclass(frozen=True)
class AdvantageSettings:
    """What the estimators may be told; each reads what concerns it."""

    norm_by_std: bool  # grpo: divide by the group's std; False is the advantage of "Dr. GRPO" (arXiv 2503.20783)


def grpo(returns_E: Tensor, group_ids_E: Tensor, settings: AdvantageSettings) -> Tensor:
    """Relative to the episode's own group."""
    return _relative(returns_E, group_ids_E, settings.norm_by_std)


def brpo(returns_E: Tensor, group_ids_E: Tensor, settings: AdvantageSettings) -> Tensor:
    """Relative to the whole batch: the batch is one group. It needs no second episode of the same level."""
    return _relative(returns_E, torch.zeros_like(group_ids_E), norm_by_std=True)


Estimator = Callable[[Tensor, Tensor, AdvantageSettings], Tensor]
ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "brpo": brpo}


def _relative(returns_E: Tensor, group_ids_E: Tensor, norm_by_std: bool) -> Tensor:
    assert returns_E.ndim == 1 and returns_E.is_floating_point(), (returns_E.shape, returns_E.dtype)
    assert group_ids_E.shape == returns_E.shape and not group_ids_E.is_floating_point(), group_ids_E
    if not bool(torch.isfinite(returns_E).all()):
        raise ValueError(f"every return must be a finite number, got {returns_E.tolist()}")
    ids_G, group_E = torch.unique(group_ids_E, return_inverse=True)
    zeros_G = torch.zeros(len(ids_G), dtype=torch.float64, device=returns_E.device)
    exact_E = returns_E.double()

    def total_G(values_E: Tensor) -> Tensor:
        return zeros_G.index_add(0, group_E, values_E)

    # Measured from the group's lowest return, equal returns are exactly 0. In the plain formula the rounding of their
    # mean is divided by a std of the same size: sixteen returns of 100.1 in float32 would get advantages of 0.86.
    lowest_G = zeros_G.scatter_reduce(0, group_E, exact_E, "amin", include_self=False)
    above_E = exact_E - lowest_G[group_E]
    size_G = total_G(torch.ones_like(exact_E))
    centred_E = above_E - (total_G(above_E) / size_G)[group_E]
    std_G = (total_G(centred_E.square()) / (size_G - 1).clamp(min=1)).sqrt()

    alone_G = size_G == 1
    centred_E = torch.where(alone_G[group_E], exact_E, centred_E)
    std_G = torch.where(alone_G, 1.0, std_G)
    advantages_E = centred_E / (std_G + STD_EPS)[group_E] if norm_by_std else centred_E
    return advantages_E.to(returns_E.dtype)
