"""The device part of graphs, without a GPU: slots at fixed addresses, forward passes over them, and the Triton kernels.

On a CPU steps run as they would be captured; kernels run in Triton's interpreter, where Triton is installed.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import needs_triton
from test_engine_families import module_pair, native_pair
from test_native import END, SAMPLING, Letters, Scripted, check_against_oracle, models, samplings, scripts, splitmix

from ragen.engine.base import Sampling
from ragen.engine.forced_length import ForcedLength
from ragen.engine.native.engine import NativeEngine
from ragen.engine.native.graphs import GraphRows
from ragen.engine.native.slot_memory import rounded, slot_bytes, slots_within
from ragen.engine.native.way import Way, slots_of_share
from ragen.model.attention import Packed

__all__ = ["models"]  # a fixture


def slot_engine(model, triton, max_rows=64, burst=4, rows=None):
    """An engine that runs as on a GPU, with every step computed instead of replayed."""
    engine = NativeEngine(model, Letters(), END, max_rows=max_rows, burst=burst)
    engine.way = Way(True, triton, burst, "test")
    engine._graph_rows = rows or GraphRows(model, triton, capture=False)
    return engine


@settings(max_examples=12)
@given(st.lists(scripts, min_size=1, max_size=7), samplings, st.integers(1, 5), st.integers(1, 6))
def test_replies_equal_the_oracles(models, listed, sampling, max_rows, burst):
    """Ragged prompts, early ends, more conversations than slots: no conversation sees another's tokens."""
    ours, theirs = models
    conversations = [Scripted(*script) for script in listed]
    slot_engine(ours, False, max_rows, burst).run(conversations, sampling)
    check_against_oracle(conversations, theirs, sampling)


@pytest.mark.parametrize("family", ["qwen3, yarn", "llama3", "mistral, short window"])
def test_slots_serve_every_family(family):
    ours, theirs = native_pair(family)
    conversations = long_and_short(5)
    slot_engine(ours, False, max_rows=3).run(conversations, SAMPLING)
    check_against_oracle(conversations, theirs, SAMPLING)


def test_slots_serve_hugging_face_modules():
    """Without our kernels nothing is asked of a model but what its protocol has, so that it can be captured too."""
    ours, theirs = module_pair("olmo3")
    conversations = long_and_short(5)
    slot_engine(ours, False, max_rows=3).run(conversations, SAMPLING)
    check_against_oracle(conversations, theirs, SAMPLING)


def long_and_short(num, first_key=0):
    return [
        Scripted([tuple(2 + (key + at) % 30 for at in range(1 + 7 * (key % 4)))] * (1 + key % 3), True, first_key + key)
        for key in range(num)
    ]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen3, yarn"])
def test_with_triton_kernels_replies_equal_the_oracles(models, family):
    ours, theirs = models if family == "qwen2" else native_pair(family)
    sampling = Sampling(temperature=0.7, top_p=1.0, top_k=-1, greedy=False, max_tokens=3, stop_at_answer=True)
    conversations = long_and_short(4)
    slot_engine(ours, True, max_rows=3, burst=2).run(conversations, sampling)
    check_against_oracle(conversations, theirs, sampling)


# --- rounding -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def distance(reference, context, key, position, temperature, id_):
    """How far a draw is from the range of a token, as a share of all mass, by float32 probabilities; 0 within it."""
    attend = Packed([len(context)])
    logits = reference.logits(reference.hidden(torch.tensor(context), attend.positions, attend)[-1:])
    edges = [0.0, *torch.softmax(logits[0].double() / temperature, dim=-1).cumsum(0).tolist()]
    draw = splitmix(key, position)
    return max(0.0, edges[id_] - draw, draw - edges[id_ + 1])


def first_difference(reference, left, right, temperature):
    """None for equal conversations, else how far the first draw that differs is from both of its tokens."""
    context = []
    for turn, (mine, other) in enumerate(zip(left.replies, right.replies, strict=True)):
        context += left.prompts[turn]
        for position, ids in enumerate(zip(mine.ids, other.ids, strict=False)):
            if ids[0] != ids[1]:
                given = [*context, *mine.ids[:position]], (left.key * 977 + turn) % 2**64, position, temperature
                return max(distance(reference, *given, id_) for id_ in ids)
        context += mine.ids
    return None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_slots_draw_as_plain_operations_do_except_within_rounding_of_a_border(models, dtype, tolerance):
    """Slots and plain operations round differently; in bfloat16 that shows. Every other draw is the same."""
    model, reference = (copy.deepcopy(models[0]) for _ in range(2))
    for weight, exact in zip(model.parameters(), reference.parameters(), strict=True):
        weight.data = weight.data.to(dtype)
        exact.data = weight.data.float()
    sampling = Sampling(0.9, 1.0, -1, greedy=False, max_tokens=24, stop_at_answer=False)
    ours, theirs = long_and_short(30), long_and_short(30)
    slot_engine(model, False, max_rows=7).run(ours, sampling)
    NativeEngine(model, Letters(), END).run(theirs, sampling)
    found = [first_difference(reference, left, right, 0.9) for left, right in zip(ours, theirs, strict=True)]
    differing = [value for value in found if value is not None]
    assert max(differing, default=0.0) < tolerance
    assert len(differing) < len(found) / 2
    assert differing or dtype == torch.float32, "in bfloat16 some differ, or this test shows nothing"


@settings(max_examples=8)
@given(st.lists(scripts, min_size=5, max_size=40), st.integers(1, 24), st.integers(1, 8), st.booleans())
def test_ragged_lengths_queues_and_used_slots_do_not_show(models, listed, max_rows, burst, is_ragged):
    """Many conversations of forced lengths, on slots that the run before left full of garbage, against plain rows."""
    sampling = Sampling(1.0, 1.0, -1, False, 40, False, ForcedLength(6, is_ragged))
    rows = GraphRows(models[0], False, capture=False)
    slot_engine(models[0], False, max_rows=9, rows=rows).run(long_and_short(12), SAMPLING)
    for part in (*rows.slots.cache.keys, *rows.slots.cache.values):
        part.normal_(0, 100)
    ours, theirs = ([Scripted(*script) for script in listed] for _ in range(2))
    slot_engine(models[0], False, max_rows, burst, rows).run(ours, sampling)
    NativeEngine(models[0], Letters(), END).run(theirs, sampling)
    for left, right in zip(ours, theirs, strict=True):
        assert [reply.ids for reply in left.replies] == [reply.ids for reply in right.replies]
        assert [len(reply.ids) for reply in left.replies] == [
            sampling.forced_length.tokens((left.key * 977 + turn) % 2**64, 40) for turn in range(len(left.prompts))
        ]


# --- slots ----------------------------------------------------------------------------------------------------------


def test_slots_keep_their_addresses_from_run_to_run_and_nothing_of_the_last_run_shows(models):
    ours, theirs = models
    rows = GraphRows(ours, False, capture=False)
    slot_engine(ours, False, max_rows=8, rows=rows).run(long_and_short(20), SAMPLING)
    before = [part.data_ptr() for part in rows.slots.cache.keys]
    for part in (*rows.slots.cache.keys, *rows.slots.cache.values):
        part.normal_(0, 100)  # what is left over must not matter
    conversations = long_and_short(20, first_key=50)
    slot_engine(ours, False, max_rows=8, rows=rows).run(conversations, SAMPLING)
    check_against_oracle(conversations, theirs, SAMPLING)
    assert [part.data_ptr() for part in rows.slots.cache.keys] == before


def test_two_runs_at_a_time_do_not_share_slots(models):
    ours, theirs = models
    engine = slot_engine(ours, False)
    conversations = [long_and_short(3), long_and_short(3, first_key=9)]
    runs = [engine.start(list(listed), SAMPLING) for listed in conversations]
    for run in runs:
        run.admit(8)
    while any(run.rows for run in runs):
        for run in runs:
            if run.rows:
                run.step()
    for listed in conversations:
        check_against_oracle(listed, theirs, SAMPLING)


@pytest.mark.parametrize(("num", "graph"), [(1, 1), (3, 4), (33, 48), (97, 128), (256, 256), (257, 320)])
def test_a_graph_serves_a_range_of_row_counts(num, graph):
    assert rounded(num) == graph


def test_a_share_of_the_memory_bounds_the_slots(models, monkeypatch):
    """A graph has 8 or 16 rows, and one more for padding; 1,000 tokens and a burst take two steps of 512."""
    shape = models[0].shape
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    memory = SimpleNamespace(total_memory=token * 1024 * 24)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert slots_of_share(models[0], 64, 1000, 0.5) == 8
    assert slots_of_share(models[0], 3, 1000, 0.5) == 3
    assert slots_of_share(models[0], 64, 1000, 0.01) == 1  # never refused: the others wait in line


@pytest.mark.parametrize(("num_rows", "max_tokens"), [(1, 40), (5, 504), (17, 505)])
def test_slots_are_as_large_as_predicted_from_the_first_run_on(models, num_rows, max_tokens):
    """Whatever the conversations' lengths: they are made for the longest one at once, and do not grow."""
    rows = GraphRows(models[0], False, capture=False, max_tokens=max_tokens + 8)
    slot_engine(models[0], False, max_rows=num_rows, rows=rows).run(long_and_short(18), SAMPLING)
    predicted = slot_bytes(models[0].shape, num_rows, max_tokens, size=4)
    assert rows.slots.num_bytes == predicted
    assert slots_within(models[0].shape, num_rows, max_tokens, 4, predicted) == num_rows


def test_released_slots_hold_nothing_and_come_back(models):
    """Before an update their memory is free; the next run captures again, and samples the same tokens."""
    ours, theirs = models
    rows = GraphRows(ours, False, capture=False, max_tokens=300)
    engine = slot_engine(ours, False, max_rows=8, rows=rows)
    for first_key in (0, 50):
        conversations = long_and_short(9, first_key)
        engine.run(conversations, SAMPLING)
        check_against_oracle(conversations, theirs, SAMPLING)
        assert rows._graphs and rows.slots.num_bytes > 0
        engine.release()
        assert not rows._graphs and not rows._fills and rows.slots.num_bytes == 0


# --- kernels, each against torch ------------------------------------------------------------------------------------


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    from ragen.engine.native import kernels

    return kernels


def cache_parts(num_rows, num_kv_heads, capacity, head_dim):
    return torch.randn(2, num_rows, num_kv_heads, capacity, head_dim).unbind()


def attention(query, keys, values, length):
    """One query [heads, dim] over the first tokens of a row."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (part[:, :length].repeat_interleave(group, dim=0) for part in (keys, values))
    weights = torch.softmax(torch.einsum("hd,htd->ht", query, keys) * query.shape[1] ** -0.5, dim=-1)
    return torch.einsum("ht,htd->hd", weights, values)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 2, 128), (9, 3, 64), (14, 2, 64), (4, 4, 80)])
def test_attention_of_rows(kernels, monkeypatch, num_heads, num_kv_heads, head_dim, splits):
    monkeypatch.setattr(kernels, "SPLITS", ((0, splits),))
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 62, 63, 64, 200, 299])
    keys, values = cache_parts(len(lengths), num_kv_heads, 300, head_dim)
    query = torch.randn(len(lengths), num_heads, head_dim)
    mixed = kernels.attend_to_rows(query, keys, values, lengths)
    for row, length in enumerate(lengths.tolist()):
        wanted = attention(query[row], keys[row], values[row], length + 1)
        assert torch.allclose(mixed[row], wanted, atol=1e-5), row


@pytest.mark.slow
def test_attention_of_tiles(kernels):
    torch.manual_seed(0)
    rows, starts, counts = [3, 0, 2], [5, 0, 130], [70, 1, 65]
    keys, values = cache_parts(4, 2, 256, 32)
    query = torch.randn(sum(counts), 6, 32)
    tiles = torch.tensor(kernels.tiles_of(rows, starts, counts), dtype=torch.int32)
    mixed = kernels.attend_to_tiles(query, keys, values, tiles)
    index = 0
    for row, start, count in zip(rows, starts, counts, strict=True):
        for position in range(start, start + count):
            wanted = attention(query[index], keys[row], values[row], position + 1)
            assert torch.allclose(mixed[index], wanted, atol=1e-5), (row, position)
            index += 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [40, 2048, 5000])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_draw_is_the_samplers(kernels, size, greedy):
    from ragen.engine.native.sampler import sample, uniforms

    torch.manual_seed(size)
    num_rows, temperature = 24, 0.7
    logits = torch.randn(num_rows, size) * 3
    logits[:, ::5] = -torch.inf  # tokens without mass are never drawn
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    state = torch.stack([torch.arange(num_rows), torch.zeros(num_rows).long(), keys, torch.arange(num_rows) * 3])
    sampling = Sampling(temperature, 1.0, -1, greedy, 10, False)
    wanted = sample(logits, uniforms(state[2], state[3]), sampling)
    ids, log_probs = torch.zeros(3, num_rows, dtype=torch.int64), torch.zeros(3, num_rows)
    heat = torch.tensor(1.0 if greedy else temperature)
    before = state.clone()
    kernels.draw(logits, heat, state, ids, log_probs, torch.tensor(1), greedy)
    assert torch.equal(ids[1], wanted[0]) and torch.allclose(log_probs[1], wanted[1], atol=1e-5)
    assert not ids[0].any() and not ids[2].any()
    moved = torch.stack([before[0] + 1, ids[1], before[2], before[3] + 1])
    assert torch.equal(state, moved)
