"""The page of an evaluation from hand-made rows: well formed, complete, harmless whatever a model is called."""

import re
from xml.etree import ElementTree

from ragen.config.compose import resolve
from ragen.env.baseline_budget import Baselines
from ragen.evaluate.metrics import Outcome, measure
from ragen.evaluate.report import write_report
from ragen.evaluate.run import ModelResult
from ragen.evaluate.setting import Setting

TAG = "SimpleSokoban"
HOSTILE = '<script>alert(1)</script>"\x00'


def row(model, wins, max_turn=5, samples=1):
    """One level for each entry of `wins`; without any, nothing was played."""
    outcomes = tuple(Outcome(seed, won, float(won), 2, 0, 30) for seed, won in enumerate(wins) for _ in range(samples))
    asked = {seed: samples for seed in range(max(1, len(wins)))}
    reached = Baselines(0.2, 0.9, len(asked))
    return ModelResult(model, TAG, max_turn, outcomes, measure(outcomes, asked), asked, {}, reached)


def page_of(tmp_path, rows, turns=(5,)):
    settings = []
    for turn in turns:
        words = [f"es_manager.val.env_configs.tags=[{TAG}]", f"agent_proxy.max_turn={turn}"]
        settings.append(Setting(resolve(words, config_name="eval", environ={}).config, HOSTILE))
    models = list(dict.fromkeys(one.model for one in rows))
    text = write_report(tmp_path / "mine.jsonl", rows, [[] for _ in models for _ in turns], settings).read_text()
    body = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n")).find("body")
    return text, re.sub(r"\s+", " ", " ".join(body.itertext()))


def test_numbers_of_every_model_are_on_the_page_and_in_markdown(tmp_path):
    rows = [row(model, wins, turn, samples=2) for turn in (2, 5) for model, wins in {"a": [1, 0], "b": [1, 1]}.items()]
    text, seen = page_of(tmp_path, rows, (2, 5))
    for part in (
        "Evaluation of a, b",
        "2 turns",
        "random play 20.0 %, optimal play 90.0 %",
        "pass@2",
        "vs a",
        "50.0 % [",
    ):
        assert part in seen, part
    assert text.count("<svg") == 1 and text.count('class="whisker"') == 4
    cells = [
        line.strip("| ").split(" | ") for line in (tmp_path / "mine.md").read_text().splitlines() if line[:1] == "|"
    ]
    assert all(cell in seen for line in cells[2:] for cell in line)


def test_many_models_are_drawn_in_several_charts(tmp_path):
    names = [f"checkpoints/{'x' * 40}/global_step_{number}" for number in range(9)]
    text, seen = page_of(tmp_path, [row(name, [1]) for name in names])
    assert text.count("<svg") == 2
    assert "global_step_8" in seen and "…" in seen, "the ends of long names are shown"


def test_hostile_names_and_rows_without_episodes(tmp_path):
    text, seen = page_of(tmp_path, [row(HOSTILE, []), row("b", [1])])
    assert "<script" not in text and "alert(1)" in seen and "\x00" not in text
    assert "0 levels, 0 episodes" in seen
