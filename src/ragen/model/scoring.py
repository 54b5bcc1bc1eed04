"""The learner's scores of samples before an update: log-probs, entropies, values.

    scorer = Scorer(workers, temperature=1.0, micro_batch_size=4)
    scorer.log_probs(model, samples)              # a tensor per sample: one number per sampled token

Each worker computes its share, and all workers get all results.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ragen.distributed.workers import Workers
from ragen.model.critic import Critic
from ragen.model.packing import PackedTokens, pack, samples_of
from ragen.model.policy import score
from ragen.model.redo import Batches, Redo
from ragen.protocols import LanguageModel, TrainingSample
from ragen.types import Group

CPU_TOKENS = 4096  # larger passes were slower on every CPU we tried


class Scorer:
    """`max_tokens` are those of a pass on CUDA, where short sequences share the room of long ones."""

    def __init__(
        self,
        workers: Workers,
        temperature: float,
        micro_batch_size: int,
        max_tokens: int | None = None,
        redo: Redo | None = None,
    ):
        self.workers, self.temperature, self.micro_batch_size = workers, temperature, micro_batch_size
        self.room = max_tokens if workers.device.type == "cuda" else None
        self.redo = redo or Redo()

    def log_probs(self, model: LanguageModel, samples: Sequence[TrainingSample]) -> list[Tensor]:
        return self._each(samples, lambda packed: score(model, packed, self.temperature).log_probs)

    def values(self, critic: Critic, samples: Sequence[TrainingSample]) -> list[Tensor]:
        return self._each(samples, critic.values)

    def mean_entropies(self, model: LanguageModel, groups: Sequence[Group]) -> list[list[float]]:
        """The mean entropy of each episode's sampled tokens, group by group."""
        samples = samples_of(groups)
        entropies = self._each(samples, lambda packed: score(model, packed, self.temperature).entropies)
        of_episode: dict[int, list[Tensor]] = {}
        for sample, part in zip(samples, entropies, strict=True):
            of_episode.setdefault(sample.episode_index, []).append(part)
        means = iter([float(torch.cat(of_episode[index]).double().mean()) for index in sorted(of_episode)])
        return [[next(means) for _ in group.episodes] for group in groups]

    @torch.no_grad()
    def _each(self, samples: Sequence[TrainingSample], compute: Callable[[PackedTokens], Tensor]) -> list[Tensor]:
        """One number per sampled token, sample by sample, in main memory."""
        mine, device = self.workers.mine(samples), self.workers.device
        lengths = [len(sample.sequence.ids) for sample in mine]

        def batches_of(divisor: int) -> Batches:
            room = None if self.room is None else self.room // divisor
            return micro_batches(lengths, max(1, self.micro_batch_size // divisor), device, room)

        def compute_all(batches: Sequence[list[int]]) -> dict[int, Tensor]:
            results: dict[int, Tensor] = {}
            for indices in batches:
                packed = pack([mine[index].sequence for index in indices], device)
                parts = compute(packed).cpu().split([mine[index].num_sampled for index in indices])
                results |= {index: part.clone() for index, part in zip(indices, parts, strict=True)}
            return results

        results = self.redo(batches_of, compute_all)
        return self.workers.gather([results[index] for index in range(len(mine))])


def micro_batches(
    num_tokens_S: Sequence[int], max_samples: int, device: torch.device, room: int | None = None
) -> list[list[int]]:
    """Which samples to compute together: of similar length, at most `max_samples`; on a CPU at most CPU_TOKENS tokens.

    With `room`, a number of tokens, the number of samples does not matter: short ones share the room of long ones.
    """
    max_tokens = CPU_TOKENS if device.type == "cpu" else sum(num_tokens_S)
    if room is not None:
        max_tokens, max_samples = room, len(num_tokens_S)
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(num_tokens_S)), key=num_tokens_S.__getitem__):
        room -= num_tokens_S[index]
        if room < 0 or len(batches[-1]) == max_samples:
            batches.append([])
            room = max_tokens - num_tokens_S[index]
        batches[-1].append(index)
    return batches


def by_sample(tokens_T: Tensor, samples: Sequence[TrainingSample]) -> list[Tensor]:
    """Numbers of all sampled tokens, split by sample."""
    return list(tokens_T.float().split([sample.num_sampled for sample in samples]))
