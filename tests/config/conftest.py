"""The older dialect as it is on a machine with a GPU; what the embedded model changes has tests of its own."""

import pytest

from ragen.config import default_model


@pytest.fixture(autouse=True)
def a_model_can_be_had(request, monkeypatch):
    if "no_gpu" not in request.keywords:
        monkeypatch.setattr(default_model, "choose", lambda environ: (default_model.QWEN, "for this test"))
