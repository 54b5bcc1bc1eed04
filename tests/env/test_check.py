"""The conformance kit passes every tag of the catalogue, and each of its checks can fail."""

import itertools
import sys
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from ragen.env.base import Environment, Transition
from ragen.env.check import ContractError, check_environment
from ragen.env.registry import catalogue, environment_class, make


@pytest.mark.parametrize("tag", catalogue())
def test_every_tag_keeps_the_contract(tag):
    check_environment(make(catalogue()[tag]), seeds=range(3))


class CoinState(NamedTuple):
    """How many heads, out of how many tosses."""

    level: int
    heads: int = 0
    tosses: int = 0


class Coin(Environment):
    """Toss a coin until two heads; `Keep` changes nothing. Correct: the broken ones below each change one thing."""

    @dataclass(frozen=True)
    class Config:
        """No settings."""

    def reset(self, seed, split="train"):
        return CoinState(seed % 5)

    def step(self, state, action, noise=0.0):
        if action == "keep":
            return Transition(state, 0.0, effective=False)
        heads = state.heads + (noise < 0.25)
        tosses = state.tosses + 1
        won = heads == 2
        out = tosses == 5 and not won
        return Transition(CoinState(state.level, heads, tosses), float(won), won or out, won, True, out)

    def chances(self, state, action):
        return ((1.0, 0.0),) if action == "keep" else ((0.25, 0.1), (0.75, 0.5))

    def render(self, state):
        return f"coin {state.level}: {state.heads} heads in {state.tosses} tosses"

    def task(self):
        return "Toss two heads."

    def action_names(self, state):
        return {"toss": "Toss", "keep": "Keep it"}


def test_the_sound_example_passes():
    check_environment(Coin())


def broken(**methods):
    return type("Broken", (Coin,), methods)()


def stepping(change):
    """An environment whose transitions are changed."""
    return broken(step=lambda self, *arguments: change(Coin.step(self, *arguments)))


class UnhashableState(CoinState):
    __hash__ = None


class OpenState:
    """Equal by content and hashable, but anyone can change it."""

    def __init__(self, level):
        self.level = level

    def __eq__(self, other):
        return self.level == other.level

    def __hash__(self):
        return hash(self.level)


class ForgetfulState(CoinState):
    """Loses its content when pickled."""

    def __reduce__(self):
        return (CoinState, (99,))


_calls = itertools.count()


class Remembering(Coin):
    """Keeps the score in the instance instead of the state."""

    def __init__(self, config=None):
        super().__init__(config)
        self.name = next(_calls)

    def step(self, state, action, noise=0.0):
        after = super().step(state, action, noise)
        return after._replace(reward=float(self.name))


class SlottedState(OpenState):
    """Just as open, with a slot instead of a `__dict__` entry."""

    __slots__ = ("level",)

    def __reduce__(self):
        return (SlottedState, (self.level,))


class TrailState:
    """Its fields cannot be set, but the list in one of them can be changed."""

    def __init__(self, level, trail=()):
        object.__setattr__(self, "level", level)
        object.__setattr__(self, "trail", list(trail))

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def __eq__(self, other):
        return self.level == other.level

    def __hash__(self):
        return hash(self.level)

    def __reduce__(self):
        return (TrailState, (self.level, tuple(self.trail)))


class Trail(Coin):
    """Notes each step in the state that it was given."""

    def reset(self, seed, split="train"):
        return TrailState(seed)

    def render(self, state):
        return f"trail {state.level}"

    def step(self, state, action, noise=0.0):
        state.trail.append(action)
        return Transition(TrailState(state.level + 1), 0.0)


BROKEN = {
    "second reset": (broken(reset=lambda self, seed, split="train": CoinState(next(_calls))), "second reset"),
    "instances differ": (
        broken(reset=lambda self, seed, split="train": CoinState(id(self))),
        "another instance",
    ),
    "first observation": (
        broken(render=lambda self, state: f"{id(self)}"),
        "first observation differs",
    ),
    "unhashable": (broken(reset=lambda self, seed, split="train": UnhashableState(1)), "not hashable"),
    "mutable": (broken(reset=lambda self, seed, split="train": OpenState(1)), "can be changed"),
    "pickle": (broken(reset=lambda self, seed, split="train": ForgetfulState(1)), "pickled copy"),
    "no pickle": (broken(reset=lambda self, seed, split="train": (lambda: 0).__code__), "cannot be pickled"),
    "mutable slots": (broken(reset=lambda self, seed, split="train": SlottedState(1)), "can be changed"),
    "state changed": (Trail(), "changed its input state"),
    "not a transition": (broken(step=lambda self, state, action, noise=0.0: (state, 0.0)), "Transition"),
    "reward type": (stepping(lambda after: after._replace(reward=1)), "finite float"),
    "reward infinite": (stepping(lambda after: after._replace(reward=float("nan"))), "finite float"),
    "done type": (stepping(lambda after: after._replace(done=1)), "done must be a bool"),
    "success without done": (stepping(lambda after: after._replace(success=True, done=False)), "success without done"),
    "out of steps": (stepping(lambda after: after._replace(out_of_steps=True, done=False)), "out_of_steps without"),
    "won and out": (
        stepping(lambda after: after._replace(out_of_steps=True, done=True, success=True)),
        "not both",
    ),
    "effective": (stepping(lambda after: after._replace(effective=True)), "not effective"),
    "not deterministic": (stepping(lambda after: after._replace(reward=float(next(_calls)))), "second time"),
    "hidden state": (Remembering(), "outside the state"),
    "chances sum": (broken(chances=lambda self, state, action: ((0.5, 0.1),)), "add up to 0.5"),
    "chances negative": (broken(chances=lambda self, state, action: ((-0.5, 0.1), (1.5, 0.2))), "probability -0.5"),
    "chances noise": (broken(chances=lambda self, state, action: ((1.0, 1.0),)), r"\[0, 1\)"),
    "chances incomplete": (broken(chances=lambda self, state, action: ((1.0, 0.1),)), "does not list"),
    "chances wrong": (
        broken(chances=lambda self, state, action: ((1.0, 0.0),) if action == "keep" else ((0.5, 0.1), (0.5, 0.5))),
        "evenly spaced",
    ),
    "empty render": (broken(render=lambda self, state: " "), "empty text"),
    "render type": (broken(render=lambda self, state: 7), "must return a str"),
    "render changes": (broken(render=lambda self, state: f"{next(_calls)}"), "differs"),
    "empty task": (broken(task=lambda self: ""), "task"),
    "legend type": (broken(legend=lambda self: None), "legend"),
    "same names": (broken(action_names=lambda self, state: {"toss": "Go", "keep": "go"}), "same name"),
    "empty name": (broken(action_names=lambda self, state: {"toss": "", "keep": "go"}), "empty name"),
    "case": (
        broken(parse_action=lambda self, state, text: {"Toss": "toss", "Keep it": "keep"}.get(text.strip())),
        "must parse as",
    ),
    "nonsense": (
        broken(parse_action=lambda self, state, text: Coin.parse_action(self, state, text) or "keep"),
        "is not an action",
    ),
    "no actions": (broken(action_names=lambda self, state: {}), "sample_actions"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_every_check_can_fail(fault):
    env, message = BROKEN[fault]
    with pytest.raises(ContractError, match=message):
        check_environment(env, seeds=range(2), fresh_process=False)


def test_a_failure_names_seed_split_and_action():
    with pytest.raises(ContractError, match="seed 3, split 'val', step 0, action 'toss'"):
        check_environment(stepping(lambda after: after._replace(reward=2)), seeds=[3], splits=["val"])


def test_free_text_games_are_tried_with_given_actions():
    class FreeText(Coin):
        def action_names(self, state):
            return {}

        def parse_action(self, state, text):
            return text.strip() or None

    check_environment(FreeText(), sample_actions=lambda state: ["toss", "keep"])


def test_levels_that_depend_on_the_process_are_found(tmp_path, monkeypatch):
    (tmp_path / "salted_coin.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from ragen.env.base import Environment, Transition

            class SaltedCoin(Environment):
                @dataclass(frozen=True)
                class Config:
                    pass

                def reset(self, seed, split="train"):
                    return hash(f"{seed}{split}")  # salted anew in every process

                def step(self, state, action, noise=0.0):
                    return Transition(state + 1, 1.0, True, True)

                def render(self, state):
                    return f"number {state}"

                def task(self):
                    return "Say yes."

                def action_names(self, state):
                    return {1: "yes"}
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = environment_class("salted_coin:SaltedCoin")()
    check_environment(env, fresh_process=False)
    with pytest.raises(ContractError, match="fresh process"):
        check_environment(env)
    sys.modules.pop("salted_coin")
