"""The environment interface: an immutable state and one pure `step`.

    env = Sokoban(Sokoban.Config(dim_room=(6, 6), num_boxes=1))
    state = env.reset(seed=123, split="val")            # always the same level
    after = env.step(state, action=2, noise=0.4)        # -> Transition; `state` does not change
    env.render(after.state)                             # what the agent reads

Play, rollouts, solvers, replay and fork all call this one `step`. All randomness comes from `noise`, a number in [0, 1)
that the caller draws (`ragen.prng.uniform`), so a step is a function of its arguments.

A new environment is a subclass in one file and one line in `registry.py`; `check.check_environment` tests the contract.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

Action = Hashable
State = Any

# Levels of different splits come from different random streams: seed 5 of `train` is not seed 5 of `val`.
SPLITS = ("train", "val", "test", "sft")


class Transition(NamedTuple):
    """The outcome of one step."""

    state: State
    reward: float
    done: bool = False  # the game is over: won, lost, or at its step limit
    success: bool = False  # the game was won
    effective: bool = True  # the action changed something
    out_of_steps: bool = False  # done only because the environment's step limit was reached


@dataclass
class Tag:
    """An entry of the catalogue (`custom_envs.<Tag>`): an environment, its settings, and the agent's limits in it."""

    env_type: str = ""  # a registry name, or `package.module:Class`
    max_actions_per_traj: int = 10
    max_tokens: int | None = 100  # length hint shown in the prompt; null: the reply limit
    env_instruction: str | None = None  # replaces the environment's task text
    end_on_invalid: bool = False  # a reply without a valid action ends the episode
    parallel_friendly: bool = field(
        default=False, metadata={"no_effect": "environments are stepped in one thread, in episode order"}
    )
    max_workers: int = field(
        default=32, metadata={"no_effect": "environments are stepped in one thread, in episode order"}
    )
    env_config: dict[str, Any] | None = None  # fields of the environment's `Config`


class Environment(ABC):
    """The rules of one game. An instance holds only settings; everything that changes is in the `State`."""

    Config: ClassVar[type]  # a frozen dataclass: the settings and their only defaults
    TAGS: ClassVar[dict[str, Tag]] = {}  # the catalogue entries of this environment
    HIDDEN_INFORMATION: ClassVar[bool] = False  # the text does not show the whole state: the optimum is unknown

    def __init__(self, config: Any = None):
        self.config = self.Config() if config is None else config

    # --- the game -----------------------------------------------------------------------------------------------

    @abstractmethod
    def reset(self, seed: int, split: str = "train") -> State:
        """The starting state of a level. States are immutable and hashable; equal states have equal futures."""

    @abstractmethod
    def step(self, state: State, action: Action, noise: float = 0.0) -> Transition:
        """Apply one action. Pure: the same arguments give the same transition, and `state` does not change."""

    def chances(self, state: State, action: Action) -> Sequence[tuple[float, float]] | None:
        """Every distinct outcome of `step(state, action, noise)` as (probability, a noise that causes it).

        Exact baselines need it. Deterministic games keep this default; return None if the outcomes cannot be listed.
        """
        return ((1.0, 0.0),)

    # --- exact answers from the game itself (`solve.py` searches where these return NotImplemented) ---------------

    def shortest_plan(self, state: State) -> tuple[Action, ...] | None:
        """The shortest sequence of actions that is certain to win, or None. Override it with a faster search."""
        return NotImplemented

    def random_success(self, state: State, num_actions: int) -> float:
        """The chance that uniformly random play wins within `num_actions`. Override it if `chances` returns None."""
        return NotImplemented

    # --- text ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, state: State) -> str:
        """The observation as text."""

    @abstractmethod
    def task(self) -> str:
        """The rules and the scoring, as this instance's settings define them."""

    def legend(self) -> str:
        """How to read an observation (symbols, coordinates); empty if the text explains itself."""
        return ""

    def symbols(self) -> dict[str, str]:
        """The characters of a drawn observation and their meanings; a terminal colours them."""
        return {}

    @abstractmethod
    def action_names(self, state: State) -> dict[Action, str]:
        """The actions and their names, in the order shown to the agent; empty if any text is an action."""

    def parse_action(self, state: State, text: str) -> Action | None:
        """The action that a part of an answer names, or None. Case does not matter."""
        return match_action(self.action_names(state), text)


def match_action(names: dict[Action, str], text: str, accept_numbers: bool = False) -> Action | None:
    """Find the action that `text` names; with `accept_numbers` also `1` or `1 (Up)`, where both parts must agree.

    >>> names = {1: "Up", 2: "Down"}
    >>> match_action(names, " up "), match_action(names, "1 (up)", accept_numbers=True), match_action(names, "1")
    (1, 1, None)
    """
    said = text.strip().casefold()
    for action, name in names.items():
        word = name.casefold()
        if said == word or (accept_numbers and said in (str(action), f"{action} ({word})")):
            return action
    return None


def split_index(split: str) -> int:
    """The index of a split in `SPLITS`; raises on an unknown one."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return SPLITS.index(split)
