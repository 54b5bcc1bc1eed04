"""A small fine-tuning run, made once, and the settings that keep such runs small."""

import pytest
from small import fine_tuned


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run that went through without a stop."""
    return fine_tuned(tmp_path_factory.mktemp("sft") / "out")
