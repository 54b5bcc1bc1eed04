"""A drawn observation in colours, for a terminal.

    coloured("##\\nP_", {"#": "wall", "P": "player", "_": "empty"})     # rich Text, every symbol in its style
    board_rows(text, symbols)                                          # the lines that are the board

Which characters are symbols, and what they stand for, is `Environment.symbols()`.
"""

from collections.abc import Mapping

from rich.text import Text

# The meaning of a symbol -> its style.
SYMBOL_STYLES = {
    "wall": "bright_black",
    "empty": "bright_black",
    "target": "bold yellow",
    "goal": "bold yellow",
    "box": "bold red",
    "hole": "bold red",
    "box on target": "bold green",
    "player on goal": "bold green",
    "player": "bold cyan",
    "player on target": "bold cyan",
    "player in hole": "bold red reverse",
}


def coloured(observation: str, symbols: Mapping[str, str]) -> Text:
    """The whole observation; lines that consist of symbols are coloured."""
    text, position = Text(observation), 0
    for line in observation.split("\n"):
        if is_drawn(line, symbols):
            for index, cell in enumerate(line, start=position):
                if cell in symbols:
                    text.stylize(SYMBOL_STYLES.get(symbols[cell], ""), index, index + 1)
        position += len(line) + 1
    return text


def board_rows(observation: str, symbols: Mapping[str, str]) -> list[str]:
    """The lines that are drawn; all lines of an observation that is not a drawing."""
    lines = observation.split("\n")
    drawn = [line for line in lines if is_drawn(line, symbols)]
    return drawn if len(drawn) > 1 else lines


def is_drawn(line: str, symbols: Mapping[str, str]) -> bool:
    cells = "".join(line.split())
    return bool(cells) and all(cell in symbols for cell in cells)
