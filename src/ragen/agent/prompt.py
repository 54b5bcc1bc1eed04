"""The text that the agent reads: system message, turns, feedback.

    prompt = STYLES[rules.prompt_style](env, tag, rules, reply_limit=400)
    prompt.system_text()
    prompt.turn_text(turn_number=1, state=state, actions_left=10, warn_invalid=False)
    prompt.feedback_text(-0.2) + prompt.turn_text(2, ...)            # one user message
    prompt.reply_prefix()                                            # the given, not sampled, start of the reply

Two styles: `full` explains everything; `terse` takes less than half the tokens, for tiny models that learn the game
from its rewards. Both state only what is true of this environment, tag and run. Rollouts, training, evaluation and
fine-tuning data all use these texts, so sampling and training see the same prompts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from ragen.agent.rules import AgentRules
from ragen.env.base import Environment, State, Tag
from ragen.env.failure import LIMIT_OF_A_LEVEL, EnvironmentFailed, call, level
from ragen.types import TurnResult

# Enough levels to tell whether the actions depend on the level: a game that orders two of them by a coin flip looks
# constant once in 2**15.
NUM_LEVELS_COMPARED = 16


class PastTurn(Protocol):
    """What a summary tells about a turn."""

    @property
    def state_text(self) -> str: ...
    @property
    def reply_text(self) -> str: ...
    @property
    def result(self) -> TurnResult: ...


class PromptStyle(ABC):
    """The texts of one tag. All but the states is known before the first level."""

    def __init__(self, env: Environment, tag: Tag, rules: AgentRules, reply_limit: int):
        self.env = env
        self.tag = tag
        self.rules = rules
        self.reply_budget = reply_limit if tag.max_tokens is None else min(tag.max_tokens, reply_limit)
        self.max_actions = min(rules.max_actions_per_turn, tag.max_actions_per_traj)
        # If a turn without an action ends the episode, there are no more turns than actions.
        self.max_turns = min(rules.max_turn, tag.max_actions_per_traj) if tag.end_on_invalid else rules.max_turn
        self.total_actions = min(tag.max_actions_per_traj, rules.max_turn * rules.max_actions_per_turn)
        self.fixed_actions = _actions_of_every_level(env)

    def reply_prefix(self) -> str:
        """The forced opening of a reply."""
        return "<think>" if self.rules.think else "<answer>"

    @abstractmethod
    def system_text(self) -> str:
        """The same for all levels of the tag, so that all episodes share its computation."""

    @abstractmethod
    def turn_text(self, turn_number: int, state: State, actions_left: int, warn_invalid: bool) -> str:
        """The user message before a reply. Turns count from 1; `actions_left` is what the tag's limit leaves."""

    @abstractmethod
    def feedback_text(self, reward: float) -> str:
        """The reward of the last turn, placed before the next turn's text in the same message."""

    @abstractmethod
    def summary_text(self, shown: Sequence[PastTurn], num_past: int) -> str:
        """The last `len(shown)` of `num_past` turns as text, before the current turn's; for `single_turn`."""

    def _possible_actions(self, turn_number: int, actions_left: int) -> int:
        """The actions that can still be taken: the turns left may allow fewer than the tag does."""
        turns_left = self.rules.max_turn - turn_number + 1
        return min(actions_left, turns_left * self.rules.max_actions_per_turn)

    def _actions_shown_with(self, state: State) -> str:
        """The actions of this state if they depend on the level; empty if the system message lists them."""
        return "" if self.fixed_actions else ", ".join(self.env.action_names(state).values())

    def _reply_form(self, thoughts: str) -> str:
        think = f"<think>{thoughts}</think>" if self.rules.think else ""
        answer = "action" if self.max_actions == 1 else f"action {self.rules.action_sep} action"
        return f"{think}<answer>{answer}</answer>"


class FullPrompt(PromptStyle):
    """Explains the game, the limits and the format, and repeats the format with each turn."""

    def system_text(self) -> str:
        return _paragraphs(
            "You are an agent that solves a task by acting in it, turn by turn.",
            self.env.task() if self.tag.env_instruction is None else self.tag.env_instruction,
            self.env.legend(),
            _lines(_labelled("Available actions: ", ", ".join(self.fixed_actions)), self._limits()),
            f"Every reply has this form:\n{self._reply_form('your thoughts')}",
        )

    def turn_text(self, turn_number: int, state: State, actions_left: int, warn_invalid: bool) -> str:
        return _lines(
            f"Turn {turn_number} of {self.max_turns}",
            f"State:\n{self.env.render(state)}",
            "Your last reply named no valid action, so nothing was done." if warn_invalid else "",
            _labelled("Available actions: ", self._actions_shown_with(state)),
            f"You have {_count(self._possible_actions(turn_number, actions_left), 'action')} left.",
            f"Always use this form, with nothing after it: {self._reply_form('your thoughts')}",
            f"Keep the reply within {self.reply_budget} tokens.",
        )

    def feedback_text(self, reward: float) -> str:
        return f"Reward of your last turn: {_number(reward)}\n\n"

    def summary_text(self, shown: Sequence[PastTurn], num_past: int) -> str:
        if not shown:
            return ""
        first = num_past - len(shown) + 1
        blocks = [
            f"Turn {number}\nState:\n{turn.state_text}\nYour reply:\n{turn.reply_text}\n"
            f"Reward: {_number(turn.result.reward)}"
            for number, turn in enumerate(shown, start=first)
        ]
        heading = f"You have taken {_count(num_past, 'turn')}. The last {len(shown)}, oldest first:"
        return "\n-----\n".join([heading, *blocks, "Now:"]) + "\n\n"

    def _limits(self) -> str:
        in_all = f"{_count(self.total_actions, 'action')} in at most {_count(self.max_turns, 'turn')}"
        if self.total_actions == 1:
            return "You take a single action, which ends the episode."
        if self.max_actions == 1:
            return f"You take one action per turn, and at most {in_all}."
        return (
            f'You may take up to {self.max_actions} actions per turn, separated by "{self.rules.action_sep}", '
            f"and at most {in_all}."
        )


class TersePrompt(PromptStyle):
    """One line of system text; each turn is the state and its counters."""

    def system_text(self) -> str:
        name = f"{type(self.env).__name__}." if self.tag.env_instruction is None else self.tag.env_instruction
        actions = f"Actions: {', '.join(self.fixed_actions)}." if self.fixed_actions else ""
        limit = "One" if self.max_actions == 1 else f"Up to {self.max_actions}"
        return " ".join(filter(None, (name, actions, f"{limit} a turn: {self._reply_form('')}")))

    def turn_text(self, turn_number: int, state: State, actions_left: int, warn_invalid: bool) -> str:
        # A state may start or end with a blank; a line before and after it keeps templates from trimming it.
        return _lines(
            f"turn {turn_number}/{self.max_turns}",
            self.env.render(state),
            self._actions_shown_with(state),
            "no valid action" if warn_invalid else "",
            f"{self._possible_actions(turn_number, actions_left)} left",
        )

    def feedback_text(self, reward: float) -> str:
        return f"reward {_number(reward)}\n"

    def summary_text(self, shown: Sequence[PastTurn], num_past: int) -> str:
        return "".join(
            f"{turn.state_text}\n{turn.reply_text}\n{self.feedback_text(turn.result.reward)}" for turn in shown
        )


STYLES: dict[str, type[PromptStyle]] = {"full": FullPrompt, "terse": TersePrompt}


def _actions_of_every_level(env: Environment) -> tuple[str, ...]:
    """The action names, if all levels have the same ones in the same order; else empty."""
    names = set()
    for seed in range(NUM_LEVELS_COMPARED):
        where = level(type(env).__name__, seed, "train")
        with suppress(EnvironmentFailed):  # playing that level reports it
            names.add(call(partial(_actions_of_level, env, seed), where, LIMIT_OF_A_LEVEL))
    return names.pop() if len(names) == 1 else ()


def _actions_of_level(env: Environment, seed: int) -> tuple[str, ...]:
    return tuple(env.action_names(env.reset(seed, "train")).values())


def _number(reward: float) -> str:
    # Rounding hides the error of summing 0.1s; adding 0.0 turns -0.0 into 0.
    return f"{round(reward, 6) + 0.0:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _labelled(label: str, text: str) -> str:
    return f"{label}{text}" if text else ""


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _paragraphs(*paragraphs: str) -> str:
    return "\n\n".join(text for text in map(str.strip, paragraphs) if text)
