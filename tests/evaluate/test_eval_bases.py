"""Models beside what they began from, and journals that are kept."""

import re

import pytest

from ragen.checkpoint.parts import Parts, part_of
from ragen.checkpoint.save import CheckpointStore
from ragen.config.compose import resolve
from ragen.errors import ConfigError
from ragen.evaluate import run as running
from ragen.evaluate.command import parser, read
from ragen.evaluate.models import LocalModel, local_model, with_bases
from ragen.evaluate.report import cells, headings, reference_of
from ragen.evaluate.run import EvaluationPlan, ModelResult, evaluate
from ragen.evaluate.setting import Wanted, settings
from ragen.model.load import find_model, load_model
from ragen.store.run_folder import RunFolder

WORDS = ["agent_proxy.max_turn=2", "es_manager.val.env_groups=3"]


def trained(folder, name, *words):
    """A run of the embedded model that has learned nothing."""
    RunFolder(folder / name).write_config(resolve(["sokoban", *WORDS, *words], environ={}).config)
    checkpoint = folder / name / "global_step_1/actor"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    return local_model(str(checkpoint))


def test_a_checkpoint_stands_after_its_base(tmp_path):
    one, two = (trained(tmp_path, name, "model_path=pocket") for name in ("one", "two"))
    tuned = trained(tmp_path, "tuned", "rl_or_sft=sft", "sft.training.base_model=pocket-blank")
    found = with_bases([one, LocalModel("other", "other"), two, tuned])
    assert [model.label for model in found] == [
        "pocket", "one/global_step_1", "other", "two/global_step_1", "pocket-blank", "tuned/global_step_1",
    ]  # fmt: skip
    assert [model.compared_with for model in found] == [None, "pocket", None, "pocket", None, "pocket-blank"]
    named = with_bases([one, LocalModel("pocket", "pocket")])
    assert [model.name for model in named] == [one.name, "pocket"] and named[0].compared_with == "pocket"


@pytest.mark.parametrize(
    "base", ["models/sft/merged_model", "models/mine", "./mine", "/nowhere/mine", "mine/global_step_3"]
)
def test_a_base_that_is_no_longer_there_is_no_name_on_the_hub(tmp_path, monkeypatch, base):
    (tmp_path / "here").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = "trainer.default_local_dir=runs/one"
    model = trained(tmp_path / "runs", "one", f"model_path={base}", place)
    with pytest.raises(
        ConfigError, match=rf"run {tmp_path}/runs/one began from {re.escape(base)}, which exists neither here"
    ):
        with_bases([model])


@pytest.mark.parametrize("name", ["one", "one-2"])
def test_a_base_is_found_where_its_run_was_started(tmp_path, monkeypatch, name):
    """From anywhere: what stands before `trainer.default_local_dir`. Named so too, it is the same model."""
    for folder in ("models/mine", "here/models"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text("{}")
    model = trained(tmp_path / "runs", name, "model_path=models/mine", "trainer.default_local_dir=runs/one")
    monkeypatch.chdir(tmp_path / "here")
    assert [found.name for found in with_bases([model])] == [str(tmp_path / "models/mine"), model.name]
    monkeypatch.chdir(tmp_path)
    assert [found.name for found in with_bases([model, local_model("models/mine")])] == [model.name, "models/mine"]


def test_a_base_from_the_hub_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = trained(tmp_path / "runs", "one", "model_path=Qwen/Qwen2.5-3B-Instruct")
    assert with_bases([model])[0].name == "Qwen/Qwen2.5-3B-Instruct"


def test_the_run_decides_what_is_played(tmp_path):
    """Not what its base would play alone."""
    model = trained(tmp_path, "one", "model_path=pocket", "es_manager.val.group_size=2", "seed.val=77")
    wanted, words = read(parser().parse_args([model.name, "--with-base", "--max-turns", "2,4"]))
    assert [model.label for model in wanted.models] == ["pocket", "one/global_step_1"]
    for setting, max_turn in zip(settings(wanted, words), (2, 4), strict=True):
        val = setting.config.es_manager.val
        assert (val.env_groups, val.group_size, setting.config.seed.val) == (3, 2, 77)
        assert (setting.max_turn, setting.config.model_path) == (max_turn, model.name)


def test_after_is_compared_with_before():
    def row(model, max_turn, against=""):
        return ModelResult(model, "Sokoban", max_turn, (), None, {}, {}, None, against=against)

    names = [("small", ""), ("small/100", "small"), ("large", ""), ("large/100", "large"), ("other", "")]
    rows = [row(model, turns, against) for model, against in names for turns in (5, 25)]
    found = [reference_of(one, rows) for one in rows]
    assert [one and (one.model, one.max_turn) for one in found] == [
        None, ("small", 5), ("small", 5), ("small", 25), ("small", 5), ("small", 25), ("large", 5), ("large", 25),
        ("small", 5), ("small", 25),
    ]  # fmt: skip


@pytest.fixture
def loads(pocket, monkeypatch):
    """The labels of the models that were loaded."""
    found, load = [], running.local_player
    monkeypatch.setattr("ragen.model.load.load_model", lambda source, device=None, merge=True: pocket)
    monkeypatch.setattr(running, "local_player", lambda model, note: found.append(model.label) or load(model, note))
    return found


@pytest.mark.slow
def test_what_was_played_is_kept_for_a_later_call(tmp_path, loads):
    RunFolder(tmp_path / "run").write_config(resolve(["sokoban", "model_path=pocket", *WORDS], environ={}).config)
    CheckpointStore(tmp_path / "run", contents=["model"]).save(
        1, Parts(part_of(load_model(find_model("pocket"), "cpu")))
    )
    pair = with_bases([local_model(str(tmp_path / "run"))])
    more = [*pair, LocalModel("pocket-blank", "blank")]

    def play(models, folder, **options):
        wanted = Wanted(models)
        words = [f"output.dir={tmp_path / folder}", "output.append_timestamp=False"]
        return evaluate(EvaluationPlan(wanted, settings(wanted, words), **options), lambda text: None)

    whole = play(more, "whole")
    assert loads == ["pocket", "run/global_step_1", "blank"] and not list((tmp_path / "whole").glob(".journal-*"))
    loads.clear()
    first = play(pair, "parts", keep_journal=True)
    again = play(pair, "parts", keep_journal=True)
    assert loads == ["pocket", "run/global_step_1"]
    assert first.path == again.path and first.rows == again.rows
    later = play(more, "parts", keep_journal=True)
    assert loads[2:] == ["blank"] and later.path.name == "val_rollouts_2.jsonl"
    taken = play(more, "parts", keep_journal=True, replaces=True)
    assert taken.path == first.path and taken.path.read_bytes() == whole.path.read_bytes()
    assert "| blank |" in taken.path.with_suffix(".md").read_text() and len(loads) == 3
    play(more, "parts", keep_journal=True, replaces=True, page=False)
    assert first.path.exists() and not first.report.exists() and not first.path.with_suffix(".md").exists()
    assert later.path.read_bytes() == whole.path.read_bytes()
    assert [cells(row, later.rows) for row in later.rows] == [cells(row, whole.rows) for row in whole.rows]
    difference = headings(whole.rows).index("difference")
    assert cells(whole.rows[1], whole.rows)[difference].endswith("vs pocket")
    loads.clear()
    play(pair, "parts", fresh=True)
    assert loads == ["pocket", "run/global_step_1"]
