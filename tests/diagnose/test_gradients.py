"""Buckets, sums and what is made of them, against plain computations with every gradient written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.diagnose import gradients
from ragen.diagnose.gradients import BUCKETINGS, Sums, TermLoss, by_spread, device_for, signal_to_noise, sweep
from ragen.distributed.workers import Workers

STDS = st.lists(st.sampled_from([0.0, 0.3, 0.999, 1.0, 2.5, 4.0, 5.0, 7.0]), max_size=17)


# --- buckets ------------------------------------------------------------------------------------------------------


def test_quantiles_by_hand():
    """Seven groups in three parts of two; the one that is left over goes to the last."""
    stds = [0.5, 0.0, 3.0, 0.0, 1.0, 2.0, 0.1]
    assert BUCKETINGS["quantile"](stds, 3) == {"bucket_1": [1, 3], "bucket_2": [6, 0], "bucket_3": [4, 5, 2]}
    assert BUCKETINGS["quantile"]([2.0, 1.0], 6) == {"bucket_1": [1], "bucket_2": [0]}
    assert BUCKETINGS["quantile"]([], 6) == {}


def test_fixed_edges_by_hand():
    stds = [5.0, 0.99, 1.0, 12.0, 0.0, 4.99]
    assert BUCKETINGS["fixed_rv"](stds, 2) == {
        "bucket_1": [4, 1], "bucket_2": [2], "bucket_5": [5], "bucket_6": [0, 3],
    }  # fmt: skip


@given(STDS, st.integers(1, 8), st.sampled_from(sorted(BUCKETINGS)))
def test_every_group_is_in_one_bucket_and_buckets_are_stretches(stds, num, mode):
    buckets = BUCKETINGS[mode](stds, num)
    assert [group for groups in buckets.values() for group in groups] == by_spread(stds)
    assert sorted(by_spread(stds)) == list(range(len(stds)))
    assert all(groups for groups in buckets.values())


@given(STDS, st.integers(1, 8))
def test_quantiles_have_equal_sizes_but_the_last(stds, num):
    sizes = [len(groups) for groups in BUCKETINGS["quantile"](stds, num).values()]
    assert len(sizes) == min(num, len(stds))
    assert len(set(sizes[:-1])) <= 1 and all(size <= sizes[-1] for size in sizes)
    assert not sizes or sizes[-1] - sizes[0] < len(sizes)


# --- signal and noise ---------------------------------------------------------------------------------------------


def test_signal_to_noise_by_hand():
    assert signal_to_noise(2, 5.0, 5.0) == 1.0  # (2, 0) and (0, 1)
    assert signal_to_noise(2, 16.0, 10.0) == 4.0  # (3, 0) and (1, 0): mean 4 of (6, 2), squared error 16 / 2 / 2
    assert signal_to_noise(3, 9.0, 3.0) is None  # three times (1, 0): no noise
    assert signal_to_noise(4, 0.0, 0.0) == 0.0
    assert signal_to_noise(1, 9.0, 9.0) is None


def test_unrelated_groups_have_a_ratio_of_one():
    generator = torch.Generator().manual_seed(0)
    for num in (3, 50):
        shares = torch.randn(num, 20_000, generator=generator, dtype=torch.float64)
        ratio = signal_to_noise(num, float(shares.sum(0).square().sum()), float(shares.square().sum()))
        assert ratio == pytest.approx(1.0, abs=0.05)


# --- the sweep ----------------------------------------------------------------------------------------------------


COEFFICIENTS = {"task": 1.0, "kl": -0.3}


class Problem:
    """Groups of random rows, a small network, and two terms: everything is a weighted mean over rows."""

    def __init__(self, sizes, seed, parts=2):
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in sizes]
        self.weights = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
        self.bias = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
        self.unused = torch.zeros(2, dtype=torch.float64).requires_grad_()
        self.parameters, self.parts = [self.weights, self.bias, self.unused], parts

    def losses(self, rows):
        out = (rows @ self.weights).tanh()
        return {"task": (out + self.bias).square().sum(1), "kl": out.exp().sum(1)}

    def passes_of(self, into):
        def passes(group):
            rows = self.rows[group]
            for part in rows.chunk(self.parts):
                losses = self.losses(part)
                yield [
                    TermLoss(
                        term,
                        COEFFICIENTS[term] * values.sum() / len(rows),
                        values.detach().sum() / len(rows),
                        into,
                    )
                    for term, values in losses.items()
                ]

        return passes

    def gradient(self, groups, term):
        """Of the mean over all rows of these groups, on its own."""
        mean = self.losses(torch.cat([self.rows[group] for group in groups]))[term].mean()
        found = torch.autograd.grad(COEFFICIENTS[term] * mean, self.parameters, allow_unused=True)
        whole = [torch.zeros_like(p) if part is None else part for part, p in zip(found, self.parameters, strict=True)]
        return torch.cat([part.flatten() for part in whole]), float(mean.detach())


def cosine(left, right):
    return float(left @ right / (left.norm() * right.norm()))


def naive_ratio(problem, groups):
    """The mean of n estimates against its squared standard error."""
    num_rows = sum(len(problem.rows[group]) for group in groups)
    estimates = torch.stack([
        len(groups) * len(problem.rows[group]) / num_rows * problem.gradient([group], "task")[0] for group in groups
    ])  # fmt: skip
    noise = float(estimates.var(0, unbiased=True).sum()) / len(groups)
    return float(estimates.mean(0).square().sum()) / noise


def close(value):
    return pytest.approx(value, rel=1e-5, abs=1e-7)


def swept(problem, stds, num, workers=None):
    sums = Sums(
        BUCKETINGS["quantile"](stds, num), [len(rows) for rows in problem.rows], ["task", "kl"], problem.parameters,
        workers or Workers(),
    )  # fmt: skip
    sweep(problem.parameters, by_spread(stds), {"x": sums}, problem.passes_of(("x",)), workers or Workers())
    return sums


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_all_numbers_equal_those_of_each_bucket_and_term_alone(groups, num, seed):
    problem, stds = Problem([size for size, _ in groups], seed), [std for _, std in groups]
    sums = swept(problem, stds, num)
    for name, members in (sums.buckets | {"all": list(range(len(stds)))}).items():
        measured = sums.measured[name]
        (task, task_loss), (kl, kl_loss) = (problem.gradient(members, term) for term in ("task", "kl"))
        assert measured.num_groups == len(members)
        assert measured.norms == close({"task": float(task.norm()), "kl": float(kl.norm())})
        assert measured.losses == close({"task": task_loss, "kl": kl_loss})
        assert measured.cosines == close({("task", "kl"): cosine(task, kl)})
        if len(members) > 1:
            assert measured.snr == pytest.approx(naive_ratio(problem, members), rel=1e-4)
        else:
            assert measured.snr is None
    names = list(sums.buckets)
    assert sums.between == close({
        (left, right): cosine(*(problem.gradient(sums.buckets[name], "task")[0] for name in (left, right)))
        for place, right in enumerate(names) for left in names[:place]
    })  # fmt: skip


def test_all_is_the_sum_of_the_buckets_by_their_counts():
    problem, stds = Problem([3, 1, 4, 2, 5], 3), [0.1, 0.5, 0.2, 0.9, 0.7]
    sums = swept(problem, stds, 2)
    buckets = {name: problem.gradient(groups, "task")[0] for name, groups in sums.buckets.items()}
    assert sums.buckets == {"bucket_1": [0, 2], "bucket_2": [1, 4, 3]}
    total = (7 * buckets["bucket_1"] + 8 * buckets["bucket_2"]) / 15
    found = torch.cat([part.flatten() for part in sums.total["task"]])
    assert torch.allclose(found.double(), total, atol=1e-6)


def test_two_sums_share_a_sweep_and_each_takes_its_own():
    """One over all groups, one over some of them; a loss goes where it says."""
    problem, stds = Problem([2, 3, 1, 4], 5), [0.4, 0.1, 0.3, 0.2]
    counts = [len(rows) for rows in problem.rows]
    some = Sums({"bucket_1": [3], "bucket_2": [0]}, counts, ["task", "kl"], problem.parameters)
    every = Sums({"bucket_1": [1, 3], "bucket_2": [2, 0]}, counts, ["task", "kl"], problem.parameters)

    def passes(group):
        return problem.passes_of(("some", "every") if group in (0, 3) else ("every",))(group)

    sweep(problem.parameters, by_spread(stds), {"some": some, "every": every}, passes)
    for sums in (some, every):
        assert list(sums.measured) == ["bucket_1", "bucket_2", "all"]
        for name, members in (sums.buckets | {"all": list(sums.bucket_of)}).items():
            assert sums.measured[name].norms["task"] == close(float(problem.gradient(members, "task")[0].norm()))
            assert (sums.measured[name].snr is None) == (len(members) == 1)
        assert list(sums.between) == [("bucket_1", "bucket_2")]


BOARD = []


class Turns(Workers):
    """One of two workers that are run one after the other: the second finds what the first has added."""

    def add_up(self, tensors):
        for tensor in tensors:
            if self.rank == 1:
                BOARD.append(tensor.clone())
            else:
                tensor += BOARD.pop(0)


def test_workers_share_the_groups():
    """Worker 1 goes first and leaves its sums, in order, for worker 0."""
    problem, stds = Problem([2, 3, 1, 4, 2], 6), [0.4, 0.1, 0.3, 0.2, 0.6]
    alone = swept(problem, stds, 2)
    BOARD.clear()
    second = swept(problem, stds, 2, Turns(rank=1, size=2))
    first = swept(problem, stds, 2, Turns(rank=0, size=2))
    assert not second.measured and not second.total and not second.between
    assert list(first.measured) == list(alone.measured)
    for name, measured in first.measured.items():
        wanted = alone.measured[name]
        assert measured.norms == close(wanted.norms) and measured.losses == close(wanted.losses)
        assert measured.snr == pytest.approx(wanted.snr, rel=1e-4)
    assert first.between == close(alone.between)


def test_no_gradient_has_no_direction():
    """A term that is flat: norms and cosines are 0, and so is the ratio."""
    weight = torch.ones(2, requires_grad=True)
    sums = Sums({"bucket_1": [0, 1]}, [1, 1], ["task"], [weight])
    sweep(
        [weight],
        [0, 1],
        {"x": sums},
        lambda group: [[TermLoss("task", (0.0 * weight).sum(), torch.tensor(2.0), ("x",))]],
    )
    assert sums.measured["all"].norms == {"task": 0.0} and sums.measured["all"].snr == 0.0
    assert sums.measured["all"].losses == {"task": 2.0}


@pytest.mark.parametrize(
    ("free", "cached", "place"), [(60, 0, "cuda"), (31, 0, "cpu"), (30, 2, "cuda"), (32, 0, "cuda"), (0, 0, "cpu")]
)
def test_large_sums_lie_in_main_memory(monkeypatch, free, cached, place):
    """Of 100 bytes an eighth stays free, and room for as much again: 10 more need 12 + 20."""
    for name, value in {"memory_reserved": 40 + cached, "memory_allocated": 40, "mem_get_info": (free, 100)}.items():
        monkeypatch.setattr(gradients.torch.cuda, name, lambda device, value=value: value)
    assert device_for(10, torch.device("cuda")).type == place
    assert device_for(10**15, torch.device("cpu")).type == "cpu"
