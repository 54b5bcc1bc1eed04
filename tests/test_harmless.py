"""Control codes of an environment, a model or a file reach neither the terminal nor a page: they are shown."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ragen.cli import main
from ragen.env import sokoban
from ragen.format import harmless
from ragen.report.pages import escape
from ragen.run.console import PlainConsole, make_console
from ragen.terminal import Screen

HARMFUL = [*map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0))), *"\u061c\u200e\u200f", "\ud800", "\udfff"]
HARMFUL += [*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))]
ATTACK = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\x08\x7f"


def harmful_in(text):
    return sorted(set(text) & set(HARMFUL))


@given(st.text(st.sampled_from([*HARMFUL, *"ab√汉\n\t"])))
def test_every_character_stays_one_and_none_is_harmful(text):
    shown = harmless(text)
    assert len(shown) == len(text) and not harmful_in(shown) and harmless(shown) == shown
    assert [letter for letter in shown if letter in "ab√汉\n\t"] == [letter for letter in text if letter in "ab√汉\n\t"]
    assert not harmful_in(escape(text))
    shown.encode()


def test_codes_are_visible():
    assert harmless("a\x00\x1b\r\x7f\x9b\u202e\ud800\n\tb") == "a␀␛␍␡���\n\tb"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whatever_a_screen_prints(is_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "UNUSED", "1")
    screen = Screen()
    screen.file = io.StringIO()
    table = Table(title=ATTACK)
    table.add_column(ATTACK)
    table.add_row(Text(ATTACK, "bold"))
    for shown in (ATTACK, Text(ATTACK), Panel(Text(ATTACK), title=Text(ATTACK)), table, Text.assemble("x", ATTACK)):
        screen.print(shown)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())  # bold
    assert not harmful_in(printed) and "␛" in printed


def test_the_console_of_a_run(capsys):
    console = make_console(3, ["console"], ATTACK)
    assert isinstance(console, PlainConsole)
    with console:
        console.note(ATTACK)
        console.stopped("rule", ATTACK)
        console.step(1, {f"train/{ATTACK}": 1.0})
    assert not harmful_in(capsys.readouterr().out)


class Attacker(sokoban.Sokoban):
    def render(self, state):
        return f"{super().render(state)}\n{ATTACK}"


@pytest.mark.parametrize("player", [["--agent", "optimal", "--prompt"], []])
def test_an_environment_that_attacks_the_terminal(monkeypatch, capsys, player):
    monkeypatch.setattr(sokoban, "Sokoban", Attacker)
    monkeypatch.setattr("sys.stdin", io.StringIO("Up\n?\np\nq\n"))
    assert main(["play", "sokoban", *player]) == 0
    out, err = capsys.readouterr()
    assert "␛[2J" in out and not harmful_in(out + err)


def test_an_error_message_with_codes(capsys):
    assert main(["report", f"no/{ATTACK.replace('/', '')}"]) == 2
    assert not harmful_in(capsys.readouterr().err)
