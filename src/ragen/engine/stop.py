"""When a sampled reply ends: at the end-of-turn token, at the first complete `</answer>`, or at the token limit.

    stop = StopTokens(tokenizer, end_of_turn_id)
    stop.reason(reply_ids, sampling)      # "end_of_turn", "answer", "length", or "" while it continues

To be asked after every sampled token. Other special tokens that end a text (`<|endoftext|>`) count as a cut-off reply.
"""

from collections.abc import Sequence

from ragen.engine.base import Sampling
from ragen.protocols import Tokenizer

ANSWER_END = "</answer>"
TAIL_TOKENS = 12  # </answer> has 9 characters, so at most 9 tokens


class StopTokens:
    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int):
        self.tokenizer, self.end_of_turn_id = tokenizer, end_of_turn_id
        self.can_end_answer = _tokens_with(tokenizer, ANSWER_END[-1])
        self.cut_ids = {tokenizer.eos_token_id, tokenizer.pad_token_id} - {None, end_of_turn_id}

    def reason(self, reply: Sequence[int], sampling: Sampling) -> str:
        """Why the reply ends with its last token; empty if it does not."""
        last = reply[-1]
        if last == self.end_of_turn_id:
            return "end_of_turn"
        if sampling.stop_at_answer and last in self.can_end_answer:
            tail = self.tokenizer.decode(reply[-TAIL_TOKENS:], skip_special_tokens=False)
            if ANSWER_END in tail:
                return "answer"
        return "length" if len(reply) == sampling.max_tokens or last in self.cut_ids else ""


def _tokens_with(tokenizer: Tokenizer, character: str) -> frozenset[int]:
    """The ids whose text contains this character: only they can complete a tag."""
    ids = range(len(tokenizer))
    texts = tokenizer.batch_decode([[id_] for id_ in ids])
    return frozenset(id_ for id_, text in zip(ids, texts, strict=True) if character in text)
