"""An optimizer whose state lives in main memory: the same bits as one without, in steps, checkpoints and whole runs."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.config.schema import Optimizer
from ragen.train.offload import OffloadedAdamW, make_optimizer
from ragen.train.optimizer import MasterAdamW

SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, lr_warmup_steps=2)


def network(dtype, sizes=((7, 5), (5, 33), (33, 1))):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)).to(dtype)


def pair(dtype, chunk_size=19):
    """The same module with either optimizer."""
    plain, offloaded = network(dtype), network(dtype)
    optimizers = [make_optimizer(one.parameters(), SETTINGS, 10, flag) for one, flag in ((plain, 0), (offloaded, 1))]
    assert type(optimizers[0]) is MasterAdamW
    optimizers[1].chunk_size = chunk_size
    return [plain, offloaded], optimizers


def learn(module, optimizer, steps, seed=0, micro=3):
    generator, norms = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        optimizer.prepare()
        for _ in range(micro):
            x = torch.randn(4, 7, generator=generator).to(next(module.parameters()).dtype)
            module(x).float().square().mean().backward()
        norms.append(optimizer.step(max_norm=0.5))
        optimizer.advance()
    return norms


def assert_equal(modules, optimizers):
    states = [one.tensors(module) for one, module in zip(optimizers, modules, strict=True)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    for left, right in zip(*(module.parameters() for module in modules), strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


@settings(max_examples=15)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 400), st.integers(1, 4))
def test_steps_have_the_same_bits_for_any_chunks(dtype, chunk_size, steps):
    modules, optimizers = pair(dtype, chunk_size)
    norms = [learn(module, one, steps) for module, one in zip(modules, optimizers, strict=True)]
    assert norms[0] == norms[1]
    assert_equal(modules, optimizers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_state_is_interchangeable(dtype, order):
    """Stored by one kind, loaded by the other, further steps are bit-equal to those of a run that never stopped."""
    first, second = order
    modules, optimizers = pair(dtype)
    learn(modules[first], optimizers[first], 2)
    stored = copy.deepcopy(optimizers[first].tensors(modules[first]))
    with optimizers[second].in_full():
        modules[second].load_state_dict(modules[first].state_dict())
        optimizers[second].load(modules[second], stored, optimizers[first].num_steps)
    assert_equal(modules, optimizers)
    for module, one in zip(modules, optimizers, strict=True):
        learn(module, one, 2, seed=5)
    assert_equal(modules, optimizers)


def test_a_parameter_without_gradient_keeps_its_value_and_has_no_update():
    modules, optimizers = pair(torch.bfloat16)
    for module, one in zip(modules, optimizers, strict=True):
        before = module[2].weight.clone()
        module[0].weight.grad = torch.ones_like(module[0].weight)
        one.step(1.0)
        assert torch.equal(module[2].weight, before)
    assert_equal(modules, optimizers)


def test_gradients_are_held_once_and_no_master_is_on_the_device():
    module = network(torch.bfloat16)
    optimizer = OffloadedAdamW(module.parameters(), SETTINGS, 10)
    (holder, *_) = optimizer.holders
    assert holder.shape == module[0].weight.shape and holder.untyped_storage().nbytes() == 4
    module(torch.ones(2, 7, dtype=torch.bfloat16)).sum().backward()
    assert module[0].weight.grad is None and holder.grad.dtype == torch.float32
    optimizer.clear()
    assert holder.grad is None and optimizer.norm() == 0


def test_masters_lie_side_by_side():
    """Memory is pinned by pages: arrays of one tensor each would share them."""
    optimizer = OffloadedAdamW(network(torch.bfloat16).parameters(), SETTINGS, 10)
    places = {master.untyped_storage().data_ptr() for master in optimizer.masters}
    assert len(places) == 1
