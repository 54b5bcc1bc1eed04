"""What an environment is: an immutable state and one pure `step`.

    env = Sokoban(Sokoban.Config(dim_room=(6, 6), num_boxes=1))
    state = env.reset(seed=123, split="val")            # the same level for ever
    after = env.step(state, action=2, noise=0.4)        # -> Transition; `state` is untouched
    env.render(after.state)                             # what the agent reads

Play, rollouts, solvers, group copies, replay and fork all call this one `step`. Whatever is random in it is decided by
`noise`, a number in [0, 1) that the caller draws (`ragen.counter.uniform`), so a step is a function of its arguments.

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
    """One step's outcome."""

    state: State
    reward: float
    done: bool = False  # the game itself is over: won, lost, or out of its own steps
    success: bool = False  # and it was won
    effective: bool = True  # the action changed something
    out_of_steps: bool = False  # done only because the environment's own step limit was reached


@dataclass
class Tag:
    """An entry of the catalogue (`custom_envs.<Tag>`): an environment with settings, and what an agent may do in it."""

    env_type: str = ""  # a name of the registry, or `package.module:Class`
    max_actions_per_traj: int = 10
    max_tokens: int | None = 100  # length hint shown in the prompt; null: the reply limit
    env_instruction: str | None = None  # replaces the environment's own task text
    end_on_invalid: bool = False  # a reply without a valid action ends the episode
    parallel_friendly: bool = field(
        default=False, metadata={"no_effect": "environments are stepped in one thread, in episode order"}
    )
    max_workers: int = field(
        default=32, metadata={"no_effect": "environments are stepped in one thread, in episode order"}
    )
    env_config: dict[str, Any] | None = None  # fields of the environment's `Config`


class Environment(ABC):
    """The rules of one game. An instance holds settings only; everything that changes is in the `State`."""

    Config: ClassVar[type]  # a frozen dataclass: the settings, every default here and nowhere else
    TAGS: ClassVar[dict[str, Tag]] = {}  # the catalogue entries that this environment brings

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
        """Every distinct outcome of `step(state, action, noise)` as (probability, a noise that brings it about).

        This is what makes exact baselines possible. Deterministic games keep this default; return None where the
        outcomes cannot be listed.
        """
        return ((1.0, 0.0),)

    # --- exact answers that the game itself knows (`solve.py` searches where these return NotImplemented) ---------

    def shortest_plan(self, state: State) -> tuple[Action, ...] | None:
        """The fewest actions that win for certain, or None where there are none. Override it with a faster search."""
        return NotImplemented

    def random_success(self, state: State, num_actions: int) -> float:
        """How likely uniformly random play wins within so many actions. Override it where `chances` gives None."""
        return NotImplemented

    # --- what the agent reads and says --------------------------------------------------------------------------

    @abstractmethod
    def render(self, state: State) -> str:
        """The observation as text."""

    @abstractmethod
    def task(self) -> str:
        """What the game is and how it is scored, true to this instance's settings."""

    def legend(self) -> str:
        """How to read an observation (symbols, coordinates); empty where the text explains itself."""
        return ""

    def symbols(self) -> dict[str, str]:
        """The characters that a drawn observation is made of, and what they stand for; a terminal colours them."""
        return {}

    @abstractmethod
    def action_names(self, state: State) -> dict[Action, str]:
        """The actions and the words for them, in the order shown to the agent; empty where any text is an action."""

    def parse_action(self, state: State, text: str) -> Action | None:
        """The action that a piece of an answer names, or None. Names match whatever their case."""
        return match_action(self.action_names(state), text)


def match_action(names: dict[Action, str], text: str, accept_numbers: bool = False) -> Action | None:
    """Find the action that `text` names; with `accept_numbers` also as `1` or `1 (Up)`, where both parts must agree.

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
    """The place of a split in `SPLITS`; an unknown one is refused."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return SPLITS.index(split)
