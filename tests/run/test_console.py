"""The plain lines to the letter, and the panel at two widths."""

import io
import math
import time

import numpy as np
import pytest
from made_up_runs import make_episode, make_turn, validation_metrics
from rich.cells import cell_len
from rich.console import Console

from ragen.format import compact, duration, percent, short, sparkline
from ragen.run.console import LiveConsole, PlainConsole, make_console
from ragen.run.step_line import short_step_line, step_line
from ragen.store.episodes import episode_record

SUMMARY = validation_metrics(0.451, 0.408, 0.494, random=0.195, optimal=1.0, greedy_success=0.52)
METRICS = {
    "train/CoordSokoban/success": 0.414,
    "train/reward": 3.21234,
    "actor/entropy": 0.41239,
    "rollout/filter_kept_count": 6,
    "rollout/filter_kept_ratio": 0.75,
    "rollout/in_group_reward_std": 2.1,
    "rollout/filter_reason/kept": 6,
    "rollout/filter_reason/outside_top_p_mass": 0,
    "rollout/filter_reason/zero_score": 2,
    "perf/tokens_per_s": 12345.6,
}


def terminal(width, **options):
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=True, highlight=False, **options)


def run_through(console):
    with console:
        with console.phase("validation", total=512):
            console.advance(512)
        console.validation(0, SUMMARY)
        console.step(0, SUMMARY)
        for step in range(1, 4):
            with console.phase("rollout", total=128):
                console.advance(64)
                console.advance(64)
            with console.phase("update"):
                pass
            console.step(step, METRICS | {"actor/grad_norm": math.nan})
        console.note("[not markup] a note")
        console.close(["report: runs/x/report.html"])


# --- plain --------------------------------------------------------------------------------------------------------


def test_plain_output_to_the_letter(capsys):
    run_through(PlainConsole("runs/x"))
    out, err = capsys.readouterr()
    training = (
        "train/CoordSokoban/success:0.414 - train/reward:3.212 - actor/entropy:0.4124 - actor/grad_norm:nan - "
        "rollout/filter_kept_ratio:0.75"
    )
    assert out.splitlines() == [
        "run folder: runs/x",
        "step:0 - val-env/CoordSokoban/success:0.451",
        *(f"step:{step} - {training}" for step in (1, 2, 3)),
        "[not markup] a note",
        "report: runs/x/report.html",
    ]
    assert err == ""


def test_a_piped_line_has_200_characters_and_the_metrics_of_many_environments():
    metrics = {f"val-env/Environment{index}/success": index / 7 for index in range(9)} | METRICS
    line = short_step_line(12345, metrics)
    assert len(line) <= 200 and line.startswith("step:12345 - val-env/Environment0/success:0 - ")
    long = short_step_line(3, {f"val-env/{'x' * 300}/success": 0.5, "train/reward": 1.0})
    assert long == "step:3 - train/reward:1", "what does not fit is left to the file"
    assert short_step_line(3, {"other/metric": 2.0}) == "step:3 - other/metric:2", "nothing that people follow"


def test_a_long_phase_says_how_far_it_is_on_stderr(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = PlainConsole("runs/x")
    with console.phase("validation", total=512):
        for seconds in (15, 10, 10, 10, 60):
            now[0] += seconds
            console.advance(100)
        console.advance(12)
    with console.phase("update"):
        now[0] += 60
        console.advance(1)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "validation: 200 of 512, 0:25",
        "validation: 400 of 512, 0:45",
        "validation: 500 of 512, 1:45",
    ]


def test_all_metrics_in_plain_output_when_asked(capsys):
    run_through(make_console(3, [], "runs/x", all_metrics=True))
    out, err = capsys.readouterr()
    validation = (
        "step:0 - val-env/CoordSokoban/success:0.451 - val-env/CoordSokoban/success_low:0.408 - "
        "val-env/CoordSokoban/success_high:0.494 - val-env/CoordSokoban/random:0.195 - "
        "val-env/CoordSokoban/optimal:1 - val-env/CoordSokoban/greedy_success:0.52"
    )
    training = (
        "train/CoordSokoban/success:0.414 - train/reward:3.212 - actor/entropy:0.4124 - "
        "rollout/filter_kept_count:6 - rollout/filter_kept_ratio:0.75 - rollout/in_group_reward_std:2.1 - "
        "rollout/filter_reason/kept:6 - rollout/filter_reason/outside_top_p_mass:0 - "
        "rollout/filter_reason/zero_score:2 - perf/tokens_per_s:12346 - actor/grad_norm:nan"
    )
    assert out.splitlines() == [
        "run folder: runs/x",
        validation,
        *(f"step:{step} - {training}" for step in (1, 2, 3)),
        "[not markup] a note",
        "report: runs/x/report.html",
    ]
    assert err == ""


def test_last_line_names_the_folder_also_after_an_error(capsys):
    console = PlainConsole("runs/x")
    with pytest.raises(RuntimeError), console:
        raise RuntimeError
    assert capsys.readouterr().out.splitlines()[-1] == "run folder: runs/x"


def test_errors_go_to_stderr(capsys):
    PlainConsole("x").error("went wrong")
    LiveConsole(1, "x", "", 0, terminal(80)).error("that too")
    assert capsys.readouterr() == ("", "went wrong\nthat too\n")


def test_step_line_holds_numbers_only():
    metrics = {
        "step": 9,
        "text": "hello",
        "none": None,
        "list": [1],
        "flag": True,
        "i": np.int64(3),
        "f": np.float32(0.5),
    }
    assert step_line(4, metrics) == "step:4 - flag:1 - i:3 - f:0.5"
    assert step_line(4, {}) == "step:4"


@pytest.mark.parametrize(
    ("loggers", "screen", "kind"),
    [
        (["console"], terminal(80), LiveConsole),
        (["console", "wandb"], terminal(80), LiveConsole),
        (["wandb"], terminal(80), PlainConsole),
        ([], Console(file=io.StringIO()), PlainConsole),
        (["console"], Console(file=io.StringIO()), PlainConsole),
        (["console"], terminal(80, _environ={"TERM": "dumb"}), PlainConsole),
    ],
)
def test_which_console(loggers, screen, kind):
    assert type(make_console(10, loggers, "runs/x", screen=screen)) is kind


# --- live ---------------------------------------------------------------------------------------------------------


def drawn(console, width):
    screen = Console(file=io.StringIO(), width=width, record=True)
    screen.print(console.render())
    return screen.export_text().splitlines()


@pytest.mark.parametrize("width", [30, 50, 80, 120])
@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}])
def test_live_runs_through(width, environ):
    screen = terminal(width, _environ=environ)
    run_through(make_console(3, ["console"], "runs/x", title="sokoban · pocket", screen=screen))
    text = screen.file.getvalue()
    assert text.splitlines()[0] == "run folder: runs/x"
    assert text.splitlines()[-1].endswith("report: runs/x/report.html")
    assert "[not markup] a note" in text
    if environ:
        assert "\x1b[3" not in text.replace("\x1b[3m", ""), "no colours"


@pytest.mark.parametrize("width", [40, 50, 120])
def test_panel_shows_everything(width):
    now = [1000.0]
    console = LiveConsole(120, "runs/x", "sokoban", 0, terminal(width), clock=lambda: now[0])
    console.validation(0, validation_metrics(0.33, 0.29, 0.37, random=0.195, optimal=1.0))
    console.step(0, {})
    now[0] += 60.0
    console.validation(30, SUMMARY)
    console.step(30, METRICS)
    with console.phase("rollout", total=128):
        console.advance(96)
        lines = drawn(console, width)
    text = "\n".join(lines)
    for part in (
        "step 30/120", "3:00 left", "rollout", "96/128", "41.4 % train", "45.1 % [40.8, 49.4]", "19.5 %", "100.0 %",
        "3.212", "2.1", "0.4124", "kept 6 of 8 groups; 2", "12.3k",
    ):  # fmt: skip
        assert part in text, part
    assert ("step 30 " in text and "random 19.5 %" in text) == (width > 40), "narrow: the short forms"
    assert "…" not in text
    assert "kept 6 of 8 groups; 2 dropped: all their episodes had the same reward" in read_across(lines)
    gauge = next(line for line in lines if "●" in line)
    marks = [gauge.index(symbol) for symbol in "r○●o"]
    assert marks == sorted(marks), "random, start, now, optimal"
    widths = {cell_len(line) for line in lines if line}
    assert widths == {width}


def read_across(lines):
    """The words of a panel, whatever line they are in."""
    return " ".join(" ".join(line.strip("│ ") for line in lines).split())


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_panel_keeps_its_height(width):
    console = LiveConsole(120, "runs/x", "a title that is longer than the panel is wide", 0, terminal(width))
    heights = []
    console.validation(30, SUMMARY)
    many = {"rollout/filter_reason/zero_score": 2, "rollout/filter_reason/outside_top_p_mass": 9}
    for metrics in (METRICS, METRICS | {"rollout/filter_reason/zero_score": 0}, METRICS | many):
        console.step(30, metrics)
        heights.append(len(drawn(console, width)))
    assert len(set(heights)) == 1


def test_an_empty_filter_stands_out():
    console = LiveConsole(10, "x", "", 0, terminal(80))
    empty = {
        "rollout/filter_kept_count": 0.0,
        "rollout/filter_kept_ratio": 0.0,
        "rollout/filter_reason/zero_score": 8.0,
    }
    console.step(1, empty | {"rollout/consecutive_empty_after_filter_steps": 1})
    assert "kept none of 8 groups; 8 dropped: all their episodes had the same reward" in read_across(drawn(console, 80))
    console.step(3, {"rollout/consecutive_empty_after_filter_steps": 3, "rollout/filter_reason/too_little_mass": 9})
    words = (
        "kept none of 17 groups, for 3 steps; 9 dropped: all scores of the step are near 0; 8: all their episodes had"
    )
    assert words in read_across(drawn(console, 80))


# --- the agent playing --------------------------------------------------------------------------------------------


SYMBOLS = {"#": "wall", "P": "player", "X": "box", "O": "target", "_": "empty"}


def played(console, width, seconds=0.0, **changes):
    """The panel, some seconds after an episode was shown. Its two turns have a thought and an answer."""
    record = episode_record(make_episode(123, won=True), step=12) | {"final_text": "####\n#_P#\n##X#\n####"}
    start = console._clock()
    console._clock = lambda: start
    console.episode(record | changes, SYMBOLS)
    console._clock = lambda: start + seconds
    return drawn(console, width)


@pytest.mark.parametrize("width", [44, 60, 80, 100, 160, 240])
def test_the_panel_shows_the_latest_episode_turn_by_turn(width):
    console = LiveConsole(120, "runs/x", "sokoban", 0, terminal(width))
    console.validation(0, SUMMARY)
    console.step(12, METRICS)
    first, second, end = ("\n".join(played(console, width, seconds)) for seconds in (0.0, 1.6, 3.1))
    for row in ("####", "#PX#", "##O#"):
        assert row in first
    assert "turn 1 of 2" in first and "→ Up" in first and "turn 2 of 2" in second
    assert "solved" in end and "reward +9.70" in end and "##X#" in end
    assert "turn 1 of 2" in "\n".join(played(console, width, 4 * 1.5 + 0.1)), "and again"
    for text in (first, second, end):
        assert "kept 6 of 8 groups" in text and "45.1 %" in text
        assert {cell_len(line) for line in text.splitlines()} == {width}
        assert len(text.splitlines()) == len(first.splitlines())


def test_the_episode_is_beside_the_numbers_where_there_is_room():
    heights = {}
    for width in (80, 120):
        console = LiveConsole(120, "runs/x", "sokoban", 0, terminal(width))
        console.step(12, METRICS)
        heights[width] = len(played(console, width))
    assert heights[120] < heights[80]


def test_a_low_terminal_shows_the_numbers_first():
    screen = Console(file=io.StringIO(), width=80, height=12, force_terminal=True)
    console = LiveConsole(120, "runs/x", "sokoban", 0, screen)
    console.validation(0, SUMMARY)
    console.step(12, METRICS)
    text = "\n".join(played(console, 80))
    assert "turn 1 of 2" not in text and "45.1 %" in text


def test_a_text_that_is_no_board_and_a_long_reply_stay_in_their_place():
    console = LiveConsole(120, "runs/x", "", 0, terminal(60))
    console.step(12, METRICS)
    turn = episode_record(make_episode(1, won=False), step=12)["turns"][0]
    turn |= {"state_text": "You are in a maze. " * 40, "reply_text": f"<think>{'hm ' * 400}</think><answer>Up</answer>"}
    lines = played(console, 60, turns=[turn])
    assert len(lines) <= 40 and {cell_len(line) for line in lines} == {60}
    assert "You are in a maze." in "\n".join(lines) and "→ Up" in "\n".join(lines)


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x9b31m", "\u202e", "\r", "\x07", "[red]", "\x1b]0;x\x07"])
def test_text_of_environment_and_model_cannot_command_the_terminal(hostile):
    screen = terminal(80, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    console = LiveConsole(120, "runs/x", "", 0, screen)
    console.step(12, METRICS)
    turn = episode_record(make_episode(1, won=False), step=12)["turns"][0]
    turn |= {"state_text": f"#PX#{hostile}\n####", "reply_text": f"<answer>{hostile}Up</answer>"}
    changes = {"turns": [turn], "tag": f"Game{hostile}", "final_text": hostile, "ended_by": hostile}
    for seconds in (0.0, 1.6):
        text = "\n".join(played(console, 80, seconds, **changes))
        if hostile == "[red]":
            assert "[red]" in text, "no markup"
        else:
            assert not set(hostile) & set(text) - set("[]2J31m0;x")
            assert all(letter.isprintable() for line in text.splitlines() for letter in line)


def test_the_last_frame_shows_how_the_episode_ended():
    console = LiveConsole(120, "runs/x", "", 0, terminal(80))
    with console:
        console.step(12, METRICS)
        assert "turn 1 of 2" in "\n".join(played(console, 80))
    assert "solved" in "\n".join(drawn(console, 80))


def test_an_invalid_reply_says_so():
    console = LiveConsole(120, "runs/x", "", 0, terminal(80))
    console.step(12, METRICS)
    turn = episode_record(make_episode(1, False, make_turn("I do not know", valid=0)), step=12)["turns"][0]
    text = "\n".join(played(console, 80, turns=[turn]))
    assert "I do not know" in text and "no valid action" in text


def test_plain_output_shows_no_episode(capsys):
    PlainConsole("x").episode(episode_record(make_episode(1, won=False), step=12), SYMBOLS)
    assert capsys.readouterr() == ("", "")


def test_an_early_stop_is_one_line_in_both(capsys):
    PlainConsole("x").stopped("low_validation_success", "below 1 %\nin 5 validations")
    line = "stopped early by the rule low_validation_success: below 1 % in 5 validations"
    assert capsys.readouterr() == (f"{line}\n", "")
    screen = terminal(50, _environ={"NO_COLOR": "1"})
    console = LiveConsole(10, "x", "", 0, screen)
    console.step(4, {})
    console.stopped("some_rule", "")
    assert "stopped early by the rule some_rule\x1b" in screen.file.getvalue()
    text = "\n".join(drawn(console, 50))
    assert "step 4/10" in text and "stopped early" in text and " left" not in text


def test_panel_before_anything_is_known():
    console = LiveConsole(10, "x", "", 0, terminal(50))
    text = "\n".join(drawn(console, 50))
    assert "step 0/10" in text
    assert "no training step yet" in text


def test_panel_survives_odd_values():
    console = LiveConsole(0, "x", "", 0, terminal(50))
    console.validation(0, validation_metrics(math.nan, 0.1, math.nan, random=math.nan))
    console.validation(0, {f"val-env/T{n}/success": 0.5 for n in range(9)})
    console.step(0, {"train/T/success": math.nan, "rollout/filter_kept_count": 0, "rollout/filter_kept_ratio": 0.0})
    console.step(1, {"perf/tokens_per_s": math.inf, "train/reward": math.nan})
    text = "\n".join(drawn(console, 50))
    assert "kept no group" in text
    assert "more environments" in text


def test_what_is_told_of_an_earlier_step_leaves_the_bar_where_it_is():
    console = LiveConsole(3, "x", "", 0, terminal(80))
    for step in (1, 2, 3, 2):
        console.step(step, {})
    text = "\n".join(drawn(console, 80))
    assert "step 3/3" in text and "done" in text


def test_time_left_counts_from_where_the_run_was_resumed():
    now = [0.0]
    console = LiveConsole(100, "x", "", 50, terminal(80), clock=lambda: now[0])
    assert console.seconds_left() is None
    now[0] = 20.0
    console.step(60, {})
    assert console.seconds_left() == pytest.approx(80.0)
    now[0] = 25.0
    assert console.seconds_left() == pytest.approx(75.0)


# --- numbers ------------------------------------------------------------------------------------------------------


def test_numbers():
    assert [short(value) for value in (0.12344, 0.1, 12.346, 1234.5678, 1e-6, 0.0, 3, True, math.nan, -math.inf)] == [
        "0.1234", "0.1", "12.35", "1235", "1e-06", "0", "3", "1", "nan", "-inf",
    ]  # fmt: skip
    assert [compact(value) for value in (12.0, 9999, 12345, 1.5e6)] == ["12", "9999", "12.3k", "1.5M"]
    assert [duration(value) for value in (0, 42.4, 187, 7500, 273600)] == ["0:00", "0:42", "3:07", "2:05:00", "3 d 4 h"]
    assert [percent(value) for value in (None, 0.4567)] == ["–", "45.7 %"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0]) == "▁"
    assert sparkline([0.0, 0.5], low=0.0, high=1.0) == "▁▅"
