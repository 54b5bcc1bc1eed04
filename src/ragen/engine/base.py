"""The engine interface: an engine runs conversations to their end, sampling every reply.

    engine.run(conversations, sampling)

A conversation knows nothing about batches, and an engine nothing about environments. The engine asks for a prompt,
samples a reply, passes it back, and repeats until the conversation is over. The engine decides when and in which batch
a reply is sampled, and this must not change the result: a token's draw depends only on the prompt's key and its
position.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ragen.engine.forced_length import ForcedLength


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled."""

    temperature: float
    top_p: float
    top_k: int  # below 1: all tokens
    greedy: bool
    max_tokens: int  # of one reply
    stop_at_answer: bool  # end a reply at its first complete </answer>
    forced_length: ForcedLength | None = None  # then nothing else ends a reply; for measuring

    def recorded(self) -> dict[str, Any]:
        """For files: names and values; a forced length only where there is one."""
        values = asdict(self)
        return values if self.forced_length else {name: values[name] for name in values if name != "forced_length"}


@dataclass(frozen=True)
class Prompt:
    """The tokens before a reply."""

    ids: tuple[int, ...]
    continues: bool  # they follow the conversation's last reply; False: they start a new sequence
    draw_key: int  # 64 bits that fix every draw of the reply


@dataclass(frozen=True)
class Sampled:
    """A sampled reply."""

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
    ) -> object:
        """Run all conversations to their end; calls `on_finished` with the number that just ended."""
