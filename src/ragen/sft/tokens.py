"""Rows of fine-tuning data as token sequences that mark exactly the answers to learn. No torch in here.

    answers = answers_of(rows, chat, rules, max_length=2048)
    answers[0].sequence.ids, answers[0].sequence.sampled        # all tokens, and which of them are answers

An answer's tokens are those that a rollout would have sampled: they start after the forced opening tag and end with the
end of the turn. Under the context mode `full` a level is one sequence with all its answers; else every answer has
its own sequence, in which earlier answers are only context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.rules import AgentRules
from ragen.errors import ConfigError
from ragen.sft.data import AnswerRow, Message
from ragen.types import TokenSequence


@dataclass(frozen=True)
class Answers:
    """A sequence to learn from, as a `ragen.protocols.TrainingSample`."""

    sequence: TokenSequence

    @property
    def num_sampled(self) -> int:
        return sum(self.sequence.sampled)


def rows_to_learn(rows: Sequence[AnswerRow], rules: AgentRules) -> list[tuple[int, AnswerRow]]:
    """The rows that become sequences, with their numbers: the last of each level where the agent sees all the past."""
    return [
        (number, row)
        for number, row in enumerate(rows)
        if not _sees_all(rules) or row["extra_info"]["turn"] == row["extra_info"]["num_turns"]
    ]


def num_answers(rows: Sequence[AnswerRow], rules: AgentRules) -> list[int]:
    """How many answers each sequence teaches, without a tokenizer."""
    return [row["extra_info"]["num_turns"] if _sees_all(rules) else 1 for _, row in rows_to_learn(rows, rules)]


def answers_of(rows: Sequence[AnswerRow], chat: ChatTemplate, rules: AgentRules, max_length: int) -> list[Answers]:
    """One sequence for each level, or for each row where the agent does not see all of the past."""
    opening = "<think>" if rules.think else "<answer>"
    found = []
    for number, row in rows_to_learn(rows, rules):
        sequence, place = sequence_of(row, chat, opening, _sees_all(rules)), row["extra_info"]
        if len(sequence.ids) > max_length:
            raise ConfigError(
                f"row {number} of {place['split']}.parquet (level {place['index']}, turn {place['turn']}) has "
                f"{len(sequence.ids)} tokens, and sft.training.max_length is {max_length}: raise it, or allow fewer "
                f"turns (agent_proxy.max_turn)"
            )
        found.append(Answers(sequence))
    return found


def _sees_all(rules: AgentRules) -> bool:
    return rules.context_window_mode == "full"


def sequence_of(row: AnswerRow, chat: ChatTemplate, opening: str, learn_all: bool) -> TokenSequence:
    """The conversation up to and including the row's answer; with `learn_all` earlier answers are learned too."""
    messages: list[Message] = [*row["prompt"], {"role": "assistant", "content": row["response"]}]
    system, users, replies = messages[0], messages[1::2], messages[2::2]
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for user, reply in zip(users, replies, strict=True):
        if ids:
            ids += chat.delta_ids(user["content"], opening)
        else:
            ids += chat.opening_ids(system["content"], user["content"], opening)
        start = len(ids)
        ids += reply_ids(chat, reply["content"].removeprefix(opening))
        spans.append((start, len(ids)))
    learned = spans if learn_all else spans[-1:]
    sampled = [False] * len(ids)
    for start, stop in learned:
        sampled[start:stop] = [True] * (stop - start)
    first_turn = row["extra_info"]["turn"] - len(learned)
    return TokenSequence(tuple(ids), tuple(sampled), (0.0,) * len(ids), first_turn, tuple(learned))


def reply_ids(chat: ChatTemplate, said: str) -> list[int]:
    """The tokens of a reply after its forced opening, with the end of the turn."""
    return [*chat.tokenizer.encode(said, add_special_tokens=False), chat.end_of_turn_id]
