"""The worked example of docs/guide_rollout_filtering.md is what the filter does, and its keys have these defaults."""

import re
from pathlib import Path

from ragen.algo.filter import METRICS, STRATEGIES, FilterRule, select
from ragen.config.keys import FIELDS
from ragen.config.schema import Config
from ragen.config.tree import leaves

PAGE = (Path(__file__).parents[2] / "docs/guide_rollout_filtering.md").read_text(encoding="utf-8")
SCORES = [5.2, 4.8, 4.1, 3.0, 0.3, 0.2, 0.1, 0.0]
ROW = re.compile(
    r"^\| (\w+) \| ([\d.]+) \| (linear|softmax) \| (largest|smallest) \| (True|False) \| ([\d. ]+) \|$", re.M
)


def test_the_table_of_the_worked_example():
    rows = ROW.findall(PAGE)
    assert {row[0] for row in rows} == STRATEGIES.keys() - {"top_f"}
    for strategy, value, mode, end, include_zero, kept in rows:
        rule = FilterRule(strategy, float(value), end == "largest", include_zero == "True", mode, 0.01)
        found = [score for score, verdict in zip(SCORES, select(SCORES, rule), strict=True) if verdict.keep]
        assert found == [float(word) for word in kept.split()], (strategy, value, mode, end, include_zero)


def test_the_defaults_in_the_table_of_keys():
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|\n]+) \|[^|\n]*\| .* \|$", PAGE, re.M)
    defaults, rollout = leaves(Config()), "actor_rollout_ref.rollout."
    assert len(rows) == 12
    for name, told in rows:
        key = name if name in FIELDS else rollout + name
        assert str(defaults[key]) == told.strip("` "), key


def test_every_metric_and_strategy_is_named():
    for word in (*METRICS, *STRATEGIES):
        assert f"`{word}`" in PAGE, word
