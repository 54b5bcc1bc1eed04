"""Experiments are expanded and checked many times over; each of their configs is resolved once."""

import pytest
from dry_runs import compose_once, resolve_once

import ragen.config.compose


@pytest.fixture
def resolved_once(monkeypatch):
    monkeypatch.setattr(ragen.config.compose, "resolve", resolve_once)
    monkeypatch.setattr(ragen.config.compose, "compose_recipe", compose_once)
