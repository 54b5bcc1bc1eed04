"""Experiences for tests: how many tokens each turn of each episode has, and what they earned."""

import torch

from ragen.algo.advantage import AdvantageSettings
from ragen.algo.experience import Experience


def settings(**changes):
    defaults = {"norm_by_std": True, "gamma": 1.0, "lam": 1.0, "bi_level": False, "high_level_gamma": 0.95}
    return AdvantageSettings(**defaults | changes)


def layout(lengths_E_U):
    """Episode and turn of each token, from the number of tokens of each turn of each episode."""
    rows = [
        (episode, turn)
        for episode, lengths in enumerate(lengths_E_U)
        for turn, length in enumerate(lengths)
        for _ in range(length)
    ]
    episodes, turns = zip(*rows, strict=True) if rows else ((), ())
    return torch.tensor(episodes, dtype=torch.long), torch.tensor(turns, dtype=torch.long)


def experience(lengths_E_U, rewards, group_ids=None, values=None, dtype=torch.float64):
    episode_T, turn_T = layout(lengths_E_U)
    group_ids = [0] * len(lengths_E_U) if group_ids is None else group_ids
    values_T = None if values is None else torch.tensor(values, dtype=dtype)
    rewards_T = torch.tensor(rewards, dtype=dtype)
    return Experience(rewards_T, episode_T, turn_T, torch.tensor(group_ids, dtype=torch.long), values_T)
