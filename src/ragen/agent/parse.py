"""Parse a reply: which actions does it name?

    >>> parse_reply("<think>Go up.</think><answer>Up || Up || Left</answer>", True, "||", max_actions=2)
    Reply(well_formed=True, think_text='Go up.', answer_text='Up || Up || Left', actions=('Up', 'Up'), num_dropped=1)

The text is the whole reply, including the forced opening tag. A `Reply` is only for acting: the conversation and the
training batch keep all sampled tokens, including surplus actions and text after the answer.
"""

import re
from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
THINK_THEN_ANSWER = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True)
class Reply:
    """A parsed reply. A malformed one names no actions."""

    well_formed: bool
    think_text: str = ""
    answer_text: str = ""
    actions: tuple[str, ...] = ()
    num_dropped: int = 0  # actions named beyond `max_actions`


def parse_reply(
    text: str, think: bool, action_sep: str, max_actions: int, special_tokens: tuple[str, ...] = ()
) -> Reply:
    """Find the blocks and split the answer. Any text is allowed; `special_tokens` are the tokenizer's literals."""
    blocks = _think_and_answer(text) if think else _answer_alone(text)
    if blocks is None:
        return Reply(well_formed=False)
    think_text, answer_text = (_without(TAGS + special_tokens, block) for block in blocks)
    named = [action.strip() for action in answer_text.split(action_sep)]
    named = [action for action in named if action]
    actions = tuple(named[:max_actions])
    return Reply(True, think_text, answer_text, actions, num_dropped=len(named) - len(actions))


def _think_and_answer(text: str) -> tuple[str, str] | None:
    """The first `<think>…</think> <answer>…</answer>`, found in linear time.

    A lazy regular expression over both blocks finds the same, but takes quadratic time on a reply that repeats an
    opening tag, as collapsed models do. If the first `<think>` does not match, no later one does.
    """
    start = text.find("<think>")
    if start < 0:
        return None
    start += len("<think>")
    boundary = THINK_THEN_ANSWER.search(text, start)
    if boundary is None:
        return None
    end = text.find("</answer>", boundary.end())
    return None if end < 0 else (text[start : boundary.start()], text[boundary.end() : end])


def _answer_alone(text: str) -> tuple[str, str] | None:
    _, opening, rest = text.partition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return ("", answer) if opening and closing else None


def _without(literals: tuple[str, ...], text: str) -> str:
    # Longest first: a literal that is a prefix of another must not leave the other's tail.
    pattern = "|".join(re.escape(literal) for literal in sorted(literals, key=len, reverse=True) if literal)
    return re.sub(pattern, "", text).strip()
