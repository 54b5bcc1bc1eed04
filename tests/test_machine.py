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


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_keeps_what_the_user_has_set(monkeypatch, name):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    machine.prefer_growing_segments()
    assert os.environ[name] == "max_split_size_mb:64"
    assert [key for key in machine.ALLOCATOR_SETTINGS if key in os.environ] == [name]


def test_the_allocator_grows_its_blocks_by_default(monkeypatch):
    for name in machine.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    machine.prefer_growing_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
