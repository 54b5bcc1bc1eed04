"""`ragen play`: keys, lines, and what is shown."""

import io

import pytest
from rich.console import Console

from ragen import play
from ragen.agent.episode import EpisodeState, TurnResult
from ragen.keyboard import answers, keys


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


def test_a_closed_input_has_ended(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with answers(interactive=False) as typed:
        assert list(typed) == []
    assert play.play("sokoban", 0, "val", "human", show_prompt=False) == 0


@pytest.mark.parametrize("answer", ["[/x]", "²", "\x1b[3~", "[bold]"])
def test_what_is_no_action_is_said_and_nothing_else(monkeypatch, capsys, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert play.play("bandit", 0, "val", "human", show_prompt=False) == 0
    out = capsys.readouterr().out
    assert "is no action here" in out
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
    game = play.Game(*play._find(tag))
    episode = EpisodeState(game.env.reset(0, "val"))
    for _ in range(moves):
        episode, _ = game.step(episode, next(iter(game.env.action_names(episode.state).values())), seed=0)
    shown = play._prompt_panel(game, episode).plain
    for text in words:
        assert text in shown


@pytest.mark.parametrize(("tag", "total"), [("FrozenLakeV1", 5), ("SokobanV1", 5), ("CoordSokoban", 10), ("Bandit", 1)])
def test_a_person_has_the_actions_of_the_tag_s_agents(tag, total):
    assert play.Game(*play._find(tag)).tag.max_actions_per_traj == total


def shown_table(*turns: TurnResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    path = [(EpisodeState(None), "", None), *((EpisodeState(None), "Up", turn) for turn in turns)]
    console.print(play._result_table(path))
    return console.file.getvalue()


def test_a_penalty_has_a_column_of_its_own():
    moved, offended = TurnResult(-0.1, 0.0, (1,), 1, 1, 1), TurnResult(-0.1, -1.0, (1,), 1, 1, 0)
    assert "penalty" not in shown_table(moved, moved)
    assert shown_table(moved, offended).splitlines()[-1].split() == ["total", "-0.2", "-1.0"]


@pytest.mark.parametrize(("reward", "text"), [(-0.1, "-0.1"), (0.17, "+0.17"), (10.9, "+10.9"), (-0.0, "+0.0")])
def test_two_decimals_where_they_say_something(reward, text):
    assert play._points(reward) == text


def test_a_gamble_has_no_certain_plan():
    for seed in range(8):  # the risky arm is listed first or second
        said = play._optimum(play.Game(*play._find("bandit")), seed, "val")
        assert "optimal play starts with" in said and "100%" in said
    assert "(1 action, " in play._optimum(play.Game(*play._find("sokoban")), one_move_level(), "val")


def one_move_level() -> int:
    env = play.Game(*play._find("sokoban")).env
    return next(seed for seed in range(500) if len(env.shortest_plan(env.reset(seed, "val"))) == 1)
