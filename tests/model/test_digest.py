"""Equal weights have one digest wherever they lie, and others another."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragen.model.digest import SAMPLE, digest
from ragen.model.load import find_model


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in (("a", (3, 4)), ("b", (5,)), ("c", (1,)))}


def stored(folder, **files):
    folder.mkdir()
    for name, weights in files.items():
        save_file(weights, folder / f"{name}.safetensors", metadata={"written": name})
    return digest(folder)


def test_a_copy_is_the_same_however_it_is_cut_into_files(tmp_path, weights):
    whole = stored(tmp_path / "whole", model=weights)
    parts = stored(tmp_path / "parts", one={"c": weights["c"]}, two={key: weights[key] for key in "ab"})
    assert whole == parts == digest(shutil.copytree(tmp_path / "whole", tmp_path / "copy"))


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights | {"b": weights["b"] + torch.tensor([0, 0, 0, 0, 1e-3])},
        lambda weights: weights | {"b": weights["b"].bfloat16()},
        lambda weights: weights | {"a": weights["a"].reshape(4, 3)},
        lambda weights: weights | {"d": weights["c"].clone()},
        lambda weights: {"x": weights["a"], "b": weights["b"], "c": weights["c"]},
    ],
)
def test_every_difference_tells(tmp_path, weights, change):
    assert stored(tmp_path / "one", model=weights) != stored(tmp_path / "other", model=change(weights))


def test_large_weights_are_looked_at_in_the_middle(tmp_path):
    weights = {"large": torch.zeros(10 * SAMPLE)}
    before = stored(tmp_path / "one", model=weights)
    weights["large"][5 * SAMPLE] = 1
    assert stored(tmp_path / "other", model=weights) != before


def test_models_by_name(tmp_path):
    """The blank one has the files of the trained one."""
    pocket, blank = find_model("pocket"), find_model("pocket-blank")
    copy = find_model(str(shutil.copytree(pocket.folder, tmp_path / "copy")))
    assert pocket.digest == copy.digest != blank.digest
    weights = load_file(tmp_path / "copy/model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, tmp_path / "copy/model.safetensors")
    assert find_model(str(tmp_path / "copy")).digest != pocket.digest
    assert digest(tmp_path) == ""
