"""Turn the scores of episodes or turns into rewards on tokens.

    scores_E = normalize_scores(scores_E, group_E, tag_E, "batch", "mean_std")
    rewards_T = token_rewards(scores_E, episode_T)                              # on the episode's last token
    rewards_T = token_rewards(scores_U, number_turns(episode_T, turn_T))        # or each turn's on its own last token

A score is the environment's reward plus the format penalty, of the episode or, with `use_turn_scores`, of each turn.

Normalisation compares episodes, so it applies to episode scores only; there is no unique way to shift the scores of an
episode's turns. Peers are the episodes of the same level (`state`), of the same tag (`inductive`) or all (`batch`):

| method      | x becomes                                                  |
|-------------|------------------------------------------------------------|
| `identity`  | x                                                          |
| `mean`      | x - mean                                                   |
| `mean_std`  | (x - mean) / (std + 1e-6); 0 where the std is 1e-6 or less |
| `asym_clip` | `mean_std`, then clip to -1 … 3                             |

`std` is the sample standard deviation. An episode without peers keeps its score.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ragen.algo.experience import last_of_each
from ragen.algo.groups import compare

STD_EPS = 1e-6
CLIP_LOW, CLIP_HIGH = -1.0, 3.0

# (centred score, std of its peers) -> normalised score
METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda centred_E, std_E: centred_E,
    "mean_std": lambda centred_E, std_E: _by_std(centred_E, std_E),
    "asym_clip": lambda centred_E, std_E: _by_std(centred_E, std_E).clamp(CLIP_LOW, CLIP_HIGH),
}
GROUPINGS = ("state", "inductive", "batch")


def normalize_scores(scores_E: Tensor, group_E: Tensor, tag_E: Tensor, grouping: str, method: str) -> Tensor:
    """Scores relative to their peers. `group_E` and `tag_E` are any integers, equal for peers."""
    assert grouping in GROUPINGS, grouping
    if method == "identity":
        return scores_E
    assert method in METHODS, method
    peers_E = {"state": group_E, "inductive": tag_E, "batch": torch.zeros_like(group_E)}[grouping]
    groups = compare(scores_E, peers_E)
    normalized_E = METHODS[method](groups.centred_E, groups.std_G[groups.index_E])
    alone_E = (groups.size_G == 1)[groups.index_E]
    return torch.where(alone_E, scores_E, normalized_E.to(scores_E.dtype))


def _by_std(centred_E: Tensor, std_E: Tensor) -> Tensor:
    return torch.where(std_E <= STD_EPS, 0.0, centred_E / (std_E + STD_EPS))


def token_rewards(scores_S: Tensor, segment_T: Tensor) -> Tensor:
    """Each segment's score on its last token, 0 on all others. Segments are numbered 0 … S-1 in order."""
    ends_T = last_of_each(segment_T)
    assert segment_T[ends_T].tolist() == list(range(len(scores_S))), "one score for each segment, in order"
    rewards_T = torch.zeros(segment_T.shape, dtype=scores_S.dtype, device=scores_S.device)
    rewards_T[ends_T] = scores_S
    return rewards_T
