"""The input of the estimators: the sampled tokens of a step's kept episodes, concatenated.

    experience = Experience(rewards_T, episode_T, turn_T, group_E)
    experience.returns_E, experience.num_tokens_E

Episode by episode and, within an episode, turn by turn, without given tokens. It is the same for all context windows:
an episode that was cut into one sequence per turn is still one episode here. Two episodes of one group, the first with
two turns of 2 and 1 tokens, the second with one turn of 3, scored 5 and -1:

    rewards_T  0 0 5   0 0 -1
    episode_T  0 0 0   1 1  1
    turn_T     0 0 1   0 0  0
    group_E    7 7
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Experience:
    """Tokens with their rewards. All tensors are on one device."""

    rewards_T: Tensor  # the episode's score on its last token, or each turn's on the last token of that turn
    episode_T: Tensor  # 0 … E-1, in order; every episode has a token
    turn_T: Tensor  # the turn within the episode, in order
    group_E: Tensor  # any integers: equal ones belong to the same group
    values_T: Tensor | None = None  # what the critic expected at each token, for `gae`

    def __post_init__(self):
        assert self.rewards_T.ndim == 1 and self.rewards_T.is_floating_point(), self.rewards_T
        assert self.episode_T.shape == self.turn_T.shape == self.rewards_T.shape, "one entry per token in each"
        assert self.group_E.ndim == 1 and not self.group_E.is_floating_point(), self.group_E
        present_E, same_T = torch.unique_consecutive(self.episode_T, return_inverse=True)
        assert present_E.tolist() == list(range(len(self.group_E))), "episodes are 0 … E-1 in order, with tokens"
        assert bool(((self.turn_T.diff() >= 0) | (same_T.diff() > 0)).all()), "turns must come in order"
        _check_finite("reward", self.rewards_T)
        if self.values_T is not None:
            assert self.values_T.shape == self.rewards_T.shape, (self.values_T.shape, self.rewards_T.shape)
            _check_finite("value", self.values_T)

    @cached_property
    def returns_E(self) -> Tensor:
        """The total reward of each episode, in float64."""
        return sum_by(self.rewards_T, self.episode_T, len(self.group_E))

    @cached_property
    def num_tokens_E(self) -> Tensor:
        return torch.bincount(self.episode_T, minlength=len(self.group_E))

    @cached_property
    def segment_T(self) -> Tensor:
        """The turn of each token, numbered across all episodes."""
        return number_turns(self.episode_T, self.turn_T)

    @cached_property
    def ends_episode_T(self) -> Tensor:
        return last_of_each(self.episode_T)

    @cached_property
    def ends_turn_T(self) -> Tensor:
        return last_of_each(self.segment_T)


def number_turns(episode_T: Tensor, turn_T: Tensor) -> Tensor:
    """Turns numbered across all episodes, from 0 for the first turn of the first episode."""
    starts_T = torch.ones_like(episode_T, dtype=torch.bool)
    starts_T[1:] = (episode_T.diff() != 0) | (turn_T.diff() != 0)
    return starts_T.cumsum(0) - 1


def last_of_each(segment_T: Tensor) -> Tensor:
    """True at the last token of each run of equal numbers."""
    last_T = torch.ones_like(segment_T, dtype=torch.bool)
    last_T[:-1] = segment_T.diff() != 0
    return last_T


def sum_by(values_N: Tensor, index_N: Tensor, num: int) -> Tensor:
    """Sums of the values with the same index, in float64."""
    zeros = torch.zeros(num, dtype=torch.float64, device=values_N.device)
    return zeros.index_add(0, index_N, values_N.double())


def _check_finite(what: str, values_T: Tensor) -> None:
    bad_T = ~torch.isfinite(values_T)
    if bool(bad_T.any()):
        first = int(bad_T.nonzero()[0, 0])
        raise ValueError(f"every {what} must be a finite number, got {values_T[first].item()} at token {first}")
