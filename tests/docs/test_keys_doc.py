"""The tables of docs/coming-from-verl.md are up to date with the schema."""

import importlib.util
import re
from pathlib import Path

import pytest

from ragen.config import v1
from ragen.config.keys import FIELDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("keys_script", ROOT / "scripts/docs/keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(script):
    return script.PAGE.read_text(encoding="utf-8")


def rows(text):
    return dict(re.findall(r"^\| `([\w.]+)` \| .* \| ([^|]*) \|$", text, re.MULTILINE))


def test_the_page_is_up_to_date(script, text):
    assert script.page(text) == text, "run scripts/docs/keys.py"


def test_every_key_has_its_row(text):
    found = rows(text)
    missing = [key for key in FIELDS if key not in found and key not in ("custom_envs", "ray_kwargs.ray_init")]
    missing += [key for key, spec in v1.KEYS.items() if key not in found]
    assert not missing


def test_a_row_of_each_kind(text):
    found = rows(text)
    assert found["trainer.test_freq"] == "the same key, with another default", "its last row is that of v1"
    assert found["seed.val"] == "same"
    assert found["actor_rollout_ref.rollout.name"].startswith("**changed** from `vllm`: sampler and learner share")
    assert found["actor_rollout_ref.rollout.n"].startswith("no effect: es_manager.train.group_size")
    assert found["actor_rollout_ref.rollout.stop_at_answer"] == "–"
    assert found["training.n_rollout"] == "`es_manager.train.group_size`"
    assert found["training.no_think_rl"] == "`agent_proxy.enable_think`, inverted"
    assert found["training.total_epochs"].startswith("`trainer.total_training_steps`, computed: 10000 levels")


def test_a_page_without_its_marks_is_refused(script):
    with pytest.raises(ValueError, match="keys: end"):
        script.page("no marks")


def test_what_stands_around_the_tables_stays(script):
    made = script.page(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    assert made.startswith(f"before\n{script.BEGIN}\n") and made.endswith(f"{script.END}\nafter\n")
    assert "\nold\n" not in made
