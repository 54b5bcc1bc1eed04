"""`ragen play`: keys, lines, and what is shown."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

import pytest
from processes import started
from rich.console import Console

from ragen.cli import envs, main
from ragen.env import registry
from ragen.play import frame, person
from ragen.play.game import Move, PlayedLevel, find_game
from ragen.play.keyboard import answers, key_name, keys
from ragen.terminal import in_lines
from ragen.types import EpisodeState, TurnResult

SOURCE = Path(__file__).parents[2] / "src"


def read_keys(text: str) -> list[str]:
    characters = iter(text)
    waiting = list(text)

    def read() -> str:
        if waiting:
            waiting.pop(0)
        return next(characters, "")

    return list(keys(read, lambda: bool(waiting)))


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ("wq", ["w", "q"]),
        ("\x1b[Aw", ["\x1b[A", "w"]),
        ("\x1bOAw", ["\x1b[A", "w"]),
        ("\x1b[1;5Aw", ["\x1b[1;5A", "w"]),  # Ctrl and up
        ("\x1b[3~d", ["\x1b[3~", "d"]),  # Delete
        ("\x1b[15~", ["\x1b[15~"]),  # F5
        ("\x1b", ["\x1b"]),
        ("\x1ba", ["\x1ba"]),  # Alt and a
        ("a\x04b", ["a"]),
    ],
)
def test_one_key_is_one_answer(sent, seen):
    assert read_keys(sent) == seen


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("\x1b", "Esc"),
        ("\n", "Enter"),
        ("\x1b[A", "arrow up"),
        ("\x1b[1;5D", "Ctrl+arrow left"),
        ("\x1b[3~", "Delete"),
        ("\x1b[15~", "F5"),
        ("\x1ba", "Alt+a"),
        ("\x01", "Ctrl+A"),
        ("x", "'x'"),
        ("\x1b[99~", "this key"),
        ("x" * 99, f"'{'x' * 40}…'"),
    ],
)
def test_keys_have_names(key, name):
    assert key_name(key) == name


def test_a_closed_input_has_ended(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with answers(interactive=False) as typed:
        assert list(typed) == []
    assert main(["play", "sokoban"]) == 0


@pytest.mark.parametrize("answer", ["[/x]", "²", "\x1b[3~", "[bold]"])
def test_what_is_no_action_is_said_and_nothing_else(monkeypatch, capsys, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert main(["play", "bandit"]) == 0
    out = capsys.readouterr().out
    assert "is not an action here" in out
    assert answer.startswith("\x1b") or answer in out


@pytest.mark.parametrize(
    ("tag", "moves", "words"),
    [
        ("SokobanV1", 0, ["Turn 1 of 5", "You have 5 actions left.", "at most 5 actions in at most 5 turns"]),
        ("SokobanV1", 2, ["Turn 3 of 5", "You have 3 actions left."]),
        ("SimpleSokoban", 3, ["Turn 2 of 5", "You have 7 actions left."]),
        ("Bandit", 0, ["Turn 1 of 1", "a single action"]),
        ("TwoArmedBandit", 0, ["Turn 1 of 1", "within 400 tokens"]),
    ],
)
def test_the_prompt_is_the_one_of_the_tag_s_own_training(tag, moves, words):
    level = PlayedLevel(find_game(tag), 0, "val")
    for _ in range(moves):
        level.act(next(iter(level.actions.values())))
    shown = frame.prompt_text(level.game, level.episode).plain
    for text in words:
        assert text in shown


@pytest.mark.parametrize(("tag", "total"), [("FrozenLakeV1", 5), ("SokobanV1", 5), ("CoordSokoban", 10), ("Bandit", 1)])
def test_a_person_has_the_actions_of_the_tag_s_agents(tag, total):
    assert find_game(tag).tag.max_actions_per_traj == total


def test_lines_break_between_items():
    assert in_lines(["aa", "bb", "cc"], 7) == "aa · bb\ncc"
    assert in_lines(["a long item"], 4) == "a long item"
    items = [*person.action_keys(PlayedLevel(find_game("sokoban"), 0, "val")), *person.KEYS]
    assert "\n" not in in_lines(items, 80)
    assert all(len(line) <= 50 for line in in_lines(items, 50).splitlines())


@pytest.mark.parametrize(
    ("width", "shown"), [(80, "turns  actions"), (50, "random"), (40, "SokobanDifferentGridVo…  ")]
)
def test_a_narrow_list_of_environments_keeps_its_numbers(width, shown):
    row = {"turns": "5", "actions": "10", "random": "17.5%", "optimal": "100.0%"}
    rows = [{"tag": tag, **row} for tag in ("Bandit", "SokobanDifferentGridVocabulary")]
    lines = [line.plain for line in envs.lines(rows, width)]
    assert any(shown in line for line in lines)
    for line in lines[1:]:
        assert line.endswith("17.5%   100.0%") and len(line) <= width
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("name", "message"),
    [("Sokoban", "did you mean sokoban?"), ("bandits", "has several tags; name one of them: Bandit, BanditTest")],
)
def test_the_nearest_name_to_play(monkeypatch, name, message):
    monkeypatch.setitem(registry.ENVIRONMENTS, "bandits", registry.ENVIRONMENTS["bandit"])
    with pytest.raises(ValueError, match=re.escape(message)):
        find_game(name)


def test_an_arm_that_is_not_the_better_one_is_not_won():
    endings = set()
    for word in PlayedLevel(find_game("bandit"), 0, "val").actions.values():
        level = PlayedLevel(find_game("bandit"), 0, "val")
        level.act(word)
        endings.add(frame.frame(level)[-3].plain)
    assert endings == {"solved after 1 action", "not won after 1 action"}


def play_in_terminal(*typed: str, rows: int, columns: int) -> list[str]:
    """Sokoban level 3 in a terminal of that size: what it showed, frame by frame, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environ |= {"TERM": "xterm", "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-m", "ragen", "play", "sokoban", "--seed", "3"]
    with started(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as game:
        os.close(theirs)
        text = _read_until(ours, "q quit")
        for num_left, key in reversed([*enumerate(reversed(typed))]):
            os.write(ours, key.encode())
            text += _read_until(ours, *(("quit", "back") if num_left else ("\x1b[?1049l",)))
        assert game.wait(60) == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;]*m", "", text.replace("\r", ""))
    return text.replace("\x1b[H", "").replace("\x1b[?25h", "").split("\x1b[2J")


def _read_until(descriptor: int, *ends: str) -> str:
    text = ""
    while not any(end in text for end in ends) and select.select([descriptor], [], [], 60)[0]:
        try:
            text += os.read(descriptor, 65536).decode()
        except OSError:  # the other side is closed
            break
    return text


def test_a_small_terminal_shows_whole_frames_one_in_place_of_the_other():
    keys = ("u", "\x1b[3~", "p", "q", *"aaaaaaaaaa", "q")
    first, *frames = play_in_terminal(*keys, rows=15, columns=50)
    assert first == "\x1b[?1049h"
    for shown in frames:
        rows = shown.partition("\x1b[?1049l")[0].split("\n")
        assert len(rows) <= 15 and max(map(len, rows)) <= 50
    assert "nothing to undo" in frames[1]
    assert "Delete is not an action here" in frames[2]
    assert "page 1 of " in frames[3] and "turn by turn" in frames[3]
    assert "#XP_##" in frames[-1] and "not solved (out of actions) after 10 actions" in frames[-1]


def shown_table(*turns: TurnResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    level = PlayedLevel(find_game("sokoban"), 0, "val")
    level.moves = [Move("Up", turn, EpisodeState(None)) for turn in turns]
    console.print(frame.move_table(level))
    return console.file.getvalue()


def test_a_penalty_has_a_column_of_its_own():
    moved, offended = TurnResult(-0.1, 0.0, (1,), 1, 1, 1), TurnResult(-0.1, -1.0, (1,), 1, 1, 0)
    assert "penalty" not in shown_table(moved, moved)
    assert shown_table(moved, offended).splitlines()[-1].split() == ["total", "-0.2", "-1.0"]


@pytest.mark.parametrize(("reward", "text"), [(-0.1, "-0.1"), (0.17, "+0.17"), (10.9, "+10.9"), (-0.0, "+0.0")])
def test_two_decimals_where_they_say_something(reward, text):
    assert frame.points(reward) == text


def test_a_gamble_has_no_certain_plan():
    for seed in range(8):  # the risky arm is listed first or second
        said = frame.optimum(find_game("bandit"), seed, "val")
        assert "optimal play starts with" in said and "100%" in said
    assert "(1 action, " in frame.optimum(find_game("sokoban"), one_move_level(), "val")


def one_move_level() -> int:
    env = find_game("sokoban").env
    return next(seed for seed in range(500) if len(env.shortest_plan(env.reset(seed, "val"))) == 1)
