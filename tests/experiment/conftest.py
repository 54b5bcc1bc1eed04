"""Experiments are expanded and checked many times over, and their queue runs without Ray."""

import pytest
from dry_runs import resolve_once
from stub_plans import FakeCluster

import ragen.config.compose
from ragen.experiment import scheduler


@pytest.fixture
def resolved_once(monkeypatch):
    """Each config is resolved once."""
    monkeypatch.setattr(ragen.config.compose, "resolve", resolve_once)


@pytest.fixture
def fake(monkeypatch):
    """Make runs end as told; returns the cluster."""

    def install(outcomes=None, **options):
        cluster = FakeCluster(outcomes, **options)
        monkeypatch.setattr(scheduler, "connected", cluster.connected)
        monkeypatch.setattr(scheduler, "PAUSE", 0.001)
        return cluster

    return install
