"""Your own environment: write it, check it, measure it and play it, without registering it.

    python examples/own_environment.py

The class is the one that docs/add-an-environment.md explains.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ragen.cli import main as ragen
from ragen.env.base import Environment, Tag, Transition, split_index
from ragen.env.check import check_environment
from ragen.env.solve import Budget, baselines
from ragen.prng import bits


class LineState(NamedTuple):
    """Where the walker is."""

    position: int


@dataclass(frozen=True)
class LineConfig:
    """The settings of `NumberLine`."""

    goal: int = 5
    wind: float = 0.2

    def __post_init__(self):
        if self.goal < 1:
            raise ValueError(f"goal={self.goal}: at least 1 is needed")
        if not 0 <= self.wind < 1:
            raise ValueError(f"wind={self.wind}: a chance below 1 is needed")


class NumberLine(Environment):
    """Reach the goal; the edge of the world is at 0."""

    Config = LineConfig
    TAGS: ClassVar[dict[str, Tag]] = {"NumberLine": Tag(max_actions_per_traj=10)}

    def reset(self, seed, split="train"):
        split_index(split)  # refuses an unknown split
        return LineState(bits("number_line", split, seed) % self.config.goal)

    def step(self, state, action, noise=0.0):
        position = state.position + action
        if noise < self.config.wind:
            position -= 1
        position = max(position, 0)
        won = position >= self.config.goal
        return Transition(LineState(position), float(won), done=won, success=won, effective=position != state.position)

    def chances(self, state, action):
        wind = self.config.wind
        return ((1.0, 0.0),) if wind == 0 else ((wind, 0.0), (1 - wind, wind))

    def render(self, state):
        return f"You stand at {state.position}. The goal is at {self.config.goal}."

    def task(self):
        text = "You walk along a line of numbers. Reach the goal; that earns 1."
        return text + (" Now and then the wind blows you back by 1." if self.config.wind else "")

    def action_names(self, state):
        return {+1: "Forward", -1: "Back", +2: "Jump"}


def main() -> int:
    check_environment(NumberLine())  # raises ContractError at the first broken promise
    reached = baselines(NumberLine(), range(100), "val", Budget(turns=5, actions_per_turn=2, actions=10))
    print(f"success: random play {reached.random:.0%}, optimal play {reached.optimal:.0%}")
    return ragen(["play", "own_environment:NumberLine", "--agent", "optimal", "--seed", "3"])


if __name__ == "__main__":
    raise SystemExit(main())
