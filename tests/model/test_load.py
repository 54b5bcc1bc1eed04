"""A model folder with a file missing or damaged is refused by the file's name, whoever asks for it."""

import shutil

import pytest

from ragen.cli import main
from ragen.errors import ConfigError
from ragen.model.load import find_model, load_model
from ragen.model.pocket.load import pocket_folder


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(pocket_folder(), tmp_path / "mine")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_kind(path):
    path.write_text("[]")


@pytest.mark.parametrize("damage", [cut, of_another_kind])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_file_is_named(folder, name, damage):
    damage(folder / name)
    with pytest.raises(ConfigError, match=f"could not load .*{folder}.*{name}.*: [^$]*copy it again"):
        load_model(find_model(str(folder)), "cpu")


@pytest.mark.parametrize("gone", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["eval", "--env", "SimpleSokoban", "--episodes", "1", "--samples", "1", "agent_proxy.prompt_style=terse"],
    ],
)
def test_no_tokenizer_is_no_empty_one(folder, tmp_path, gone, command, capsys, monkeypatch):
    for name in gone:
        (folder / name).unlink()
    monkeypatch.chdir(tmp_path)
    assert main([command[0], str(folder), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert "tokenizer.json" in said and "decodes 'left' as ''" in said and "copy it again" in said


def test_a_missing_shard_is_told_with_its_folder(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"could not load {folder}/\*.safetensors: .*1 weights are missing"):
        load_model(find_model(str(folder)), "cpu")


def test_a_damaged_model_of_another_family_is_named(folder):
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"qwen2"', '"olmo2"'))
    cut(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"could not load {folder}/\*.safetensors: SafetensorError"):
        load_model(find_model(str(folder)), "cpu")
