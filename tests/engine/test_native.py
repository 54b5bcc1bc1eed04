"""The native engine against a sampler that knows no cache, no batch and no burst."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.engine.base import Prompt, Sampled, Sampling
from ragen.engine.native.engine import NativeEngine
from ragen.model.decoder import Decoder, Shape, from_huggingface

VOCAB = 40
END = 1  # the end-of-turn token
PIECES = ["<eos>", "<end>", "</", "answer", ">", "</answer>", "x>", *[chr(97 + index) for index in range(VOCAB - 7)]]


class Letters:
    """As much of a tokenizer as the engine uses."""

    eos_token_id = 0
    pad_token_id = None

    def __len__(self):
        return VOCAB

    def decode(self, ids, skip_special_tokens=False):
        return "".join(PIECES[id_] for id_ in ids)

    def batch_decode(self, batch):
        return [self.decode(ids) for ids in batch]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    theirs = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    ours = Decoder(Shape.of(config)).eval()
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


@dataclass
class Scripted:
    """A conversation whose prompts are fixed in advance, so that only the replies are open."""

    prompts: list[tuple[int, ...]]
    continues: bool
    key: int
    replies: list[Sampled] = field(default_factory=list)

    def prompt(self):
        turn = len(self.replies)
        if turn == len(self.prompts):
            return None
        return Prompt(self.prompts[turn], self.continues and turn > 0, (self.key * 977 + turn) % 2**64)

    def take(self, reply):
        self.replies.append(reply)


# --- the oracle: one token at a time, everything computed anew ------------------------------------------------------


def splitmix(key: int, position: int) -> float:
    mask = 2**64 - 1
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return (x >> 11) / 2**53


def naive_reply(model, ids, key, sampling):
    reply, log_probs = [], []
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([ids + reply])).logits[0, -1].double()
        scaled = logits / (1.0 if sampling.greedy else sampling.temperature)
        probs = torch.softmax(scaled, -1).tolist()
        if sampling.greedy:
            chosen = max(range(VOCAB), key=lambda id_: probs[id_])
            margin = 1.0
        else:
            ranked = sorted(range(VOCAB), key=lambda id_: -probs[id_])
            allowed, mass = [], 0.0
            for rank, id_ in enumerate(ranked):
                if (sampling.top_k >= 1 and rank >= sampling.top_k) or mass >= sampling.top_p:
                    break
                allowed.append(id_)
                mass += probs[id_]
            draw, chosen, margin = splitmix(key, len(reply)) * mass, None, 1.0
            running = 0.0
            for id_ in sorted(allowed):
                running += probs[id_]
                margin = min(margin, abs(running - draw))
                if chosen is None and running > draw:
                    chosen = id_
        if margin < 5e-5:
            return None  # the draw lies within rounding of an edge: either token would be right
        reply.append(chosen)
        log_probs.append(math.log(probs[chosen]))
        text = "".join(PIECES[id_] for id_ in reply)
        if chosen == END:
            return reply, log_probs, "end_of_turn"
        if sampling.stop_at_answer and "</answer>" in text:
            return reply, log_probs, "answer"
        if len(reply) == sampling.max_tokens or chosen == 0:
            return reply, log_probs, "length"


def check_against_oracle(conversations, theirs, sampling):
    for conversation in conversations:
        context = []
        for turn, (prompt, got) in enumerate(zip(conversation.prompts, conversation.replies, strict=True)):
            context = [*context, *prompt] if conversation.continues else list(prompt)
            wanted = naive_reply(theirs, context, (conversation.key * 977 + turn) % 2**64, sampling)
            if wanted is None:
                break
            assert list(got.ids) == wanted[0]
            assert got.log_probs == pytest.approx(wanted[1], abs=5e-5)
            assert got.stopped_by == wanted[2]
            context += got.ids


def run(model, conversations, sampling, max_rows=64, burst=4):
    NativeEngine(model, Letters(), END, max_rows=max_rows, burst=burst).run(conversations, sampling)
    return conversations


tokens = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9).map(tuple)
scripts = st.builds(
    lambda prompts, continues, key: (prompts, continues, key),
    st.lists(tokens, min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2**64 - 1),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([-1, 3]),
    greedy=st.sampled_from([False, False, False, True]),
    max_tokens=st.integers(1, 9),
    stop_at_answer=st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(scripts, min_size=1, max_size=7), samplings, st.integers(1, 5), st.integers(1, 6))
def test_replies_equal_the_oracles(models, listed, sampling, max_rows, burst):
    """Ragged prompts, early ends, more conversations than rows: no conversation sees another's tokens."""
    ours, theirs = models
    conversations = [Scripted(*script) for script in listed]
    run(ours, conversations, sampling, max_rows, burst)
    check_against_oracle(conversations, theirs, sampling)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(scripts, st.integers(0, 6)), min_size=1, max_size=7),
    samplings,
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_who_joins_a_run_on_its_way_does_not_show(models, listed, sampling, max_rows, burst):
    ours, theirs = models
    coming = [(moment, Scripted(*script)) for script, moment in listed]
    run = NativeEngine(ours, Letters(), END, burst=burst).start([], sampling)
    for moment in range(1000):
        run.waiting.extend(conversation for when, conversation in coming if when == moment)
        run.admit(max_rows)
        assert len(run.rows) <= max_rows
        if run.rows:
            run.step()
        elif moment > 6:
            break
    assert not run.waiting
    check_against_oracle([conversation for _, conversation in coming], theirs, sampling)


def test_who_joins_takes_an_empty_row(models):
    ours, theirs = models
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, greedy=False, max_tokens=1, stop_at_answer=False)
    lasting = [Scripted([(2, 3, 4 + key)] * 3, True, key) for key in range(7)]
    brief, late = Scripted([(2, 3)], True, 7), Scripted([(5, 6, 7), (8,)], True, 8)
    run = NativeEngine(ours, Letters(), END).start([*lasting[:2], brief, *lasting[2:]], sampling)
    run.admit(64)
    assert run.step() == 1 and run.rows[2] is None
    run.waiting.append(late)
    run.admit(64)
    assert run.rows[2].conversation is late and len(run.rows) == 8
    while run.rows:
        run.step()
    check_against_oracle([*lasting, brief, late], theirs, sampling)


def conversations_with_shared_prompts():
    system = tuple(range(2, 26))
    return [
        Scripted([(*system, 30 + group, 31), (7, 8)], True, 100 * group + member)
        for group in range(3)
        for member in range(4)
    ]


SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, greedy=False, max_tokens=6, stop_at_answer=True)


def test_shared_prefixes_are_computed_once(models):
    ours, theirs = models
    conversations = conversations_with_shared_prompts()
    engine = NativeEngine(ours, Letters(), END)
    statistics = engine.run(conversations, SAMPLING)
    check_against_oracle(conversations, theirs, SAMPLING)
    num_first = 24 + 3 * 1  # the common beginning once, and of each of the three prompts the one token that differs
    num_second = (
        sum(len(c.replies[0].ids) for c in conversations) + 12 * 1
    )  # at most: the reply's last token, 7; 8 is fed
    assert num_first <= statistics.prefilled <= num_first + num_second
    assert statistics.shared == 2 * 24 + 9 * 25
    assert statistics.kept == sum(len(reply.ids) for c in conversations for reply in c.replies)


@pytest.mark.parametrize(("max_rows", "burst"), [(1, 1), (3, 2), (12, 5), (64, 8)])
def test_rows_and_bursts_do_not_show(models, max_rows, burst):
    ours, _ = models
    reference = run(ours, conversations_with_shared_prompts(), SAMPLING)
    other = run(ours, conversations_with_shared_prompts(), SAMPLING, max_rows, burst)
    for left, right in zip(reference, other, strict=True):
        assert [reply.ids for reply in left.replies] == [reply.ids for reply in right.replies]


def test_the_same_call_twice_is_bit_equal(models):
    ours, _ = models
    first, second = (run(ours, conversations_with_shared_prompts(), SAMPLING) for _ in range(2))
    assert [c.replies for c in first] == [c.replies for c in second]


def test_a_turn_computes_only_what_is_new(models):
    ours, _ = models
    long = Scripted([tuple(range(2, 32)), (5, 6, 7)], True, 11)
    engine = NativeEngine(ours, Letters(), END, burst=1)
    statistics = engine.run([long], SAMPLING)
    # 29 of the first prompt, then 2 of the delta and the reply's last token, which a burst of one has never fed.
    assert statistics.prefilled == 29 + 2 + 1


def test_a_window_reuses_what_it_shares_with_the_turn_before(models):
    ours, theirs = models
    system = tuple(range(2, 30))
    windowed = Scripted([(*system, 31), (*system, 32, 33)], False, 5)
    engine = NativeEngine(ours, Letters(), END)
    statistics = engine.run([windowed], SAMPLING)
    check_against_oracle([windowed], theirs, SAMPLING)
    assert statistics.prefilled == 28 + 1
    assert statistics.shared == 28
