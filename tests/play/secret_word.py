"""A game of free text: guess a word that the state holds and the text does not show."""

from dataclasses import dataclass
from typing import NamedTuple

from ragen.env.base import Environment, Transition

WORDS = ("n", "apple pie", "plum")  # one of them is also the name of a command


class SecretWord(Environment):
    @dataclass(frozen=True)
    class Config:
        pass

    class State(NamedTuple):
        word: str
        said: str = ""

    def reset(self, seed, split="train"):
        return self.State(WORDS[seed % len(WORDS)])

    def step(self, state, action, noise=0.0):
        won = action == state.word
        return Transition(state._replace(said=action), float(won), won, won)

    def render(self, state):
        return f"You said {state.said!r}." if state.said else "Guess the word."

    def task(self):
        return "Guess the word."

    def action_names(self, state):
        return {}

    def parse_action(self, state, text):
        return text.strip() or None


class HiddenDoor(SecretWord):
    """The same with two doors: a list of actions, and a level that cannot be seen."""

    def reset(self, seed, split="train"):
        return self.State("left" if seed % 2 else "right")

    def action_names(self, state):
        return {"left": "left", "right": "right"}

    def parse_action(self, state, text):
        return text if text in ("left", "right") else None
