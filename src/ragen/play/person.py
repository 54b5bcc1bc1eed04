"""`ragen play ENV`: a person plays, with keys in a terminal or with one answer per line from a pipe.

    printf 'Up\\nLeft\\n' | ragen play sokoban

Where any text is an action, the answer is a line of text, in a terminal too, and commands have a colon (`:q`).
"""

import contextlib
import sys
from collections.abc import Iterator

from ragen.play.frame import frame, prompt_text
from ragen.play.game import Game, PlayedLevel
from ragen.play.keyboard import answers, key_name
from ragen.terminal import Screen, in_lines

ARROWS = {"\x1b[A": "Up", "\x1b[B": "Down", "\x1b[D": "Left", "\x1b[C": "Right"}
LETTERS = {"w": "Up", "s": "Down", "a": "Left", "d": "Right"}
KEYS = ("u undo", "h hint", "p prompt", "r restart", "n next", "q quit")
KEYS_AT_THE_END = ("n next level", "r again", "u undo", "q quit")
COMMANDS = "uhprnq"
TEXT_KEYS = ("type a text and press Enter", *(f":{key}" for key in KEYS))
TEXT_KEYS_AT_THE_END = tuple(f":{key}" for key in KEYS_AT_THE_END)
ONE_TEXT_PER_LINE = "any text is an action: one answer per line, or one of :u :h :p :r :n :q"
ONE_ANSWER_PER_LINE = "no terminal to read keys from: one answer per line, an action or one of u h p r n q"


def play(game: Game, seed: int, split: str, show_prompt: bool) -> int:
    """Play levels until the player stops. Returns the exit status."""
    screen = Screen()
    has_terminal = sys.stdin is not None and sys.stdin.isatty() and screen.is_terminal
    takes_text = not PlayedLevel(game, seed, split).actions
    interactive = has_terminal and not takes_text
    if not has_terminal and sys.stdin is not None:
        print(ONE_TEXT_PER_LINE if takes_text else ONE_ANSWER_PER_LINE, file=sys.stderr)
    with answers(interactive) as typed, screen.taken_over() if interactive else contextlib.nullcontext():
        player = Player(screen, typed, interactive, stays=has_terminal)
        while player.plays(PlayedLevel(game, seed, split), show_prompt):
            seed += 1
    return 0


class Player:
    """A person at the keyboard, or the lines of a pipe; `stays` if there may be another level after this one."""

    def __init__(self, screen: Screen, typed: Iterator[str], interactive: bool, stays: bool):
        self.screen, self.typed, self.interactive, self.stays = screen, typed, interactive, stays

    def plays(self, level: PlayedLevel, show_prompt: bool) -> bool:
        """Play one level. Returns whether the player wants the next one."""
        if show_prompt:
            self.show_prompt(level)
        message = ""
        while True:
            self.show(level, message)
            if level.episode.finished and not self.stays:
                return False
            answer = next(self.typed, None)
            if answer is None and not self.interactive:
                self.screen.print("end of input: the game stops here", style="yellow")
            command = "q" if answer is None else _command(level, answer)
            if command in ("q", "n"):
                return command == "n"
            message = self.respond(level, command, answer or "")

    def respond(self, level: PlayedLevel, command: str, answer: str) -> str:
        """Do what a key or a line asks for. Returns a message for the player."""
        if command == "r":
            level.moves.clear()
        elif command == "u":
            if not level.moves:
                return "nothing to undo"
            level.moves.pop()
        elif command == "p":
            self.show_prompt(level)
        elif level.episode.finished:
            return ""
        elif command == "h":
            return _hint(level)
        elif (word := _word_of(level, answer)) is not None:
            level.act(word)
        else:
            names = ", ".join(level.actions.values())
            return f"{key_name(answer)} is not an action here" + (f": {names}" if names else "")
        return ""

    def show(self, level: PlayedLevel, message: str) -> None:
        """Draw the level; in a small terminal compactly, so that the board stays in view."""
        finished = level.episode.finished
        items = KEYS_AT_THE_END if finished else (*action_keys(level), *KEYS)
        if not level.actions:
            items = TEXT_KEYS_AT_THE_END if finished else TEXT_KEYS
        footer = in_lines(items, self.screen.width) if self.stays or not finished else ""
        shown = frame(level, message)
        if self.interactive and not self.screen.fits(shown, footer):
            shown = frame(level, message, compact_width=self.screen.width)
        self.screen.show(shown, footer)

    def show_prompt(self, level: PlayedLevel) -> None:
        text = prompt_text(level.game, level.episode, self.screen.width)
        if self.interactive:
            self.screen.page(text, self.typed)
        else:
            self.screen.print(text, soft_wrap=True)


def _command(level: PlayedLevel, answer: str) -> str:
    """The command that an answer is, or empty: one letter, with a colon where any text is an action."""
    commands = {letter if level.actions else f":{letter}": letter for letter in COMMANDS}
    return commands.get(answer, "")


def _word_of(level: PlayedLevel, answer: str) -> str | None:
    """The action that a key or a typed line means."""
    names = list(level.actions.values())
    if not names:
        return answer if level.game.env.parse_action(level.episode.state, answer) is not None else None
    word = ARROWS.get(answer) or LETTERS.get(answer.lower()) or answer
    if word in names or level.game.env.parse_action(level.episode.state, word) is not None:
        return word
    return names[int(answer) - 1] if answer.isdecimal() and 1 <= int(answer) <= len(names) else None


def action_keys(level: PlayedLevel) -> list[str]:
    names = level.actions.values()
    if set(names) <= set(LETTERS.values()):
        return ["arrows or wasd"]
    return [f"{index} {name}" for index, name in enumerate(names, start=1)]


def _hint(level: PlayedLevel) -> str:
    if level.game.unknown_optimum:
        return f"hint: the best play is unknown ({level.game.unknown_optimum})"
    if level.game.optimal_success(level.episode) == 0:
        return "hint: this level can no longer be won; u takes a move back"
    return f"hint: {level.game.best_actions(level.episode)[0]}"
