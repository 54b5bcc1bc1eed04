"""The v1 command line as it is on a machine with a GPU; test_pocket_defaults.py tests the embedded model."""

import pytest

from ragen.config import model_name


@pytest.fixture(autouse=True)
def a_model_is_available(request, monkeypatch):
    if "no_gpu" not in request.keywords:
        monkeypatch.setattr(model_name, "choose", lambda environ, model=model_name.QWEN: (model, "for this test"))
