"""What an engine does: it carries conversations to their end, sampling every reply.

    engine.run(conversations, sampling)

A conversation knows nothing of batches and an engine nothing of environments. The engine asks for a prompt, samples a
reply, hands it over, and asks again until the conversation says that it is over. When and together with whom a reply is
sampled is the engine's affair, and must not show: a token's draw depends on the prompt's key and its position alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn."""

    temperature: float
    top_p: float
    top_k: int  # below 1: all tokens
    greedy: bool
    max_tokens: int  # of one reply
    stop_at_answer: bool  # a reply ends at its first complete </answer>


@dataclass(frozen=True)
class Prompt:
    """The tokens in front of a reply."""

    ids: tuple[int, ...]
    continues: bool  # they follow the conversation's last reply; False: they start anew
    draw_key: int  # 64 bits that fix every draw of the reply


@dataclass(frozen=True)
class Sampled:
    """A reply as it was sampled."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # at the sampling temperature, over the whole vocabulary
    stopped_by: str  # one of ragen.types.STOPS


class Conversation(Protocol):
    def prompt(self) -> Prompt | None:
        """The next prompt, or None when the conversation is over."""

    def take(self, reply: Sampled) -> None:
        """The reply to the last prompt."""


class Engine(Protocol):
    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Carry all conversations to their end; `on_finished` hears how many have just ended."""
