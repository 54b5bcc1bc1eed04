"""`random:SHAPE` is a model of exactly that shape, without any file of weights."""

import pytest
import torch
from transformers import AutoConfig

from ragen.cli import main
from ragen.errors import ConfigError
from ragen.model import random_weights
from ragen.model.decoder import Decoder, Shape
from ragen.model.load import find_model, load_model

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(("name", "num_parameters"), PUBLISHED.items())
def test_a_shape_has_the_published_number_of_parameters(name, num_parameters):
    config = AutoConfig.from_pretrained(find_model(f"random:{name}").folder)
    with torch.device("meta"):
        decoder = Decoder(Shape.of(config))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == num_parameters


def test_weights_are_the_same_each_time_and_the_tokenizer_reads_and_writes(monkeypatch):
    monkeypatch.setitem(random_weights.SHAPES, "tiny", (2, 32, 64, 4, 2, 700, True))
    first, second = (load_model(find_model("random:tiny"), "cpu") for _ in range(2))
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right) and left.dtype == torch.float32
    assert first.tokenizer.decode(first.tokenizer.encode("Up || Left")) == "Up || Left"
    assert len(first.tokenizer) <= 700
    assert first.source.digest == "random:tiny"


def test_an_unknown_shape_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"random:Qwen2.5-4B: no such shape. Use one of .*random:Qwen2.5-3B"):
        find_model("random:Qwen2.5-4B")


def test_the_command_line_takes_the_name(capsys):
    assert main(["train", "--config-name", "_2_sokoban", "model_path=random:Qwen2.5-3B", "--dry-run"]) == 0
    assert "random:Qwen2.5-3B" in capsys.readouterr().out
