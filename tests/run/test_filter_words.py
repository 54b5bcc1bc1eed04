"""What the filter did, in words."""

import pytest

from ragen.algo.filter import METRICS, REASONS, FilterRule, filter_metrics, select
from ragen.run.filter_words import filter_words


def words_of(rewards_G, rule, metric="reward_variance"):
    """After a real choice of the filter."""
    scores = [METRICS[metric].reduce(rewards) for rewards in rewards_G]
    return filter_words(filter_metrics(metric, rewards_G, scores, select(scores, rule)), metric, rule.largest)


def rule(strategy="top_p", value=0.9, largest=True, include_zero=False):
    return FilterRule(strategy, value, largest, include_zero, "linear", 0.01)


SPREAD, FAINT, SAME = [0.0, 10.0], [0.0, 0.1], [1.0, 1.0]
ALIKE, LOW = "all their episodes had the same reward", "kept 1 of 2 groups; 1 dropped: low reward variance"


@pytest.mark.parametrize(
    ("groups", "rule", "words"),
    [
        ([SPREAD] * 14 + [SAME] * 2, rule(value=1.0), f"kept 14 of 16 groups; 2 dropped: {ALIKE}"),
        ([SPREAD] * 15 + [SAME], rule(value=1.0), f"kept 15 of 16 groups; 1 dropped: {ALIKE.replace('their', 'its')}"),
        ([SPREAD] * 4, rule(value=1.0), "kept all 4 groups"),
        (
            [SPREAD, SPREAD, FAINT, FAINT, SAME],
            rule(),
            "kept 2 of 5 groups; 2 dropped: low reward variance (outside the top-p share); 1: all its episodes had the "
            "same reward",
        ),
        ([SPREAD, FAINT], rule(value=1.0, strategy="top_k_abs"), f"{LOW} (outside the top k)"),
        ([SPREAD, FAINT], rule(value=0.5, strategy="min_p"), f"{LOW} (too far from the best)"),
        ([SAME] * 3, rule(), f"kept none of 3 groups; 3 dropped: {ALIKE}"),
        (
            [SPREAD, FAINT],
            rule(strategy="top_k_abs", value=1, largest=False),
            "kept 1 of 2 groups; 1 dropped: high reward variance (outside the top k)",
        ),
    ],
)  # fmt: skip
def test_words(groups, rule, words):
    assert words_of(groups, rule) == words


@pytest.mark.parametrize("metric", METRICS)
def test_every_reason_and_every_metric_has_words(metric):
    for reason in REASONS:
        name = reason.replace(" ", "_").replace("-", "_")
        text = filter_words({"rollout/filter_kept_count": 1, f"rollout/filter_reason/{name}": 1}, metric)
        assert "{" not in text and "_" not in text


def test_before_the_first_step_and_with_a_reason_of_another_version():
    assert filter_words({}) == "no training step yet"
    metrics = {
        "rollout/filter_kept_count": 0,
        "rollout/filter_reason/kept": 0,
        "rollout/filter_reason/the_game_failed": 2,
    }
    assert filter_words(metrics) == "kept none of 2 groups; 2 dropped: the game failed"
