"""Tensors are made where the given ones lie."""

import pytest
import torch
from every_function import batch, everything


def test_nothing_is_made_on_the_default_device():
    """With a default device that holds no data, a tensor made without naming the device cannot be computed with."""
    given = batch("cpu")
    expected = everything(given)
    with torch.device("meta"):
        found = everything(given)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.device.type == "cpu" and torch.equal(value, expected[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_same():
    expected = everything(batch("cpu"))
    for name, value in everything(batch("cuda")).items():
        assert value.device.type == "cuda"
        assert torch.allclose(value.cpu(), expected[name], rtol=1e-9, atol=1e-9), name
