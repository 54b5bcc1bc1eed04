"""Boards of cells as text, shared by the grid games.

    >>> cell_names(1, 2)
    ('(0, 0)', '(0, 1)')
    >>> draw_cell("#", "spaced")
    ' # \\t'

An observation is the grid, lists of coordinates, or both (`observation_format`). Cells are numbered row by row:
cell = row * num_cols + col, and a set of cells is an integer with those bits set.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

OBSERVATION_FORMATS = ("grid", "coord", "grid_coord")
CELL_FORMATS = {"plain": "{}", "spaced": " {} \t"}
RENDER_MODES = ("text",)

COORDINATES_HINT = (
    "Positions are written (row, col) and count from zero: (0, 0) is the top left cell, rows grow downwards, "
    "columns grow to the right."
)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise on a setting that is not one of its choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_text_settings(render_mode: str, observation_format: str, cell_format: str) -> None:
    """Raise on text settings that no grid game has."""
    check_choice("render_mode", render_mode, RENDER_MODES)
    check_choice("observation_format", observation_format, OBSERVATION_FORMATS)
    check_choice("cell_format", cell_format, CELL_FORMATS)


@lru_cache(maxsize=256)
def cell_names(num_rows: int, num_cols: int) -> tuple[str, ...]:
    """The text for each cell's position, in cell order."""
    return tuple(f"({row}, {col})" for row in range(num_rows) for col in range(num_cols))


def draw_cell(symbol: str, cell_format: str) -> str:
    """One cell of the drawn grid."""
    return CELL_FORMATS[cell_format].format(symbol)


def size_line(num_rows: int, num_cols: int) -> str:
    """The first line of a coordinate list."""
    return f"Board size: {num_rows} rows x {num_cols} cols, positions are (row, col), zero-indexed"


def list_cells(cells: int, names: tuple[str, ...]) -> str:
    """The positions in a set of cells, comma separated.

    >>> list_cells(0b101, cell_names(1, 3))
    '(0, 0), (0, 2)'
    """
    positions = []
    while cells:
        lowest = cells & -cells
        positions.append(names[lowest.bit_length() - 1])
        cells ^= lowest
    return ", ".join(positions)


def observation(shown: str, state: Any, draw: Callable[[Any], str], list_positions: Callable[[Any], str]) -> str:
    """The grid, the coordinates, or both under headings."""
    if shown == "grid":
        return draw(state)
    if shown == "coord":
        return list_positions(state)
    return f"Coordinates:\n{list_positions(state)}\nGrid Map:\n{draw(state)}"


def legend_text(symbols: dict[str, str], observation_format: str) -> str:
    """Explain what an observation of this format shows, and nothing that it does not show."""
    explained = "Symbols on the grid: " + ", ".join(f"{symbol} is {word}" for symbol, word in symbols.items()) + "."
    texts = {"grid": explained, "coord": COORDINATES_HINT}
    return "\n".join(text for part, text in texts.items() if part in observation_format)


def grid_rows(text: str) -> list[list[str]]:
    """The symbols of a drawn grid, row by row, for any cell format.

    >>> grid_rows("#_\\nP#") == grid_rows(" # \\t _ \\t\\n P \\t # \\t")
    True
    """
    rows = [list("".join(line.split())) for line in text.splitlines() if line.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        raise ValueError(f"a grid needs rows of equal length, got {[len(row) for row in rows]}")
    return rows
