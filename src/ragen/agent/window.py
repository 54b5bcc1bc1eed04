"""How much of the past the agent sees: `full`, `limited_multi_turn`, `single_turn`.

    window = WINDOWS[rules.context_window_mode]
    given = window(view, past_turns, turn_text)          # the tokens before the next reply
    if given.too_long: ...                               # end the episode as `max_length`

| mode                 | prompt of a turn                                                   | training sequence |
|----------------------|--------------------------------------------------------------------|-------------------|
| `full`               | only the new tokens, which continue the engine's sequence          | the episode       |
| `limited_multi_turn` | system message, then the last k turns as a chat                    | each turn         |
| `single_turn`        | system message, then one message: k - 1 past turns retold, and now | each turn         |

k is `max_context_window`, including the current turn; `full` ignores it. In a chat, past replies re-enter as the
sampled ids; `single_turn` retells their text. The first turn in view has no feedback on the turn before it, which is
out of view.

If a prompt is too long (more than `max_prompt_tokens`, the model's length minus the room for a reply), the windowed
modes drop the oldest turns one by one, never the system message. A current turn that is too long by itself, or any turn
in `full`, where dropping tokens would break the sequence, is flagged and not cut: the episode ends there, truncated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.prompt import PromptStyle
from ragen.types import Turn


@dataclass(frozen=True)
class View:
    """The part that is the same for every turn."""

    chat: ChatTemplate
    prompt: PromptStyle
    system_text: str
    num_turns_in_view: int  # AgentRules.num_turns_in_view
    max_prompt_tokens: int  # max_model_len minus the reply limit


@dataclass(frozen=True)
class Given:
    """The tokens that the engine gets before the next reply."""

    ids: tuple[int, ...]
    continues: bool  # they follow the last reply in the engine's cache; False: they start a new sequence
    too_long: bool
    num_past_shown: int


def full(view: View, past: Sequence[Turn], turn_text: str) -> Given:
    """Everything so far; returns only the new tokens."""
    if past:
        ids = _next_ids(view, past[-1], turn_text)
    else:
        ids = view.chat.opening_ids(view.system_text, turn_text, view.prompt.reply_prefix())
    num_held = sum(len(turn.given_ids) + len(turn.reply_ids) for turn in past)
    return Given(tuple(ids), bool(past), num_held + len(ids) > view.max_prompt_tokens, len(past))


def limited_multi_turn(view: View, past: Sequence[Turn], turn_text: str) -> Given:
    """The last turns as a chat."""
    return _longest_that_fits(view, past, lambda shown: _chat_ids(view, shown, turn_text))


def single_turn(view: View, past: Sequence[Turn], turn_text: str) -> Given:
    """The last turns retold in one message."""

    def retold(shown: Sequence[Turn]) -> list[int]:
        user_text = view.prompt.summary_text(shown, len(past)) + turn_text
        return view.chat.opening_ids(view.system_text, user_text, view.prompt.reply_prefix())

    return _longest_that_fits(view, past, retold)


WINDOWS: dict[str, Callable[[View, Sequence[Turn], str], Given]] = {
    "full": full,
    "limited_multi_turn": limited_multi_turn,
    "single_turn": single_turn,
}


def _longest_that_fits(view: View, past: Sequence[Turn], ids_of: Callable[[Sequence[Turn]], list[int]]) -> Given:
    """The prompt with as many turns in view as fit."""
    num_shown = min(len(past), view.num_turns_in_view - 1)
    while True:
        ids = ids_of(past[len(past) - num_shown :])
        too_long = len(ids) > view.max_prompt_tokens
        if not too_long or num_shown == 0:
            return Given(tuple(ids), continues=False, too_long=too_long, num_past_shown=num_shown)
        num_shown -= 1


def _chat_ids(view: View, shown: Sequence[Turn], turn_text: str) -> list[int]:
    texts = [*(turn.turn_text for turn in shown), turn_text]
    ids = view.chat.opening_ids(view.system_text, texts[0], view.prompt.reply_prefix())
    for turn, next_text in zip(shown, texts[1:], strict=True):
        ids += [*turn.reply_ids, *_next_ids(view, turn, next_text)]
    return ids


def _next_ids(view: View, turn: Turn, next_text: str) -> list[int]:
    """The tokens after a reply: its closing if missing, feedback and next turn in one message, the next opening."""
    ended_itself = turn.stopped_by == "end_of_turn"
    assert ended_itself == (turn.reply_ids[-1] == view.chat.end_of_turn_id)
    closing = [] if ended_itself else view.chat.closing_ids()
    user_text = view.prompt.feedback_text(turn.result.reward) + next_text
    return closing + view.chat.delta_ids(user_text, view.prompt.reply_prefix())
