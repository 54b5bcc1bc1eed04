"""The data that the stages exchange: Turn, Episode, Group. Plain Python, no torch.

Token in, token out: the ids that were sampled are the ids that are trained. A turn is given tokens, then sampled
tokens; a sequence is its turns joined. Nothing is ever rendered or tokenised again. Two turns in
context mode `full`, the first reply cut off by the token limit:

    turn 0  given_ids  <|im_start|>system … <|im_start|>user … <|im_start|>assistant\\n<think>     sampled 0 0 … 0
            reply_ids  Let me see whether the                                                    sampled 1 1 1 1 1
    turn 1  given_ids  <|im_end|>\\n<|im_start|>user … <|im_end|>\\n<|im_start|>assistant\\n<think>  sampled 0 0 … 0
            reply_ids  Up.</think><answer>Up</answer><|im_end|>                                  sampled 1 1 … 1

The forced `<think>`, the headers and the `<|im_end|>` that closes the cut reply were given, so they are not trained;
the last `<|im_end|>` was sampled, so it is.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

STOPS = ("end_of_turn", "answer", "length")  # why a reply ended; "length" means that it was cut off

# How an episode ended -> (terminated, truncated). A success is terminated and not truncated: only `won` is one.
ENDINGS = {
    "": (False, False),  # still running
    "won": (True, False),
    "lost": (True, True),
    "max_actions": (True, True),
    "invalid": (True, True),  # a reply without a valid action, if the tag sets `end_on_invalid`
    "max_turn": (False, False),
    "max_length": (False, True),  # the next prompt would not fit into the context; see `window`
}


@dataclass(frozen=True)
class EpisodeState:
    """The progress of an episode."""

    state: Any  # the environment's state
    num_turns: int = 0
    num_actions: int = 0  # executed so far; also the index of the next step's noise
    reward: float = 0.0  # from the environment, summed over turns
    penalty: float = 0.0  # format penalties, summed over turns
    warn_invalid: bool = False  # the last reply had no valid action: the next prompt says so
    ended_by: str = ""  # a key of ENDINGS

    @property
    def finished(self) -> bool:
        return self.ended_by != ""

    @property
    def terminated(self) -> bool:
        return ENDINGS[self.ended_by][0]

    @property
    def truncated(self) -> bool:
        return ENDINGS[self.ended_by][1]

    @property
    def success(self) -> bool:
        return self.terminated and not self.truncated


@dataclass(frozen=True)
class TurnResult:
    """What one reply did."""

    reward: float  # from the environment, this turn
    penalty: float  # this turn's format penalty: `rules.format_penalty` or 0
    actions: tuple[Hashable, ...]  # executed, in order
    num_listed: int  # actions named in the reply
    num_valid: int  # of these, known to the environment; not all are necessarily executed
    num_effective: int  # executed actions that changed something


@dataclass(frozen=True)
class Turn:
    """One prompt, one reply, and what it did."""

    given_ids: tuple[int, ...]
    continues: bool  # `given_ids` follow the previous turn's reply; False: they start a new prompt
    reply_ids: tuple[int, ...]  # everything sampled, including the end-of-turn token if there is one
    log_probs: tuple[float, ...]  # of `reply_ids`, at the sampling temperature
    stopped_by: str  # one of STOPS
    state_text: str  # the observation
    turn_text: str  # the user message without the feedback on the previous turn
    reply_text: str  # decoded, with the forced opening tag and without the end-of-turn token
    result: TurnResult

    def __post_init__(self):
        assert self.stopped_by in STOPS, self.stopped_by
        assert len(self.log_probs) == len(self.reply_ids) > 0


@dataclass(frozen=True)
class TokenSequence:
    """The learner's input: tokens, and which of them were sampled."""

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    log_probs: tuple[float, ...]  # 0.0 for given tokens
    first_turn: int  # the turn of its first reply
    reply_spans: tuple[tuple[int, int], ...]  # [start, stop) of each reply, in turn order


@dataclass(frozen=True)
class Episode:
    """One played level. (seed, split) fix the level, (seed, group, member) the noise: it can be replayed."""

    tag: str
    seed: int
    split: str
    group: int
    member: int
    system_text: str
    turns: tuple[Turn, ...]
    final: EpisodeState
    final_text: str = ""  # the observation after the last action, which no turn shows

    def sequences(self) -> list[TokenSequence]:
        """One sequence if every turn continues the previous one (mode `full`), else one per prompt."""
        return [_joined(first, turns) for first, turns in _runs(self.turns)]


@dataclass(frozen=True)
class Group:
    """Episodes of one level with the same first prompt; advantages compare them with each other."""

    tag: str
    seed: int
    split: str
    group: int
    episodes: tuple[Episode, ...]


def _runs(turns: tuple[Turn, ...]) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    starts = [index for index, turn in enumerate(turns) if index == 0 or not turn.continues]
    for start, stop in zip(starts, [*starts[1:], len(turns)], strict=True):
        yield start, turns[start:stop]


def _joined(first_turn: int, turns: tuple[Turn, ...]) -> TokenSequence:
    ids: list[int] = []
    sampled: list[bool] = []
    log_probs: list[float] = []
    spans: list[tuple[int, int]] = []
    for turn in turns:
        ids += turn.given_ids
        sampled += [False] * len(turn.given_ids)
        log_probs += [0.0] * len(turn.given_ids)
        spans.append((len(ids), len(ids) + len(turn.reply_ids)))
        ids += turn.reply_ids
        sampled += [True] * len(turn.reply_ids)
        log_probs += turn.log_probs
    return TokenSequence(tuple(ids), tuple(sampled), tuple(log_probs), first_turn, tuple(spans))
