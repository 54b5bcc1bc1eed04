"""Every refusal of a config, as the user reads it: it names the key, says what would be right, and is plain English."""

import re
from functools import cache
from pathlib import Path

import pytest
from test_refusals import REFUSED, refusal

import ragen.config
from ragen import coerce
from ragen.config.schema import Config
from ragen.config.tree import build
from ragen.env.base import Tag
from ragen.errors import ConfigError

FILTER = "actor_rollout_ref.rollout.rollout_filter_include_zero=False"
# What the table of refusals does not hold: overrides and options of `resolve`.
OTHERS = [
    (["env.name=sokoban"], {}),
    (["~custom_envs.CoordSokoban.env_config.nothing"], {}),
    (["sokoban", "~training.n_rollout=8"], {}),
    (["sokoban", "~env.env_kwargs.nothing"], {}),
    (["es_manager.train.group_size=1", FILTER, "ppo_mini_batch_size=4", "algorithm.adv_estimator=gae"], {}),
    (["trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_group_size=1", FILTER], {}),
    (["data.train_batch_size=7"], {}),
    (["rl_or_sft=sft", "sft.env_type=frozenlake"], {}),
    (["rl_or_sft=sft", "es_manager.val.env_configs.tags=[Bandit,FrozenLake]"], {}),
    (["rl_or_sft=sft", "sft.sokoban.dim_x=1"], {}),
    (["rl_or_sft=sft", "sft.training.num_gpus=2", "sft.training.micro_batch_size=3"], {}),
    (["rl_or_sft=sft_then_rl", "model_path=x", "sft.training.base_model=y"], {}),
    (["trainer.default_local_dir=/dev/null/a"], {}),
    (["trainer.n_gpus_per_node=2"], {"environ": {"CUDA_VISIBLE_DEVICES": "0"}}),
    (["sokoban"], {"config_name": "_2_sokoban"}),
    ([], {"config_name": "nothing"}),
    ([], {"config_name": "mine", "config_dir": "/no/such/directory"}),
    (["sokoban", "training.n_rollout=0", "lora.rank=-1"], {}),
]
ELSEWHERE = ("environment", "agent")  # ragen.env and ragen.agent word these
WAY_OUT = re.compile(
    r"\b(must|takes|use|set|name|names|write|choose|give|keep|needs|need|there are|did you mean|known"
    r"|sections|leave|leaves|make|change|ask|put|raise|its value is|no such entry|not found|is not|listed|cannot|one of|not a)\b",
    re.IGNORECASE,
)
BANNED = (
    "goes on", "mend", "cannot be had", "is no folder", "is no device", "is no model", "so many", "whoever", "of its own",
    "is told", "in vain", "some day", "dialect", "spoilt", "learnt", "taken back", "takes back", "others than",
)  # fmt: skip


@pytest.fixture
def errors() -> list[ConfigError]:
    return rendered()


@cache
def rendered() -> list[ConfigError]:
    found = [refusal(*overrides) for overrides, *_ in REFUSED]
    found += [refusal(*overrides, **options) for overrides, options in OTHERS]
    with pytest.raises(ConfigError) as caught:
        build(Tag, {"no_such": 1})
    found.append(caught.value)
    return [problem for error in found for problem in error.problems]


def test_every_code_is_shown(errors):
    files = [*Path(ragen.config.__file__).parent.glob("*.py"), Path(coerce.__file__)]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    codes = {*re.findall(r'code="([\w-]+)"', sources), *re.findall(r'tree\.refuse\("([\w-]+)"', sources)}
    assert len(codes) > 30
    assert codes - {error.code for error in errors} <= {"bad-recipe", "missing"}, "test_compose.py shows bad recipes"
    assert all(error.code for error in errors)


def test_messages_name_their_key_and_a_way_out(errors):
    for error in errors:
        assert error.key is None or error.key in str(error)
        rest = str(error).removeprefix(error.key or "")
        assert WAY_OUT.search(rest) or error.code in ELSEWHERE, f"says what would be right: {error}"


def test_messages_are_plain(errors):
    for error in errors:
        text = str(error)
        assert not text.endswith((".", " ", ":", ";")) and "  " not in text and "\n" not in text, text
        found = [words for words in BANNED if words in text.lower()]
        assert not found or error.code in ELSEWHERE, f"{found}: {text}"
        assert len(text) < 700, text


def test_ranges_are_plain():
    from ragen.config import ranges

    known = [value.text for value in vars(ranges).values() if isinstance(value, ranges.Range)]
    assert len(known) > 7
    assert all(re.match(r"(must|takes|is a|this|duplicating|rows)\b", text) and text[-1] != "." for text in known)


def test_a_config_of_another_shape_is_refused():
    with pytest.raises(ConfigError) as caught:
        build(Config, {"trainer": 5})
    assert (caught.value.code, caught.value.key) == ("group", "trainer")
