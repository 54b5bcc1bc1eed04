"""Room for rows: what grows keeps its content, one tensor at a time."""

import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.engine.native import cache as module
from ragen.engine.native.cache import RowCache

LAYERS, HEADS, DIM, ROWS = 3, 2, 4, 5


def filled(length):
    made = RowCache(LAYERS, HEADS, DIM, ROWS, torch.empty(0))
    made.reserve(length)
    for number, part in enumerate((*made.keys, *made.values)):
        part.copy_(torch.arange(part.numel()).view_as(part) + 1000 * number)
    return made


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 600), st.permutations(range(ROWS)), st.integers(1, ROWS))
def test_growing_and_keeping_rows_change_no_bit(length, wanted, order, num_kept):
    cache = filled(length)
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    cache.reserve(wanted)
    steps = -(-max(0, wanted - before[0].shape[2]) // 128)
    assert cache.capacity == before[0].shape[2] + 128 * steps
    rows = torch.tensor(order[:num_kept])
    cache.keep_rows(rows)
    for part, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert part.shape == (num_kept, HEADS, cache.capacity, DIM)
        for place, row in enumerate(rows.tolist()):
            assert torch.equal(part[place, :, : old.shape[2]], old[row])
            assert not part[place, :, old.shape[2] :].any()


def test_new_rows_come_behind_the_others():
    cache = filled(10)
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    cache.add_rows(2)
    assert cache.lengths.tolist() == [0] * (ROWS + 2)
    for part, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(part[:ROWS], old) and part.shape[0] == ROWS + 2 and not part[ROWS:].any()


def test_only_one_tensor_is_there_twice(monkeypatch):
    """When the next one grows, the old form of the one before is gone."""
    cache = filled(10)
    old = [weakref.ref(part) for part in (*cache.keys, *cache.values)]
    pad, alive = module.F.pad, []

    def watched(part, *size):
        alive.append([reference() is not None for reference in old])
        return pad(part, *size)

    monkeypatch.setattr(module.F, "pad", watched)
    cache.reserve(1000)
    expected = [[False] * gone + [True] * (2 * LAYERS - gone) for gone in range(2 * LAYERS)]
    assert alive == expected
