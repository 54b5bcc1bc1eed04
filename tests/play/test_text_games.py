"""Games whose actions are free text are played by typing it; where the best play is unknown, nothing claims to know."""

import io
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from processes import started
from secret_word import HiddenDoor, SecretWord

from ragen.cli import main
from ragen.env.baseline_budget import baselines_within_budget
from ragen.env.solve import Budget, baselines

HERE = Path(__file__).parent
GAME, DOOR = "secret_word:SecretWord", "secret_word:HiddenDoor"
BUDGET = Budget(turns=5, actions_per_turn=1, actions=5)


@pytest.fixture
def type_in(monkeypatch, capsys):
    def play(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["play", *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return play


def test_a_pipe_sends_texts(type_in):
    status, out, err = type_in(["pear", "apple pie"], GAME, "--seed", "1")
    assert status == 0 and "one answer per line" in err and ":q" in err
    assert "You said 'pear'." in out and "solved after 2 actions" in out
    assert "optimal play: unknown (any text is an action)" in out


def test_a_text_that_is_also_the_letter_of_a_command(type_in):
    _, out, _ = type_in(["plum", ":u", ":h", "n"], GAME, "--seed", "0")
    assert "hint: the best play is unknown" in out and "solved after 1 action" in out, "n is the word here"
    _, out, _ = type_in(["plum", ":n", "apple pie"], GAME, "--seed", "0")
    assert "level 1 of val" in out and "solved" in out


def test_a_terminal_takes_lines():
    """Typed in a terminal, the text is read up to Enter."""
    command = [sys.executable, "-m", "ragen", "play", GAME, "--seed", "1"]
    path = os.pathsep.join(map(str, (HERE, HERE.parents[1] / "src")))
    terminal, typed = pty.openpty()
    environment = os.environ | {"PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80"}
    with started(command, stdin=typed, stdout=typed, stderr=typed, env=environment) as process:
        os.close(typed)
        os.write(terminal, b"apple pie\n:q\n")
        said = b""
        with suppress(OSError):  # the other side has closed
            while part := os.read(terminal, 4096):
                said += part
        assert process.wait(60) == 0
    os.close(terminal)
    assert b"solved" in said and b"type a text and press Enter" in said


@pytest.mark.parametrize(("agent", "why"), [("random", "any text is an action"), ("optimal", "any text is an action")])
def test_no_solver_plays_texts(type_in, agent, why):
    status, _, err = type_in([], GAME, "--agent", agent)
    assert status == 2 and why in err


def test_an_unknown_optimum_is_not_zero():
    for function in (baselines, baselines_within_budget):
        found = function(SecretWord(), range(4), "val", BUDGET)
        assert isinstance(found.random, str) and isinstance(found.optimal, str) and "any text" in found.random


def test_a_game_with_hidden_information_has_no_clairvoyant_optimum(type_in):
    for function in (baselines, baselines_within_budget):
        found = function(HiddenDoor(), range(4), "val", BUDGET)
        assert found.random == pytest.approx(1 - 0.5**5) and "hidden" in found.optimal
    status, _, err = type_in([], DOOR, "--agent", "optimal")
    assert status == 2 and "unknown" in err and "hidden" in err
    _, out, _ = type_in(["h", "left", "right"], DOOR, "--seed", "0")
    assert "hint: the best play is unknown" in out and "optimal play: unknown" in out


def test_a_game_may_say_that_it_hides_something():
    class Cards(HiddenDoor):
        HIDDEN_INFORMATION = True

    assert "hides part of its state" in baselines(Cards(), range(1), "val", BUDGET).optimal
