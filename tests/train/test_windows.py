"""Training in every context window: each sampled token counts once, and advantages are those of a plain loop.

The windows cut an episode into one sequence or into one for each turn; what is estimated must not show it.
"""

import math
from statistics import mean, variance

import pytest
from tiny import ROLLOUT, TINY

from ragen.config.compose import resolve
from ragen.train import learner, rollouts, trainer

GAMMA, LAM, HIGH = 0.97, 0.9, 0.8
WORDS = [
    *TINY,
    "es_manager.train.env_groups=3",
    "agent_proxy.max_turn=3",
    "agent_proxy.max_context_window=2",
    f"{ROLLOUT}.rollout_filter_strategy=top_k_abs",
    f"{ROLLOUT}.rollout_filter_value=2",
    "ppo_mini_batch_size=4",
    "trainer.total_training_steps=2",
    "algorithm.adv_estimator=gae",
    f"algorithm.gamma={GAMMA}",
    f"algorithm.lam={LAM}",
    f"algorithm.high_level_gamma={HIGH}",
    "critic.optim.lr=0.003",
]
BI_LEVEL = ["agent_proxy.use_turn_scores=True", "algorithm.bi_level_gae=True"]


@pytest.fixture
def watched(monkeypatch):
    """Per step: the kept groups, the samples of the update, and what it aimed at."""
    steps = []

    def keep_groups(groups, *rest):
        selection = original_keep(groups, *rest)
        steps.append([groups, selection.kept])
        return selection

    def update_actor(model, optimizer, samples, targets, *rest):
        steps[-1] += [samples, targets]
        return original_update(model, optimizer, samples, targets, *rest)

    original_keep, original_update = rollouts.keep_groups, learner.update_actor
    monkeypatch.setattr(rollouts, "keep_groups", keep_groups)
    monkeypatch.setattr(learner, "update_actor", update_actor)
    return steps


# --- the plain loop -----------------------------------------------------------------------------------------------


def plain_gae(rewards, values, gamma, lam):
    """Over one stretch, from the back; nothing is expected after it."""
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.insert(0, following)
        next_value = value
    return advantages


def whole_episode(episode, values):
    """One list of values for each turn in, one of advantages for each turn out: the score is on the last token."""
    flat = [value for of_turn in values for value in of_turn]
    score = episode.final.reward + episode.final.penalty
    advantages = plain_gae([0.0] * (len(flat) - 1) + [score], flat, GAMMA, LAM)
    return [[advantages.pop(0) for _ in of_turn] for of_turn in values]


def turn_by_turn(episode, values):
    """First over turns, by the value of each one's last token; then over the tokens of each turn alone."""
    earned = [turn.result.reward + turn.result.penalty for turn in episode.turns]
    last = [of_turn[-1] for of_turn in values]
    returns = [value + more for value, more in zip(last, plain_gae(earned, last, HIGH, LAM), strict=True)]
    return [
        plain_gae([0.0] * (len(of_turn) - 1) + [outcome], of_turn, GAMMA, LAM)
        for of_turn, outcome in zip(values, returns, strict=True)
    ]


def expected(kept, values, estimate):
    """Of all tokens in order: whitened advantages, and returns. `values` are the critic's, in the same order."""
    advantages = []
    remaining = list(values)
    for episode in (episode for group in kept for episode in group.episodes):
        of_turns = [[remaining.pop(0) for _ in turn.reply_ids] for turn in episode.turns]
        advantages += [one for of_turn in estimate(episode, of_turns) for one in of_turn]
    assert not remaining
    centre, scale = mean(advantages), math.sqrt(variance(advantages) + 1e-8)
    returns = [one + value for one, value in zip(advantages, values, strict=True)]
    return [(one - centre) / scale for one in advantages], returns


def flat(tensors):
    return [value for tensor in tensors for value in tensor.tolist()]


# --- the tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "scores"),
    [
        ("full", "episode"),
        ("limited_multi_turn", "turn"),
        ("single_turn", "turn"),
        pytest.param("full", "turn", marks=pytest.mark.slow),
        pytest.param("limited_multi_turn", "episode", marks=pytest.mark.slow),
        pytest.param("single_turn", "episode", marks=pytest.mark.slow),
    ],
)
def test_advantages_of_real_steps(tmp_path, watched, window, scores):
    words = [*WORDS, f"agent_proxy.context_window_mode={window}", *(BI_LEVEL if scores == "turn" else [])]
    config = resolve([*words, f"trainer.default_local_dir={tmp_path}"], environ={}).config
    assert trainer.train(config).status == "finished"
    assert len(watched) == 2
    for groups, kept, samples, targets in watched:
        assert len(groups) == 3 and len(kept) == 2
        assert_each_token_once(kept, samples, window)
        values = flat(targets.values)
        advantages, returns = expected(kept, values, turn_by_turn if scores == "turn" else whole_episode)
        assert flat(targets.advantages) == pytest.approx(advantages, abs=1e-4)
        assert flat(targets.returns) == pytest.approx(returns, abs=1e-4)
        assert [len(part) for part in targets.old_log_probs] == [sample.num_sampled for sample in samples]
    assert any(values)  # by now the critic expects something


def assert_each_token_once(kept, samples, window):
    episodes = [episode for group in kept for episode in group.episodes]
    assert len(samples) == (len(episodes) if window == "full" else sum(len(one.turns) for one in episodes))
    for index, episode in enumerate(episodes):
        mine = [sample for sample in samples if sample.episode_index == index]
        assert all(sample.episode is episode for sample in mine)
        trained = [
            token
            for sample in mine
            for token, sampled in zip(sample.sequence.ids, sample.sequence.sampled, strict=True)
            if sampled
        ]
        assert trained == [token for turn in episode.turns for token in turn.reply_ids]
