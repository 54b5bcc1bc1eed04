"""What the tests of evaluation share: the embedded model, loaded once."""

import pytest

from ragen.model.load import find_model, load_model


@pytest.fixture(scope="session")
def pocket():
    return load_model(find_model("pocket"), device="cpu")
