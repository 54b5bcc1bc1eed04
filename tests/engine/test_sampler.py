"""Draws and the inverse CDF."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen.engine.base import Sampling
from ragen.engine.native.sampler import sample, signed, uniforms


def sampling(**changes):
    defaults = dict(temperature=1.0, top_p=1.0, top_k=-1, greedy=False, max_tokens=1, stop_at_answer=True)
    return Sampling(**defaults | changes)


def test_uniforms_are_those_of_splitmix64():
    # The first outputs of splitmix64 with seed 1234567, as published with the algorithm.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(torch.tensor([1234567] * 3), torch.arange(3))
    assert got.tolist() == [(value >> 11) / 2**53 for value in published]


@given(st.integers(0, 2**64 - 1))
def test_signed_keeps_the_bits(key):
    assert signed(key) % 2**64 == key and -(2**63) <= signed(key) < 2**63


def test_uniforms_are_uniform_and_independent_of_neighbours():
    draws = uniforms(torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64))
    assert abs(draws.mean().item() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1].item()) < 0.02
    assert draws[77] == uniforms(torch.tensor([77]), torch.tensor([0]))[0]


def test_frequencies_follow_the_distribution():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])).expand(40_000, 4)
    draws = uniforms(torch.arange(40_000), torch.ones(40_000, dtype=torch.int64))
    ids, log_probs = sample(logits, draws, sampling())
    frequencies = torch.bincount(ids, minlength=4) / 40_000
    assert torch.allclose(frequencies, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.01)
    assert torch.allclose(log_probs.exp(), torch.tensor([0.1, 0.2, 0.3, 0.4])[ids], atol=1e-6)


def test_edges_of_the_cdf():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, 5)
    draws = torch.tensor([0.0, 0.499, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, draws, sampling())[0].tolist() == [1, 1, 3, 3]


def test_temperature_top_k_top_p_and_greedy():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(1000, 4)
    draws = uniforms(torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    assert set(sample(logits, draws, sampling(top_k=2))[0].tolist()) == {0, 1}
    assert set(sample(logits, draws, sampling(top_p=0.8))[0].tolist()) == {0, 1}
    assert set(sample(logits, draws, sampling(top_p=0.81))[0].tolist()) == {0, 1, 2}
    assert set(sample(logits, draws, sampling(greedy=True))[0].tolist()) == {0}
    # The log-prob is that of the whole distribution, whatever was left out.
    ids, log_probs = sample(logits, draws, sampling(top_k=2, temperature=2.0))
    tempered = torch.softmax(logits[0] / 2.0, -1)
    assert torch.allclose(log_probs.exp(), tempered[ids], atol=1e-6)
