"""Episodes as training data: samples with their identity, and packed tensors.

samples = samples_of(groups)                       # one for each sequence (mode full: for each episode)
packed = pack([sample.sequence for sample in samples], device)
packed.rows, packed.targets                        # hidden states that predict sampled tokens, and these tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen.model.attention import Packed
from ragen.types import Episode, Group, TokenSequence


@dataclass(frozen=True)
class Sample:
    """One training sequence. Who it belongs to travels with it: nothing is read from its place in a list."""

    sequence: TokenSequence
    episode: Episode
    episode_index: int  # among all episodes of the step
    group: int

    @property
    def num_sampled(self) -> int:
        return sum(self.sequence.sampled)

    @property
    def log_probs(self) -> list[float]:
        """The sampler's, of the sampled tokens."""
        sequence = self.sequence
        return [value for value, sampled in zip(sequence.log_probs, sequence.sampled, strict=True) if sampled]


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    episodes = [(group.group, episode) for group in groups for episode in group.episodes]
    return [
        Sample(sequence, episode, index, group)
        for index, (group, episode) in enumerate(episodes)
        for sequence in episode.sequences()
    ]


@dataclass(frozen=True)
class PackedTokens:
    """Sequences one after the other. `rows`, `targets`, `log_probs` and `sequence` have one entry per sampled token."""

    ids: Tensor
    attend: Packed
    rows: Tensor  # the token whose hidden state predicts the sampled one: the one before it
    targets: Tensor
    log_probs: Tensor  # of the sampler
    sequence: Tensor  # which sequence it belongs to


def pack(sequences: Sequence[TokenSequence], device: torch.device | str) -> PackedTokens:
    attend = Packed([len(sequence.ids) for sequence in sequences], device)
    ids = torch.tensor([id_ for sequence in sequences for id_ in sequence.ids], device=device)
    sampled = torch.tensor([flag for sequence in sequences for flag in sequence.sampled], device=device)
    log_probs = torch.tensor([value for sequence in sequences for value in sequence.log_probs], device=device)
    places = sampled.nonzero()[:, 0]
    assert bool((attend.positions[places] > 0).all()), "a sequence begins with given tokens"
    return PackedTokens(ids, attend, places - 1, ids[places], log_probs[places], attend.sequences[places])
