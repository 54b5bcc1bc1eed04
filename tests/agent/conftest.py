"""A toy world for the tests of the agent: two small environments, rules, and small tokenizers with real templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen.agent.rules import AgentRules
from ragen.env.base import Environment, Transition

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

LETTERS_PIECES = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "letters": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(LETTERS_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = [
    "<think>The box is left of the target, so I push it right.</think><answer>Left || Right || Up || Down</answer>",
    "system\nuser\nassistant\n\nTurn 1 of 5\nState:\n######\n#P_X_#\n#__O_#\n######\nYou have 10 actions left.",
    "Reward of your last turn: -0.1\n\nAvailable actions: Up, Down, Left, Right. turn 1/5, 10 left reward 10.8",
] * 3


class Corridor(Environment):
    """Cells 0 … length. `Right` and `Left` walk; the last cell wins 1, cell 0 is a pit; each step costs 0.25.

    The walker slips back where the noise is below `slip`. All rewards are exact in binary.
    """

    @dataclass(frozen=True)
    class Config:
        length: int = 4
        slip: float = 0.0

    class State(NamedTuple):
        cell: int

    def reset(self, seed, split="train"):
        return self.State(2)

    def step(self, state, action, noise=0.0):
        forward = (action == "r") == (noise >= self.config.slip)
        after = self.State(state.cell + (1 if forward else -1))
        won = after.cell == self.config.length
        return Transition(after, won - 0.25, won or after.cell == 0, won, True)

    def render(self, state):
        return "".join("P" if cell == state.cell else "_" for cell in range(self.config.length + 1))

    def task(self):
        return "Walk to the right end."

    def legend(self):
        return "P is you."

    def action_names(self, state):
        return {"l": "Left", "r": "Right"}


class Doors(Environment):
    """Two doors, whose names and order come from the level; one choice ends it."""

    @dataclass(frozen=True)
    class Config:
        pass

    def reset(self, seed, split="train"):
        return ("Oak", "Iron") if seed % 2 else ("Iron", "Oak")

    def step(self, state, action, noise=0.0):
        return Transition(state, float(action), True, action == 1)

    def render(self, state):
        return "Two doors."

    def task(self):
        return "Choose a door."

    def action_names(self, state):
        return dict(enumerate(state))


@pytest.fixture(scope="session")
def corridor():
    return Corridor()


@pytest.fixture(scope="session")
def slippery():
    return Corridor(Corridor.Config(slip=0.5))


@pytest.fixture(scope="session")
def doors():
    return Doors()


@pytest.fixture(scope="session")
def rules_with():
    """Rules of a plain run, with some of them changed."""

    def make(**changes):
        plain = {
            "max_turn": 5,
            "max_actions_per_turn": 2,
            "action_sep": "||",
            "think": True,
            "format_penalty": -0.1,
            "context_window_mode": "full",
            "max_context_window": -1,
            "prompt_style": "full",
        }
        return AgentRules(**{**plain, **changes})

    return make


@pytest.fixture(scope="session")
def template_text():
    return lambda name: (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="session")
def tokenizer_with():
    """A small byte-level BPE tokenizer with this chat template."""

    def make(chat_template, pieces="digits"):
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = PRE_TOKENIZERS[pieces]
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=CHATML_TOKENS + LLAMA_TOKENS, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(CORPUS, trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=inner,
            bos_token="<|begin_of_text|>",
            eos_token="<|endoftext|>",
            chat_template=chat_template,
        )

    return make
