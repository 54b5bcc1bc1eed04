"""A run sees the devices of its config, and what was visible before is visible again afterwards."""

import os

import pytest

from ragen.config.compose import resolve
from ragen.config.devices import VARIABLE, visible
from ragen.run import session
from ragen.train import trainer


@pytest.mark.parametrize("before", [None, "", "4,5"])
def test_devices_are_visible_for_as_long_as_it_takes(before):
    environ = {} if before is None else {VARIABLE: before}
    with visible("2,3", environ):
        assert environ == {VARIABLE: "2,3"}
    assert environ.get(VARIABLE) == before


def fail():
    raise RuntimeError("whatever happens")


def test_they_are_taken_back_when_something_fails():
    environ = {}
    with pytest.raises(RuntimeError), visible("2,3", environ):
        fail()
    assert environ == {}


@pytest.mark.parametrize(
    ("word", "seen"), [("system.CUDA_VISIBLE_DEVICES=3", "3"), ("system.CUDA_VISIBLE_DEVICES=", "")]
)
def test_a_run_sees_its_own_before_it_looks_for_any(monkeypatch, word, seen):
    looked = []

    def join():
        looked.append(os.environ[VARIABLE])
        raise RuntimeError("far enough")

    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(session.Workers, "join", join)
    with pytest.raises(RuntimeError, match="far enough"):
        trainer.train(resolve([word, "model_path=pocket"], environ={}).config)
    assert looked == [seen] and os.environ[VARIABLE] == "0"
