"""From played groups to what the updates aim at: scores, the filter, advantages.

    scores = scores_of(groups)
    selection = keep_groups(groups, scores, config, entropies)
    experience = experience_of(selection.kept, normalized(scores, groups, config) of the kept, config)
    advantages_T, returns_T, metrics = estimate(experience, config, kept_ratio)

Plain functions of a config and of groups; models come in only where the filter asks for entropies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ragen.algo.advantage import ESTIMATORS, AdvantageSettings, ShapeSettings, shape_advantages
from ragen.algo.experience import Experience, number_turns
from ragen.algo.filter import METRICS, faint_share, filter_metrics, group_score, in_group_metrics, select
from ragen.algo.reward import normalize_scores, token_rewards
from ragen.config import derive
from ragen.config.schema import Config
from ragen.rollout.summary import num_sampled, score_of
from ragen.types import Group

Scores = list[list[float]]  # one number for each episode, group by group


def scores_of(groups: Sequence[Group]) -> Scores:
    """What each episode earned: reward and format penalties."""
    return [[score_of(episode) for episode in group.episodes] for group in groups]


def normalized(scores: Scores, groups: Sequence[Group], config: Config) -> Scores:
    """The scores relative to those of their peers, as `reward_normalization` says."""
    settings, sizes = config.agent_proxy.reward_normalization, [len(group.episodes) for group in groups]
    tags = list(dict.fromkeys(group.tag for group in groups))
    scores_E = normalize_scores(
        torch.tensor(list(chain(*scores)), dtype=torch.float64),
        torch.tensor([group.group for group in groups for _ in group.episodes]),
        torch.tensor([tags.index(group.tag) for group in groups for _ in group.episodes]),
        settings.grouping,
        settings.method,
    )
    return [part.tolist() for part in scores_E.split(sizes)]


@dataclass(frozen=True)
class Selection:
    """The groups worth an update, whole."""

    places: list[int]  # of the kept among all groups
    kept: list[Group]
    metrics: dict[str, float]
    table: list[tuple[int, float, bool]]  # of every group: its number, the std of its scores, whether it was kept

    @property
    def kept_ratio(self) -> float:
        return len(self.kept) / len(self.table)


@dataclass(frozen=True)
class Played:
    """The groups of a step, what each episode earned, and which groups are worth an update."""

    groups: list[Group]
    scores: Scores
    selection: Selection


def kept_scores(played: Played, config: Config) -> Scores:
    """The normalized scores of the kept groups; all groups count as peers."""
    scores = normalized(played.scores, played.groups, config)
    return [scores[place] for place in played.selection.places]


def keep_groups(
    groups: Sequence[Group], scores: Scores, config: Config, entropies: Callable[[], Scores] | None = None
) -> Selection:
    """The filter. `entropies` are measured only if its metric asks for them.

    It looks at scores as they were earned: relative to its own std every group would look the same.
    """
    metric = config.actor_rollout_ref.rollout.rollout_filter_metric
    values = _quantity(METRICS[metric].quantity, groups, scores, entropies)
    measured = [group_score(metric, of_group) for of_group in values]
    verdicts = select(measured, derive.filter_rule(config))
    kept = [index for index, verdict in enumerate(verdicts) if verdict.keep]
    stds = [group_score("reward_std", of_group) for of_group in scores]
    # The rewards' spread is there whatever the filter measures: early stopping looks at it.
    metrics = in_group_metrics("reward", scores, verdicts) | filter_metrics(metric, values, measured, verdicts)
    algorithm = config.algorithm
    divides_by_std = algorithm.adv_estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo
    if divides_by_std and not algorithm.soft_advantage_reweight:
        metrics["rollout/chosen_blown_up_ratio"] = faint_share(stds, verdicts)
    table = [(group.group, std, verdict.keep) for group, std, verdict in zip(groups, stds, verdicts, strict=True)]
    return Selection(kept, [groups[index] for index in kept], metrics, table)


def _quantity(quantity: str, groups: Sequence[Group], scores: Scores, entropies: Callable[[], Scores] | None) -> Scores:
    """What the filter's metric is made of, for each episode."""
    if quantity == "reward":
        return scores
    if quantity == "length":
        return [[float(num_sampled(episode)) for episode in group.episodes] for group in groups]
    assert quantity == "entropy" and entropies is not None, quantity
    return entropies()


def experience_of(
    groups: Sequence[Group], scores: Scores, config: Config, values: Sequence[Tensor] | None = None
) -> Experience:
    """The sampled tokens of all episodes: the score on the last one, or with `use_turn_scores` each turn's on its own.

    `values` are the critic's, sample by sample.
    """
    episodes = [(group.group, episode) for group in groups for episode in group.episodes]
    turns = [(index, turn) for index, (_, episode) in enumerate(episodes) for turn in range(len(episode.turns))]
    num_tokens_U = torch.tensor([len(turn.reply_ids) for _, episode in episodes for turn in episode.turns])
    episode_T, turn_T = torch.tensor(turns).repeat_interleave(num_tokens_U, dim=0).unbind(1)
    if config.agent_proxy.use_turn_scores:
        results = [turn.result for _, episode in episodes for turn in episode.turns]
        scores_U = torch.tensor([result.reward + result.penalty for result in results], dtype=torch.float64)
        rewards_T = token_rewards(scores_U, number_turns(episode_T, turn_T))
    else:
        rewards_T = token_rewards(torch.tensor(list(chain(*scores)), dtype=torch.float64), episode_T)
    return Experience(
        rewards_T=rewards_T,
        episode_T=episode_T,
        turn_T=turn_T,
        group_E=torch.tensor([group for group, _ in episodes]),
        values_T=None if values is None else torch.cat(list(values)),
    )


def estimate(
    experience: Experience, config: Config, kept_ratio: float
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Advantages, the critic's targets if there is one, and metrics."""
    algorithm = config.algorithm
    settings = AdvantageSettings(
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bi_level=algorithm.bi_level_gae,
        high_level_gamma=algorithm.high_level_gamma,
    )
    estimated = ESTIMATORS[algorithm.adv_estimator](experience, settings)
    shape = ShapeSettings(
        estimator=algorithm.adv_estimator,
        soft_reweight=algorithm.soft_advantage_reweight,
        loss_scaling=config.actor_rollout_ref.actor.filter_loss_scaling,
        length_weight=config.grpo_advantage_length_weight,
        zero_task=algorithm.zero_task_advantage,
    )
    advantages_T, metrics = shape_advantages(estimated, experience, shape, kept_ratio)
    metrics |= _spread("critic/rewards", experience.returns_E) | _spread("critic/advantages", advantages_T)
    if estimated.returns_T is not None:
        values_T = experience.values_T
        assert values_T is not None
        metrics |= _spread("critic/returns", estimated.returns_T) | _spread("critic/values", values_T)
        metrics["critic/vf_explained_var"] = explained_variance(values_T, estimated.returns_T)
    return advantages_T, estimated.returns_T, metrics


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """1 where the critic foresees all, 0 where it does no better than a constant; 0 too where nothing varies."""
    variance = float(returns_T.double().var(unbiased=False))
    return 1 - float((returns_T - values_T).double().var(unbiased=False)) / variance if variance > 0 else 0.0


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}/{kind}": float(getattr(values.double(), kind)()) for kind in ("mean", "max", "min")}
