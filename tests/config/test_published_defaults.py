"""The resolved trees against the published tables, key by key."""

from pathlib import Path

import pytest
import yaml

from ragen.config.compose import resolve
from ragen.config.tree import leaves
from ragen.env.registry import make

PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "data/published_defaults.yaml").read_text())

# The departures, all of them. docs/architecture.md gives the reasons.
EXCEPTIONS = {
    "actor_rollout_ref.rollout.name": "native",
    "agent_proxy.batch_adjust_mode": "none",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.use_ref": False,  # derived: no KL term in the published defaults
}


def assert_matches(tree: dict, published: dict) -> None:
    wrong = {
        key: (tree.get(key, "missing"), value)
        for key, value in published.items()
        if tree.get(key, "missing") != EXCEPTIONS.get(key, value)
    }
    assert not wrong, "\n".join(
        f"{key}: resolved {ours!r}, published {theirs!r}" for key, (ours, theirs) in wrong.items()
    )


@pytest.mark.parametrize("recipe", ["base", "eval", "_1_bandit", "_2_sokoban", "_3_frozen_lake"])
def test_recipe_matches_the_tables(recipe):
    tree = leaves(resolve([], config_name=recipe, environ={}).config)
    published = PUBLISHED["base"] | ({} if recipe == "base" else PUBLISHED[recipe])
    assert_matches(tree, published)


@pytest.mark.parametrize("environment", ["sokoban", "frozenlake", "two_armed_bandit"])
def test_older_dialect_matches_the_tables(environment):
    tree = leaves(resolve([environment], environ={}).config)
    assert_matches(tree, PUBLISHED["v1"] | PUBLISHED[f"v1_{environment}"])


def test_older_bandit_has_its_arms():
    arms = make(resolve(["two_armed_bandit"], environ={}).config.custom_envs["TwoArmedBandit"]).config
    assert (arms.low_risk_name, arms.high_risk_name) == ("phoenix", "dragon")
    assert arms.low_risk_val_name is None and arms.high_risk_val_name is None


def test_exceptions_are_documented():
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    table = text.partition("## Where the tree departs")[2]
    for key in EXCEPTIONS:
        assert f"\n| `{key}` |" in table


def test_every_default_differs_from_nothing_it_should_not():
    """A recipe changes what its table lists and nothing else."""
    base = leaves(resolve([], environ={}).config)
    for recipe in ("eval", "_1_bandit", "_2_sokoban", "_3_frozen_lake"):
        tree = leaves(resolve([], config_name=recipe, environ={}).config)
        changed = {key for key in tree if tree[key] != base.get(key)}
        assert changed <= set(PUBLISHED[recipe])
