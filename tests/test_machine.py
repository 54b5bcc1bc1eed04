"""What the machine has, as the system reports it."""

import os

import pytest

from ragen import machine
from ragen.config import model_name


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'", 2),
        ("true", 0),
        ("echo 'GPU 0: H200'; exit 9", 0),
        (None, 0),
    ],
)
def test_the_driver_lists_gpus(tmp_path, monkeypatch, script, count):
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.num_gpus() == count
    assert (model_name.choose({})[0] == model_name.QWEN) is (count > 0)


def test_cores_and_memory_are_those_of_this_process():
    assert 0 < machine.cores() <= (os.cpu_count() or 1)
    total, free = machine.ram_bytes()
    assert 0 < free <= total
