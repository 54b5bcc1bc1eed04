"""docs/metrics.md names every metric that a run writes, and none that no run writes."""

import re
from pathlib import Path

import pytest
from recorded_runs import recorded

from ragen.algo.filter import METRICS, REASONS
from ragen.diagnose.early_stop import RULES
from ragen.statistics import LENGTH_BINS, UNSOLVABLE, length_bin

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")


def named() -> list[str]:
    """The names in the first column of the tables."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name: str) -> re.Pattern:
    """`val-env/<tag>/success` stands for any one word in place of `<tag>`."""
    parts = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def test_every_metric_of_a_run_is_named():
    patterns = [pattern(name) for name in named()]
    unnamed = [metric for metric in recorded().metrics if not any(p.fullmatch(metric) for p in patterns)]
    assert not unnamed, f"docs/metrics.md does not name {sorted(unnamed)}"


@pytest.mark.parametrize("name", named())
def test_every_name_is_one_that_a_run_writes(name):
    assert any(pattern(name).fullmatch(metric) for metric in recorded().metrics), f"no run writes {name}"


def test_no_name_stands_there_twice():
    assert len(named()) == len(set(named()))


def test_the_words_that_placeholders_stand_for_are_all_there():
    lengths = [length_bin(low) for low, _ in LENGTH_BINS] + [UNSOLVABLE]
    quantities = {metric.quantity for metric in METRICS.values()}
    for word in (*RULES, *lengths, *quantities):
        assert f"`{word}`" in PAGE, word
    assert len([name for name in named() if "filter_reason" in name]) == len(REASONS)
