"""Experiments are expanded and checked many times over; each of their configs is resolved once."""

import pytest
from dry_runs import resolve_once

import ragen.config.compose


@pytest.fixture
def resolved_once(monkeypatch):
    monkeypatch.setattr(ragen.config.compose, "resolve", resolve_once)
