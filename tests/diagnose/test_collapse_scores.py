"""The matrix against plain forward passes, one for every pair; and what it says of models whose answer is known."""

import copy
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_pairs import samples_of
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen.diagnose import cross_score
from ragen.diagnose.collapse import metrics_of
from ragen.diagnose.cross_score import ScoringFailed, cross_log_probs
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.huggingface import ATTENTION, HuggingFaceModel
from ragen.model.vocabulary import token_scores

VOCAB = 40
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def native():
    torch.manual_seed(3)
    theirs = sharpened(Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval())
    ours = Decoder(Shape.of(theirs.config))
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


def adapted():
    """A family that only the adapter runs: theirs with our attention, and theirs as it is."""
    torch.manual_seed(4)
    theirs = sharpened(Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval())
    config = Qwen3Config(**SIZES)
    config._attn_implementation = ATTENTION
    module = Qwen3ForCausalLM(config).eval()
    module.load_state_dict(theirs.state_dict())
    return HuggingFaceModel(module), theirs


def windowed():
    """A window shorter than most pairs."""
    torch.manual_seed(5)
    theirs = sharpened(AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=4)).eval())
    ours = Decoder(Shape.of(theirs.config))
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs


def hybrid():
    """Its convolutions see tokens of the prompt, not only keys and values."""
    torch.manual_seed(6)
    config = Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, pad_token_id=0
    )  # fmt: skip
    theirs = sharpened(AutoModelForCausalLM.from_config(config).eval())
    module = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=ATTENTION).eval()
    module.load_state_dict(theirs.state_dict())
    return HuggingFaceModel(module).check(), theirs


def sharpened(module):
    """Large weights, so that what is attended to matters."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return module


MODELS = {"native": native(), "adapted": adapted(), "windowed": windowed(), "hybrid": hybrid()}


@torch.no_grad()
def naive(theirs, prompts, reasonings, temperature):
    """One forward pass of transformers' own module for each pair."""

    def log_prob(prompt, reasoning):
        logits = theirs(torch.tensor([prompt + reasoning])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits.double() / temperature, dim=-1)[range(len(reasoning)), reasoning]
        return float(chosen.sum())

    return [[log_prob(prompt, reasoning) for prompt in prompts] for reasoning in reasonings]


def assert_close(got, wanted):
    """A hundred-thousandth, in nats or of the value."""
    assert torch.allclose(torch.tensor(got).double(), torch.tensor(wanted).double(), rtol=1e-5, atol=1e-5)


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple)


@pytest.mark.parametrize("kind", list(MODELS))
@given(
    prompts=st.lists(ids, min_size=1, max_size=5),
    reasonings=st.lists(ids, min_size=1, max_size=6),
    temperature=st.sampled_from([0.6, 1.0]),
    max_pairs=st.integers(1, 12),
)
@settings(max_examples=25, deadline=None)
def test_the_matrix_equals_plain_passes(kind, prompts, reasonings, temperature, max_pairs):
    ours, theirs = MODELS[kind]
    got = cross_log_probs(ours, prompts, reasonings, temperature, max_pairs)
    assert_close(got, naive(theirs, prompts, reasonings, temperature))


def made_up(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


class Counted:
    """A model that notes how many tokens each pass computes."""

    is_cacheable, window = True, None

    def __init__(self, model):
        self.model, self.shape, self.logits, self.passes = model, model.shape, model.logits, []

    def hidden(self, token_ids, positions, attend, rows):
        self.passes.append(len(token_ids))
        return self.model.hidden(token_ids, positions, attend, rows)


def test_each_prompt_once_and_equal_ones_once():
    ours, theirs = MODELS["native"]
    prompts, reasonings = made_up(20, 30, 25), made_up(6, 1, 9, 4, seed=1)
    model = Counted(ours)
    twice = cross_log_probs(model, [*prompts, prompts[1]], [*reasonings, reasonings[2]], 1.0, max_pairs=4)
    assert model.passes == [20 + 16, 30 + 16, 25 + 16], (
        "a block for each prompt; the last token of a reasoning is not fed"
    )
    assert_close(twice, naive(theirs, [*prompts, prompts[1]], [*reasonings, reasonings[2]], 1.0))
    model = Counted(ours)
    cross_log_probs(model, prompts, reasonings, 1.0, max_pairs=128)
    assert model.passes == [75 + 3 * 16], "all in one pass where there is room"
    model = Counted(ours)
    few = cross_log_probs(model, prompts, reasonings, 1.0, max_pairs=3)
    assert model.passes == [20 + 8, 8, 30 + 8, 8, 25 + 8, 8], "the prompt's keys and values are kept for later passes"
    assert_close(few, naive(theirs, prompts, reasonings, 1.0))


def test_a_pass_stays_within_what_a_cpu_likes(monkeypatch):
    ours, _ = MODELS["native"]
    prompts, reasonings = made_up(10, 12, 8, 15), made_up(6, 3, 9, 4, seed=1)
    wanted = cross_log_probs(ours, prompts, reasonings, 1.0, 128)
    for place in (cross_score, cross_score.micro_batches.__globals__):
        target = place if isinstance(place, dict) else vars(place)
        monkeypatch.setitem(target, "CPU_TOKENS", 70)
    model = Counted(ours)
    assert_close(cross_log_probs(model, prompts, reasonings, 1.0, 128), wanted)
    assert model.passes == [22 + 2 * 18, 23 + 2 * 18]


def test_logits_come_in_chunks(monkeypatch):
    ours, theirs = MODELS["native"]
    monkeypatch.setattr(cross_score, "MAX_CHUNK_LOGITS", 3 * VOCAB)
    prompts, reasonings = made_up(5, 6), made_up(7, 2, 4, seed=1)
    assert_close(cross_log_probs(ours, prompts, reasonings, 1.0, 128), naive(theirs, prompts, reasonings, 1.0))


def test_on_cuda_the_head_keeps_no_logits(monkeypatch):
    """`token_scores` replaces the chunks of log-softmax: one pass over each chunk of logits."""
    ours, theirs = MODELS["native"]
    num_rows = []

    def spied(hidden, *given):
        num_rows.append(len(hidden))
        return token_scores(hidden, *given)

    monkeypatch.setattr(cross_score, "has_kernels", lambda x: True)
    monkeypatch.setattr(cross_score, "token_scores", spied)
    prompts, reasonings = made_up(5, 6), made_up(7, 1, 4, seed=1)
    for temperature in (1.0, 0.7):
        got = cross_log_probs(ours, prompts, reasonings, temperature, 128)
        assert_close(got, naive(theirs, prompts, reasonings, temperature))
    assert num_rows == [2 * (6 + 3)] * 2
    cross_log_probs(ours, prompts, made_up(1, 1), 1.0, 128)  # no token behind the first: nothing to score


# --- workers ------------------------------------------------------------------------------------------------------


class Together:
    """Workers that are threads, as far as `cross_log_probs` knows them."""

    device = torch.device("cpu")

    def __init__(self, rank, size, table, barrier):
        self.rank, self.size, self.table, self.barrier = rank, size, table, barrier

    def mine(self, items):
        return items[self.rank :: self.size]

    def gather(self, mine):
        self.table[self.rank] = mine
        self.barrier.wait()
        places = range(max(map(len, self.table.values())))
        return [self.table[rank][at] for at in places for rank in range(self.size) if at < len(self.table[rank])]


def with_workers(size, compute):
    """What each of them returns, or the exception that it raises."""
    table, barrier, results = {}, threading.Barrier(size, timeout=60), [None] * size

    def work(rank):
        try:
            results[rank] = compute(rank, Together(rank, size, table, barrier))
        except ScoringFailed as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("max_pairs", [4, 20])
def test_any_number_of_workers_gives_the_same_numbers(max_pairs):
    ours, _ = MODELS["native"]
    prompts, reasonings = made_up(10, 12, 8, 15, 9), made_up(6, 3, 9, 4, 1, seed=1)
    alone = cross_log_probs(ours, prompts, reasonings, 1.0, max_pairs)
    for size in (2, 3):
        shared = with_workers(
            size, lambda rank, workers: cross_log_probs(ours, prompts, reasonings, 1.0, max_pairs, workers)
        )
        assert all(result == alone for result in shared)


def test_where_one_worker_fails_all_of_them_are_told_why():
    ours, _ = MODELS["native"]

    def broken(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    models = [
        ours,
        SimpleNamespace(shape=ours.shape, is_cacheable=True, window=None, logits=ours.logits, hidden=broken),
    ]
    shared = with_workers(
        2, lambda rank, workers: cross_log_probs(models[rank], made_up(4, 5, 6), made_up(3, 2), 1.0, 2, workers)
    )
    assert all(isinstance(result, ScoringFailed) for result in shared)
    assert {str(result) for result in shared} == {
        "out of memory; lower collapse_detection.micro_batch_size, now 2",
    }


# --- models whose answer is known ---------------------------------------------------------------------------------


class Bigrams:
    """The next token depends on the last one alone, by a table of probabilities."""

    is_cacheable, window = True, None

    def __init__(self, table):
        self.scores = torch.tensor(table).clamp(min=1e-30).log()
        self.shape = SimpleNamespace(vocab_size=len(table))

    def hidden(self, token_ids, positions, attend, rows):
        return torch.nn.functional.one_hot(token_ids, len(self.scores)).float()[rows]

    def logits(self, hidden):
        return hidden @ self.scores


def measured(model, prompts, own, reasonings):
    log_probs = cross_log_probs(model, prompts, reasonings, 1.0, max_pairs=1000)
    samples = samples_of(own, [len(reasoning) for reasoning in reasonings], [prompts.index(each) for each in prompts])
    return metrics_of(log_probs, samples, 1e-3, 0.9, {})


def test_identical_prompts_carry_no_information():
    """Of a real model; the reasonings are whatever they are."""
    ours, _ = MODELS["native"]
    prompt = made_up(12)[0]
    got = measured(ours, [prompt] * 4, [0, 1, 2, 3, 0], made_up(5, 6, 2, 9, 1, seed=7))
    assert got["mi_seq_estimate"] == pytest.approx(0, abs=1e-9) and got["mi_estimate"] == pytest.approx(0, abs=1e-9)
    assert got["mi_upper_bound"] == math.log(4)
    assert (got["retrieval_accuracy"], got["retrieval_chance_level"]) == (1, 1)


def test_deterministic_distinct_replies_carry_all_of_it():
    """Prompt j ends in token j, after which 4 + j follows, again and again."""
    table = torch.zeros(8, 8)
    table[range(4), range(4, 8)] = 1
    table[range(4, 8), range(4, 8)] = 1
    prompts = [(0, 1, 2, j) for j in range(4)]
    got = measured(Bigrams(table.tolist()), prompts, [0, 1, 2, 3], [(4 + j,) * 3 for j in range(4)])
    assert got["mi_seq_estimate"] == pytest.approx(math.log(4), abs=1e-6) == pytest.approx(got["mi_upper_bound"])
    assert got["conditional_entropy_seq_est"] == pytest.approx(0, abs=1e-6)
    assert got["reasoning_entropy_seq_est"] == pytest.approx(math.log(4), abs=1e-6)
    assert (got["retrieval_accuracy"], got["retrieval_above_chance"]) == (1, 0.75)


def test_a_template_has_entropy_and_no_information():
    """Tokens 4 to 7 follow anything, each as likely: the reasonings vary, and no prompt has to do with it."""
    table = [[0.0] * 4 + [0.25] * 4] * 8
    reasonings = [tuple(4 + (index * step) % 4 for step in (1, 3, 5)) for index in range(16)]
    got = measured(Bigrams(table), [(j,) for j in range(4)], [index % 4 for index in range(16)], reasonings)
    assert got["mi_seq_estimate"] == pytest.approx(0, abs=1e-9)
    assert got["conditional_entropy_est"] == pytest.approx(math.log(4), abs=1e-6)
    assert got["retrieval_accuracy"] == got["retrieval_chance_level"] == 0.25


def test_a_prompt_that_tells_one_bit():
    """Even prompts are followed by token 4 or 5, odd ones by 6 or 7: of two bits one is known from the prompt."""
    table = [[0.0] * 4 + ([0.5, 0.5, 0.0, 0.0] if last % 2 == 0 else [0.0, 0.0, 0.5, 0.5]) for last in range(4)] * 2
    got = measured(Bigrams(table), [(j,) for j in range(4)], [0, 1, 2, 3], [(4,), (6,), (5,), (7,)])
    assert got["mi_seq_estimate"] == pytest.approx(math.log(2), abs=1e-6)
    assert got["conditional_entropy_est"] == pytest.approx(math.log(2), abs=1e-6)
    assert (got["retrieval_accuracy"], got["retrieval_accuracy@2"]) == (0.5, 1)
