"""Commands in the documents can be pasted: what is to be trained resolves, and every other command is understood."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from ragen.cli import main, train, verb_module
from ragen.config.compose import resolve
from ragen.experiment.command import sweep
from ragen.store.run_folder import RunFolder
from ragen.train import trainer

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
TRAIN = (["bash", "train.sh"], ["python", "train.py"], ["./ragen", "train"])


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines for part in line.split("&&") if (words := shlex.split(part, comments=True))]


def trained(words: list[str]) -> list[str] | None:
    """What follows a training command."""
    if words[:2] == ["./ragen", "sft"]:
        return [*words[2:], "rl_or_sft=sft"]
    return next((words[2:] for start in TRAIN if words[:2] == start), None)


ALL = [(page, words) for page in PAGES for words in commands(page)]
TRAINED = [(page, rest) for page, words in ALL if (rest := trained(words)) is not None]
OTHERS = [(page, words[1:]) for page, words in ALL if words[0] == "./ragen" and trained(words) is None]


@pytest.mark.parametrize("has_gpu", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("page", "words"), TRAINED, ids=[f"{page}: {' '.join(words)}" for page, words in TRAINED])
def test_what_is_trained_resolves(page, words, has_gpu, monkeypatch):
    monkeypatch.setattr("ragen.config.model_name.num_gpus", lambda: int(has_gpu))
    if words == ["--help"]:
        return
    options = train.parser().parse_intermixed_args(words)
    resolve(options.overrides, options.config_name, options.config_dir, environ={})


@pytest.mark.parametrize(("page", "words"), OTHERS, ids=[f"{page}: {' '.join(words)}" for page, words in OTHERS])
def test_other_commands_are_understood(page, words, tmp_path, monkeypatch):
    if words[0] == "sweep":
        assert "--dry-run" not in words or sweep(words[1:]) == 0  # tests/experiment looks at the plans themselves
    elif words[0] == "eval":
        monkeypatch.chdir(tmp_path)
        for word in words:
            if "/global_step_" in word:  # a checkpoint that the reader has by then
                (tmp_path / word / "actor").mkdir(parents=True)
                (tmp_path / word / "actor/config.json").touch()
        assert main([*words, "--dry-run"]) == 0
    else:
        verb_module(words[0]).parser().parse_args(words[1:])


def test_commands_were_found_at_all():
    assert {"README.md", "docs/quickstart.md", "docs/coming-from-verl.md"} <= {page for page, _ in TRAINED}
    assert ["runs"] in [words for _, words in OTHERS]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> list[str]:
    """The headings of a page, as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:src/ragen|scripts|tests|benchmarks|examples)/[\w/]+\.(?:py|sh|yaml)\b", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(ragen(?:\.\w+)+)", text):
        resolve_name(name)


def test_the_python_of_the_quickstart_runs(monkeypatch, tmp_path, capsys):
    """As it stands, on a smaller scale."""
    monkeypatch.setattr("ragen.config.model_name.num_gpus", lambda: 0)
    whole = trainer.train

    def small(config):
        config.trainer = replace(config.trainer, total_training_steps=1, default_local_dir=str(tmp_path / "run"))
        for envs, size in ((config.es_manager.train, 4), (config.es_manager.val, 1)):
            envs.env_groups, envs.group_size, envs.env_configs.n_groups = 1, size, [1]
        return whole(config)

    monkeypatch.setattr(trainer, "train", small)
    names = {}
    for block in blocks("docs/quickstart.md", "python"):
        exec(block, names)
    assert names["run"].status == "finished"
    assert len(names["metrics"].series("val-env/SimpleSokoban/success")) == 2
    assert f"finished 1 {RunFolder(tmp_path / 'run')}" in capsys.readouterr().out
