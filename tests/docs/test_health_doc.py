"""docs/how_to_read_a_run.md and docs/metrics.md name every check, and the limits that are in force."""

import re
from pathlib import Path

import pytest

from ragen.diagnose.checks import CHECKS
from ragen.diagnose.history import Limits

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how_to_read_a_run.md").read_text(encoding="utf-8")
ROWS = dict(
    (name, row)
    for names, row in re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE, re.M)
    for name in re.findall(r"`(\w+)`", names)
)
# What the page says of a limit, and the limit.
TOLD = {
    "template_collapse": (0.25, lambda limits: limits.regimes.information_share, "a quarter"),
    "low_entropy_collapse": (0.25, lambda limits: limits.regimes.entropy_share, "a quarter"),
    "thinking_lost": (0.5, lambda limits: limits.thinking_share, "half as many"),
    "format_lost": (0.2, lambda limits: limits.format_rise, "20 points"),
    "entropy_explosion": (1.5, lambda limits: limits.entropy_high_share, "half more"),
    "entropy_cliff": (0.25, lambda limits: limits.entropy_low_share, "a quarter"),
    "success_falls": (0.5, lambda limits: limits.success_share, "half"),
    "rewards_alike": (0.45, lambda limits: limits.spread_share, "45 %"),
    "noise_blown_up": (0.2, lambda limits: limits.blown_up, "a fifth"),
    "empty_filter": (2 / 5, lambda limits: limits.empty_share + 0.1, "2 of the last 5"),
    "replies_alike": (0.6, lambda limits: limits.distinct_share, "40 % fewer"),
    "replies_repeat_themselves": (0.15, lambda limits: limits.repeats_rise, "15 points"),
    "replies_cut": (0.15, lambda limits: limits.cut_rise, "15 points"),
    "replies_longer": (2.0, lambda limits: limits.length_high_share, "twice"),
    "replies_shorter": (0.5, lambda limits: limits.length_low_share, "half"),
    "policy_jumps": (0.1, lambda limits: limits.policy_kl, "0.1"),
    "many_clipped": (0.1, lambda limits: limits.clip_fraction, "a tenth"),
    "sampler_differs": (0.005, lambda limits: limits.sampler_kl, "0.005"),
    "gradient_spike": (15.0, lambda limits: limits.spike, "15 times"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_is_explained(name):
    assert name in ROWS
    assert f"`{name}`" in (DOCS / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TOLD)
def test_the_limits_are_those_in_force(name):
    told, limit, words = TOLD[name]
    assert limit(Limits()) == pytest.approx(told)
    assert words in ROWS[name]


def test_only_what_has_no_limit_is_without_one():
    assert CHECKS.keys() - TOLD.keys() == {"not_finite", "no_valid_reply"}
