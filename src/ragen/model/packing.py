"""Episodes as training data: samples with their identity, and packed tensors.

samples = samples_of(groups)                       # one per sequence (mode full: per episode)
packed = pack([sample.sequence for sample in samples], device)
packed.rows, packed.targets                        # hidden states that predict sampled tokens, and the tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen.model.attention import Packed, sent
from ragen.types import Episode, Group, TokenSequence


@dataclass(frozen=True)
class Sample:
    """One training sequence. It carries its episode and group, so the order of a list means nothing."""

    sequence: TokenSequence
    episode: Episode
    episode_index: int  # among all episodes of the step
    group: int

    @property
    def num_sampled(self) -> int:
        return sum(self.sequence.sampled)

    @property
    def log_probs(self) -> list[float]:
        """The sampler's log-probs of the sampled tokens."""
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
    """Concatenated sequences. `rows`, `targets`, `log_probs` and `sequence` have one entry per sampled token."""

    ids: Tensor
    attend: Packed
    rows: Tensor  # the index of the token before it, whose hidden state predicts it
    targets: Tensor
    log_probs: Tensor  # from the sampler
    sequence: Tensor  # the index of its sequence


def pack(sequences: Sequence[TokenSequence], device: torch.device | str) -> PackedTokens:
    attend = Packed([len(sequence.ids) for sequence in sequences], device)
    assert not any(sequence.sampled[0] for sequence in sequences), "a sequence begins with given tokens"
    ids = torch.tensor([id_ for sequence in sequences for id_ in sequence.ids])
    sampled = torch.tensor([flag for sequence in sequences for flag in sequence.sampled])
    log_probs = torch.tensor([value for sequence in sequences for value in sequence.log_probs])
    at = sampled.nonzero()[:, 0]
    numbers = torch.arange(len(sequences)).repeat_interleave(torch.tensor(attend.lengths))
    parts = (ids, at - 1, ids[at], log_probs[at], numbers[at])
    on_device, rows, targets, sampler, sequence = (sent(part, device) for part in parts)
    return PackedTokens(on_device, attend, rows, targets, sampler, sequence)
