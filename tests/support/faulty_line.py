"""A walk along a line of numbers whose environment fails where its settings say so.

    custom_envs.Faulty.env_type=faulty_line:FaultyLine
    custom_envs.Faulty.env_config={"fault":"raise","call":"step","seeds":[10001],"times":1}

`times` is how often it fails in this process, over all levels; 0: always. A level fails at its `step_number`-th step.
"""

import sys
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ragen.env.base import Environment, Tag, Transition, split_index

WAYS = {
    "not a number": float("nan"),
    "infinite": float("inf"),
    "nothing": None,
    "text": "1.0",
    "huge": 1e300,
    "big integer": 10**400,
    "complex": 1j,
}
MOVES = {1: +1, 2: -1, 3: +2, 4: 0}
num_failures = 0


class LineState(NamedTuple):
    seed: int
    split: str
    position: int = 0
    num_steps: int = 0


@dataclass(frozen=True)
class FaultyConfig:
    goal: int = 3
    fault: str = ""  # a key of WAYS, or one of the branches below
    call: str = "step"  # reset, step, render, names, parse
    seeds: tuple[int, ...] = ()  # none: all levels
    splits: tuple[str, ...] = ("train", "val", "test")
    step_number: int = 0
    times: int = 0


class Panic(BaseException):
    """What some libraries raise."""


class FaultyLine(Environment):
    Config = FaultyConfig
    fault: ClassVar[str | None] = None  # a test may set all settings here instead: the command then stays the same
    step_number = 0
    TAGS: ClassVar[dict[str, Tag]] = {"FaultyLine": Tag(max_actions_per_traj=4)}

    def reset(self, seed, split="train"):
        split_index(split)
        state = LineState(seed, split)
        return self.failing("reset", state, state)

    def step(self, state, action, noise=0.0):
        position = max(0, state.position + MOVES[action])
        after = state._replace(position=position, num_steps=state.num_steps + 1)
        won = position >= self.config.goal
        transition = Transition(after, float(won), done=won, success=won, effective=position != state.position)
        return self.failing("step", state, transition)

    def render(self, state):
        return self.failing("render", state, f"You stand at {state.position} of {self.config.goal}.")

    def task(self):
        return "Walk to the goal; that earns 1."

    def action_names(self, state):
        return self.failing("names", state, {1: "Up", 2: "Down", 3: "Left", 4: "Right"})

    def parse_action(self, state, text):
        return self.failing("parse", state, super().parse_action(state, text))

    def failing(self, call, state, result):
        """The result, or the fault that is due here."""
        global num_failures
        config = self if self.fault is not None else self.config
        is_here = call == config.call and (not config.seeds or state.seed in config.seeds)
        if not config.fault or not is_here or state.split not in config.splits or state.num_steps < config.step_number:
            return result
        if config.times and num_failures >= config.times:
            return result
        num_failures += 1
        return fail(config.fault, result)


def fail(fault, result):
    if fault in WAYS:
        return result._replace(reward=WAYS[fault])
    if fault == "raise":
        raise ValueError("boom \x1b[31m")
    if fault == "exit":
        sys.exit(0)
    if fault == "panic":
        raise Panic("out of luck")
    if fault == "recursion":
        return fail(fault, result)
    if fault == "loop":
        while True:
            pass
    if fault == "deaf":
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue
    if fault == "sleep":
        time.sleep(3600)
    if fault == "tuple":
        return tuple(result)
    if fault == "number":
        return 7
    raise AssertionError(fault)
