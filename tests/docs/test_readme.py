"""The README: what a newcomer sees first, and its pictures, which the script in the repository makes."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up_runs import make_groups, validation_metrics

from ragen.config.schema import Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = sorted(set(re.findall(r'(?:src|srcset)="([^"]+)"', README)))
SVG = "{http://www.w3.org/2000/svg}"


def test_it_starts_with_the_two_commands():
    first = README.partition("```bash\n")[2].partition("```")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["bash train.sh sokoban", "bash test.sh"]
    assert README.index("bash train.sh") < 60


@pytest.mark.parametrize(
    "words", ["Linux and macOS", "WSL", "MPS", "**When not to use it**", "./ragen play sokoban --agent"]
)
def test_it_says(words):
    assert words in README


def test_panel_and_report_have_a_wide_and_a_narrow_picture():
    names = {Path(path).name for path in PICTURES}
    assert names == {"panel.svg", "panel_narrow.svg", "report.png", "report_narrow.png"}
    assert README.count("<picture>") == README.count("max-width: 700px") == 2


@pytest.mark.parametrize("path", PICTURES)
def test_pictures_are_there_and_small(path):
    assert 5_000 < (ROOT / path).stat().st_size < 1_000_000


@pytest.mark.parametrize("path", [path for path in PICTURES if path.endswith(".svg")])
def test_an_animation_is_one_file_that_moves_and_runs_nothing(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    check_animation(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text


def check_animation(text):
    root = ElementTree.fromstring(text)
    frames = [one for one in root.iter(f"{SVG}g") if "frame" in one.get("class", "")]
    known = {one.get("id") for one in root.iter(f"{SVG}g")}
    assert len(frames) > 5 and "@keyframes" in text
    assert {use.get("href").removeprefix("#") for use in root.iter(f"{SVG}use")} <= known
    drawn = "".join(one.text or "" for one in root.iter(f"{SVG}text"))
    for words in ("turn 1 of", "kept ", "success", "→"):
        assert words in drawn, words
    return drawn


def script():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "scripts/make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("width", [44, 100])
def test_the_script_draws_any_run(folder, width):
    config = Config()
    config.model_path, config.trainer.experiment_name = "pocket", "a <run> & more"
    folder.write_config(config)
    for step in range(5):
        metrics = validation_metrics(0.4, 0.3, 0.5, random=0.2, optimal=1.0) if step % 4 == 0 else {}
        if step:
            metrics |= {"train/CoordSokoban/success": 0.3, "rollout/filter_kept_count": 2, "timing_s/step": 2.0}
            metrics |= {"rollout/filter_reason/kept": 2}
            folder.write_episodes(step, "train", make_groups([(1, True), (2, False)], split="train"))
        folder.append_metrics(step, metrics)
    made = script()
    text = made.animation(list(made.frames(folder, width, 3)), width, "a panel")
    drawn = check_animation(text)
    assert "a <run> & more" in drawn and "solved" in drawn and "out of turns" in drawn
