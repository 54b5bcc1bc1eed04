"""Conversations for the benchmarks of sampling: their prompts are known in advance, only the replies are open."""

from dataclasses import dataclass, field

from ragen.engine.base import Prompt, Sampled

NO_SUCH_TOKEN = -1


@dataclass
class Scripted:
    """A conversation with given prompts: only the replies are open."""

    prompts: list[tuple[int, ...]]
    key: int
    replies: list[Sampled] = field(default_factory=list)

    def prompt(self) -> Prompt | None:
        turn = len(self.replies)
        if turn == len(self.prompts):
            return None
        return Prompt(self.prompts[turn], continues=turn > 0, draw_key=(self.key * 0x9E3779B97F4A7C15 + turn) % 2**64)

    def take(self, reply: Sampled) -> None:
        self.replies.append(reply)


class EveryToken:
    """As much of a tokenizer as the engine asks for."""

    eos_token_id = pad_token_id = None

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, ids) -> list[str]:
        return [self.decode(part) for part in ids]
