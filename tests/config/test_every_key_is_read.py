"""A key does something, or says that it does not: tiny runs are watched for the keys that they read.

Checking a key, printing it and storing it is not using it. A key that others follow (`${model_path}`) is used when one
of these is.
"""

import re
from pathlib import Path

import pytest
import yaml
from recorded_runs import SMALL, all_keys, reasons_without_effect, recorded, watched_configs

from ragen.config import tree
from ragen.config.compose import resolve
from ragen.config.schema import Config
from ragen.config.validate import validate
from ragen.errors import ConfigError

NOT_BUILT_YET = {
    key: feature
    for feature, keys in yaml.safe_load((Path(__file__).parents[1] / "data/not_built_yet.yaml").read_text()).items()
    for key in keys
}

# Keys whose only effect is that every other value is refused.
CHECKED_ONLY = {
    "actor_rollout_ref.rollout.name": "vllm",
    "agent_proxy.batch_adjust_mode": "copy",
    "data.train_batch_size": 7,
    "sft.data_generation.prefix": "base",
}


def followers() -> dict[str, set[str]]:
    """Key -> the keys whose default follows it."""
    found: dict[str, set[str]] = {}
    for key, default in tree.leaves(Config()).items():
        for followed in re.findall(r"\$\{([^}]+)\}", str(default)):
            found.setdefault(followed, set()).add(key)
    return found


def read_keys() -> set[str]:
    """Those that a run has read, and those that they follow."""
    read, follow = set(recorded().readers), followers()
    while more := {key for key, others in follow.items() if others & read} - read:
        read |= more
    return read


def test_the_runs_ended_as_they_should():
    assert recorded().statuses == [0] * 9 + [3, 0]


def test_every_key_is_read_or_says_why_not():
    silent = set(all_keys()) - read_keys() - set(reasons_without_effect()) - set(NOT_BUILT_YET) - set(CHECKED_ONLY)
    assert not silent, f"no run reads these, and they do not say so (no_effect in schema.py): {sorted(silent)}"


def test_what_has_no_effect_is_not_read():
    lies = {key: recorded().readers[key] for key in reasons_without_effect() if key in recorded().readers}
    assert not lies, f"marked to have no effect, and read: {lies}"


def test_what_is_not_built_yet_is_still_not():
    """So that the list shrinks."""
    unknown = set(NOT_BUILT_YET) - set(all_keys())
    assert not unknown, f"no such keys: {sorted(unknown)}"
    built = {key: recorded().readers.get(key) for key in NOT_BUILT_YET if key in read_keys()}
    assert not built, f"these are read now: take them off tests/data/not_built_yet.yaml: {built}"
    marked = set(NOT_BUILT_YET) & set(reasons_without_effect())
    assert not marked, f"these are marked now: take them off tests/data/not_built_yet.yaml: {sorted(marked)}"


@pytest.mark.parametrize("key", CHECKED_ONLY)
def test_other_values_are_refused(key):
    assert key not in read_keys(), f"{key} is read now: take it off CHECKED_ONLY"
    with pytest.raises(ConfigError) as caught:
        resolve([f"{key}={CHECKED_ONLY[key]}"], environ={})
    assert caught.value.key == key


# --- the watching itself ------------------------------------------------------------------------------------------


def test_storing_and_checking_a_config_uses_none_of_it():
    config = resolve(["sokoban", *SMALL], environ={}).config
    with watched_configs() as readers:
        again = tree.build(Config, tree.to_dict(config))
        tree.leaves(again)
        repr(again)
        assert again == config
        validate(again)
    assert not readers


def test_a_read_is_noted_with_its_key_and_its_reader():
    from ragen.train.levels import UniformLevels, slots

    with watched_configs() as readers:
        config = resolve(["model_path=pocket"], environ={}).config
        UniformLevels(config).choose(slots(config, 1))
    assert readers.pop("data.train_data_num") == {"train/levels.py"}
    assert readers.pop("es_manager.train.group_size") == {"train/levels.py"}
    assert "es_manager.val.group_size" not in readers
    before = {key: set(found) for key, found in readers.items()}
    UniformLevels(config).choose(slots(config, 2))
    assert readers == before, "and nothing is noted afterwards"


@pytest.mark.parametrize("words", [[], ["trainer.save_freq=5", "seed.val=9"]])
def test_resolving_a_config_uses_none_of_it(words):
    with watched_configs() as readers:
        resolve(words, environ={})
    assert not readers
