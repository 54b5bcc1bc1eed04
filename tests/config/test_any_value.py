"""Whatever is typed for a key, the answer is a config or one clear message: never another exception."""

import contextlib
from functools import cache
from itertools import cycle

import pytest

from ragen.config import compose, recipe, v1
from ragen.config.keys import FIELDS
from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.errors import ConfigError

VALUES = ("abc", "", "None", "-3", "0", "1.5", "[1]", "{a: 1}")
TAG_KEYS = [key for key in leaves(Config()) if key.startswith(("custom_envs.CoordSokoban.", "custom_envs.Bandit."))]
GROUPS = ("trainer", "training", "env", "env.env_kwargs", "custom_envs", "custom_envs.CoordSokoban", "lora", "sft")


@pytest.fixture(autouse=True)
def _recipes_composed_once(monkeypatch):
    """Hydra and the origins take most of the time, and are not in question here."""
    monkeypatch.setattr(compose, "compose_recipe", cache(recipe.compose_recipe))
    monkeypatch.setattr(compose.TracedTree, "origins", lambda self: {})


def try_values(key: str, values: tuple[str, ...], *start: str) -> None:
    for value in values:
        with contextlib.suppress(ConfigError):
            compose.resolve([*start, f"{key}={value}"], environ={})


def cases(keys: list[str]) -> list:
    """For each key two of the values, which take turns; all of them in the slow tests."""
    pairs = cycle(zip(VALUES[::2], VALUES[1::2], strict=True))
    quick = [pytest.param(key, next(pairs), id=key) for key in keys]
    return quick + [pytest.param(key, VALUES, id=f"{key}-all", marks=pytest.mark.slow) for key in keys]


@pytest.mark.parametrize(
    ("key", "values"), cases([*v1.KEYS, "env.name", "env.env_kwargs.dim_x", "env.env_kwargs.none"])
)
def test_any_value_of_the_v1_command_line(key, values):
    try_values(key, values, "sokoban")


@pytest.mark.parametrize(("key", "values"), cases([*(key for key in FIELDS if key not in v1.KEYS), *TAG_KEYS, *GROUPS]))
def test_any_value_of_the_tree(key, values):
    try_values(key, values)


@pytest.mark.parametrize("key", [key for key in v1.KEYS if v1.KEYS[key].no_effect])
def test_a_key_without_effect_has_a_type_too(key):
    with pytest.raises(ConfigError) as caught:
        compose.resolve(["sokoban", f"{key}={{a: 1}}"], environ={})
    assert (caught.value.code, caught.value.key) == ("type", key)
