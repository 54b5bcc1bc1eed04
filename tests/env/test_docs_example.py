"""The example in `docs/add-an-environment.md` is run as it stands."""

import re
import sys
from pathlib import Path

import pytest

from ragen.env.base import Tag
from ragen.env.check import check_environment
from ragen.env.registry import environment_class, make
from ragen.env.solve import Budget, optimal_success

GUIDE = Path(__file__).parents[2] / "docs" / "add-an-environment.md"
PATH = "number_line:NumberLine"


@pytest.fixture(scope="module")
def code_blocks():
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def installed(code_blocks, tmp_path_factory):
    """The first block, saved under the name that the guide tells."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "number_line.py").write_text(code_blocks[0])
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("number_line", None)


def test_it_keeps_the_contract_in_several_settings():
    cls = environment_class(PATH)
    for settings in ({}, {"wind": 0.0}, {"goal": 1, "wind": 0.9}):
        check_environment(cls(cls.Config(**settings)))


def test_the_other_blocks_run(code_blocks, capsys):
    names = {"NumberLine": environment_class(PATH)}
    for block in code_blocks[1:]:
        exec(block, names)
    assert "Baselines(random=0." in capsys.readouterr().out


def test_its_tag_and_a_tag_of_one_s_own():
    own = environment_class(PATH).TAGS["NumberLine"]
    assert make(own).config.goal == 5
    windy = make(Tag(env_type=PATH, env_config={"goal": 7, "wind": 0.4}))
    assert "7" in windy.render(windy.reset(0))
    with pytest.raises(ValueError, match="'wind'"):
        make(Tag(env_type=PATH, env_config={"winde": 0.4}))


def test_its_optimum_is_the_one_worked_by_hand():
    cls = environment_class(PATH)
    env = cls(cls.Config(goal=2, wind=0.25))
    state = env.reset(0)._replace(position=0)
    # A jump arrives with 0.75; blown back to 1, the second jump arrives for certain.
    assert optimal_success(env, state, Budget(1, 1, 1)) == pytest.approx(0.75)
    assert optimal_success(env, state, Budget(2, 1, 2)) == pytest.approx(1.0)
