"""What the tests of the server share: the pocket model, and a server for it."""

import pytest

from ragen.model.load import find_model, load_model
from ragen.serve.web import Server


@pytest.fixture(scope="module")
def loaded():
    return load_model(find_model("pocket"), device="cpu")


@pytest.fixture(scope="module")
def server(loaded):
    with Server(loaded, "pocket") as running:
        yield running
