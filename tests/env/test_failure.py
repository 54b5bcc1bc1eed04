"""The boundary to an environment's code."""

import math
import pickle
import signal
import sys
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from faulty_line import FaultyConfig, FaultyLine, Panic
from hypothesis import given
from hypothesis import strategies as st

from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.cli import main
from ragen.env.base import Transition
from ragen.env.check import ContractError, check_environment
from ragen.env.failure import MAX_REWARD, EnvironmentFailed, WrongValue, call, checked_reward, level
from ragen.env.solve import Budget, baselines

FIVE = Budget(turns=5, actions_per_turn=1, actions=5)


def failure_of(code, limit=None):
    with pytest.raises(EnvironmentFailed) as caught:
        call(code, level("Line", 7, "val"), limit)
    return caught.value


def env(**settings):
    return FaultyLine(FaultyConfig(**settings))


def step_of(fault):
    line = env(fault=fault)
    return lambda: checked_reward(line.step(line.reset(0), 1))


@pytest.mark.parametrize(
    ("fault", "reason", "said"),
    [
        ("raise", "raised", r"the environment raised ValueError: boom \N{REPLACEMENT CHARACTER}[31m (faulty_line.py:"),
        ("recursion", "raised", "raised RecursionError: "),
        ("exit", "exited", "tried to end the program with SystemExit: 0 (faulty_line.py:"),
        ("panic", "exited", "Panic: out of luck"),
        ("not a number", "bad_reward", "the reward nan"),
        ("infinite", "bad_reward", "the reward inf"),
        ("big integer", "bad_reward", "the reward inf"),
        ("huge", "bad_reward", "the reward 1e+300"),
        ("nothing", "bad_reward", "None as the reward"),
        ("text", "bad_reward", "a value of type str as the reward"),
        ("complex", "bad_reward", "a value of type complex as the reward"),
        ("tuple", "bad_result", "step returned a value of type tuple, not a Transition"),
        ("number", "bad_result", "step returned a value of type int"),
    ],
)
def test_each_fault_has_its_reason_and_names_the_level(fault, reason, said):
    failure = failure_of(step_of(fault))
    assert failure.reason == reason
    assert str(failure).startswith("Line, val level 7: ")
    assert said.replace(r"\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}") in str(failure)
    assert "\n" not in str(failure) and len(failure.trace) <= 4000
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.reason, copy.trace) == (str(failure), failure.reason, failure.trace)


@pytest.mark.parametrize("fault", ["loop", "sleep", "deaf"])
def test_what_hangs_is_ended(fault):
    before = signal.getsignal(signal.SIGALRM)
    failure = failure_of(step_of(fault), limit=0.05)
    assert failure.reason == "timeout" and "took longer than 0.05 s (es_manager.env_timeout)" in str(failure)
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_catches_the_alarm_is_late_all_the_same():
    def late():
        try:
            time.sleep(60)
        except BaseException:
            return 7

    assert failure_of(late, limit=0.05).reason == "timeout"


def test_what_is_in_time_is_not_disturbed_and_a_timer_of_others_runs_on():
    before = signal.signal(signal.SIGALRM, lambda *given: None)
    signal.setitimer(signal.ITIMER_REAL, 1000, 5)
    try:
        assert call(lambda: 7, "here", limit=0.5) == 7
        left, again = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < left <= 1000 and again == 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_there_is_no_limit_in_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(call(lambda: time.sleep(0.1) or 7, "here", limit=0.01)))
    thread.start()
    thread.join(60)
    assert results == [7]


def test_what_is_not_the_environment_s_passes():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted, "here", limit=1)
    ours = type("Preempted", (BaseException,), {"__module__": "ragen.run.interrupt"})

    def preempted():
        raise ours

    with pytest.raises(ours):
        call(preempted, "here", limit=1)
    inner = failure_of(step_of("raise"))
    assert failure_of(lambda: call(step_of("raise"), "inner")).where == "inner"
    assert inner.where == "Line, val level 7"
    with pytest.raises(Panic):
        call(step_of("panic"), "here", passes=(Panic,))


def test_an_exception_without_a_text():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def code():
        raise Mute

    assert "raised Mute: (no text)" in str(failure_of(code))


numbers = st.one_of(st.floats(), st.integers(), st.booleans(), st.fractions().filter(lambda value: abs(value) < 1e9))


@given(st.one_of(numbers, st.none(), st.text(), st.binary(), st.complex_numbers(), st.lists(st.floats())))
def test_a_reward_is_a_finite_number(reward):
    is_number = isinstance(reward, (float, int, Fraction)) and -MAX_REWARD <= reward <= MAX_REWARD
    if is_number:
        found = checked_reward(Transition(None, reward))
        assert type(found) is float and found == pytest.approx(float(reward))
    else:
        with pytest.raises(WrongValue) as caught:
            checked_reward(Transition(None, reward))
        assert caught.value.reason == "bad_reward"


@pytest.mark.parametrize("make", [np.float32, np.float64, np.array, torch.tensor, lambda value: torch.tensor([value])])
def test_the_numbers_of_libraries_are_numbers(make):
    assert checked_reward(Transition(None, make(0.5))) == 0.5
    with pytest.raises(WrongValue):
        checked_reward(Transition(None, make(math.nan)))


# --- everything else that calls an environment ----------------------------------------------------------------------


def test_baselines_name_the_level():
    with pytest.raises(EnvironmentFailed, match=r"FaultyLine, val level 12: the environment raised ValueError: boom"):
        baselines(env(fault="raise", seeds=(12,)), range(10, 20), "val", FIVE)
    with pytest.raises(EnvironmentFailed, match=r"val level 12: the environment took longer than 0\.05 s"):
        baselines(env(fault="loop", seeds=(12,)), range(10, 20), "val", FIVE, limit=0.05)


def test_the_kit_names_the_level():
    with pytest.raises(ContractError, match=r"seed 3, split 'train': the environment raised ValueError: boom"):
        check_environment(env(fault="raise", seeds=(3,), call="render"), fresh_process=False)


def test_a_level_that_fails_does_not_change_the_prompt():
    rules, tag = AgentRules(5, 2, "||", True, -0.1, "full", -1, "full"), FaultyLine.TAGS["FaultyLine"]
    whole, broken = (
        STYLES["full"](line, tag, rules, 100).system_text()
        for line in (env(), env(fault="exit", call="reset", seeds=(0, 5)))
    )
    assert whole == broken and "Up, Down, Left" in whole


def test_a_module_that_exits_when_it_is_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["play", "leaving:Line", "--agent", "random"]) == 2
    assert "import failed: leaving:Line: the environment tried to end the program" in capsys.readouterr().err
    sys.modules.pop("leaving", None)


BROKEN = """
from dataclasses import dataclass
from faulty_line import FaultyConfig, FaultyLine

@dataclass(frozen=True)
class BrokenConfig(FaultyConfig):
    fault: str = "raise"
    call: str = "{}"

class Broken(FaultyLine):
    Config = BrokenConfig
"""


@pytest.mark.parametrize("call", ["reset", "step", "render"])
def test_play_names_the_level(call, tmp_path, monkeypatch, capsys):
    (tmp_path / f"broken_{call}.py").write_text(BROKEN.format(call))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["play", f"broken_{call}:Broken", "--agent", "random", "--seed", "7"]) == 4
    error = capsys.readouterr().err
    assert "val level" in error and "7: the environment raised ValueError: boom" in error and "Traceback" not in error
