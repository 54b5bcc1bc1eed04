"""FrozenLake: walk over the ice to the goal without falling into a hole. The ice may be slippery.

    env = FrozenLake(FrozenLake.Config(size=4, success_rate=0.8))
    state = env.reset(seed=123, split="val")
    env.step(state, action=3, noise=0.9)      # means right; this noise slips to one side
    env.parse_grid("P_\nOG")                  # a custom lake

Moves and chances match Gymnasium's FrozenLake-v1 (`tests/env/test_frozen_lake.py` compares them); the maps are ours,
with a random start and goal. Small lakes repeat: `solve.overlap` measures how much two splits share.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, NamedTuple

from ragen.env.base import Action, Environment, Tag, Transition, match_action, split_index
from ragen.env.grid import (
    cell_names,
    check_text_settings,
    draw_cell,
    grid_rows,
    legend_text,
    list_cells,
    observation,
    size_line,
)
from ragen.prng import bits

SYMBOLS = "P_OGX√"
WORDS = ("player", "empty", "hole", "goal", "player in hole", "player on goal")
PLAYER, EMPTY, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_ON_GOAL = range(6)

ACTION_NAMES: dict[Action, str] = {1: "Left", 2: "Down", 3: "Right", 4: "Up"}
# action -> rows, columns; in turning order
MOVES: dict[Action, tuple[int, int]] = {1: (0, -1), 2: (1, 0), 3: (0, 1), 4: (-1, 0)}
SIDEWAYS: dict[Action, tuple[int, int]] = {1: (4, 2), 2: (1, 3), 3: (2, 4), 4: (3, 1)}  # where each action can slip to

MAX_MAPS = 100_000  # maps to draw before raising


class Lake(NamedTuple):
    """A map: `holes` is a set of cells (bit `row * size + col`), `start` and `goal` are cells."""

    size: int
    holes: int
    start: int
    goal: int


class FrozenLakeState(NamedTuple):
    """A position on a map."""

    lake: Lake
    player: int


@dataclass(frozen=True)
class FrozenLakeConfig:
    """The settings of `FrozenLake`."""

    size: int = 4
    p: float = 0.9  # chance that a tile is ice rather than a hole
    success_rate: float = 0.8  # chance of moving as intended; each side gets half of the rest
    is_slippery: bool = True  # false: every move goes as intended, and success_rate has no effect
    map_seed: int | None = None  # set: every level, of every split, is this one map
    render_mode: str = "text"
    observation_format: str = "grid"  # grid, coord or grid_coord
    cell_format: str = "plain"  # plain, or spaced: each cell as space, symbol, space, tab
    accept_numbers: bool = False  # answers may also be `1` or `1 (Left)`

    def __post_init__(self):
        check_text_settings(self.render_mode, self.observation_format, self.cell_format)
        if self.size < 2:
            raise ValueError(f"size={self.size}: start and goal need at least 2")
        if not 0 < self.p <= 1:
            raise ValueError(f"p={self.p}: the chance of an ice tile is above 0 and at most 1")
        if not 0 <= self.success_rate <= 1:
            raise ValueError(f"success_rate={self.success_rate}: a chance is between 0 and 1")

    @property
    def slips(self) -> bool:
        """Whether a move can slip."""
        return self.is_slippery and self.success_rate < 1


def _tag(max_tokens: int | None = 100, max_actions: int = 10, **env_config: Any) -> Tag:
    return Tag(env_type="frozen_lake", max_actions_per_traj=max_actions, max_tokens=max_tokens, env_config=env_config)


class FrozenLake(Environment):
    """Reward 1 on the goal, 0 everywhere else; the goal and the holes end the game, and only the goal is a success."""

    Config = FrozenLakeConfig
    TAGS: ClassVar[dict[str, Tag]] = {
        "FrozenLake": _tag(success_rate=0.8),
        "CoordFrozenLake": _tag(max_tokens=120, success_rate=0.8, observation_format="grid_coord"),
        "FrozenLakeV1": _tag(
            max_tokens=None,  # the prompt shows the reply limit
            max_actions=100,  # the number of turns is the only limit
            size=4,
            p=0.8,
            success_rate=1 / 3,
            is_slippery=True,
            cell_format="spaced",
            accept_numbers=True,
        ),
    }

    def reset(self, seed: int, split: str = "train") -> FrozenLakeState:
        """A map on which the goal can be reached."""
        split_index(split)  # refuses an unknown split
        stream = ("map", self.config.map_seed) if self.config.map_seed is not None else (split, seed)
        lake = generate_lake(self.config.size, self.config.p, *stream)
        return FrozenLakeState(lake, lake.start)

    def step(self, state: FrozenLakeState, action: Action, noise: float = 0.0) -> Transition:
        """Move one cell; a move across the border stays in place."""
        if action not in MOVES:
            raise ValueError(f"action {action!r}: FrozenLake has {ACTION_NAMES}")
        if self.config.is_slippery and noise >= self.config.success_rate:
            slipped_further = noise >= (1 + self.config.success_rate) / 2
            action = SIDEWAYS[action][slipped_further]
        lake, player = state
        row, col = divmod(player, lake.size)
        row_offset, col_offset = MOVES[action]
        row = min(max(row + row_offset, 0), lake.size - 1)
        col = min(max(col + col_offset, 0), lake.size - 1)
        after = row * lake.size + col
        success = after == lake.goal
        done = success or bool(lake.holes >> after & 1)
        return Transition(FrozenLakeState(lake, after), float(success), done, success, after != player)

    def chances(self, state: FrozenLakeState, action: Action) -> Sequence[tuple[float, float]]:
        """The intended move and the two slips, as far as they can happen."""
        if not self.config.slips:
            return ((1.0, 0.0),)
        meant = self.config.success_rate
        side = (1 - meant) / 2
        slips = ((side, meant + side / 2), (side, meant + 1.5 * side))
        return ((meant, 0.0), *slips) if meant > 0 else slips

    # --- text ---------------------------------------------------------------------------------------------------

    def render(self, state: FrozenLakeState) -> str:
        """The lake as a grid, as coordinates, or both."""
        return observation(self.config.observation_format, state, self._draw, self._list_positions)

    def _player_code(self, state: FrozenLakeState) -> int:
        if state.player == state.lake.goal:
            return PLAYER_ON_GOAL
        return PLAYER_IN_HOLE if state.lake.holes >> state.player & 1 else PLAYER

    def _draw(self, state: FrozenLakeState) -> str:
        lake, player = state
        empty_lake, drawn = _canvas(lake, self.config.cell_format)
        cells = empty_lake.copy()
        cells[player + player // lake.size] = drawn[self._player_code(state)]
        return "".join(cells)

    def _list_positions(self, state: FrozenLakeState) -> str:
        lake, player = state
        names = cell_names(lake.size, lake.size)
        player_word = WORDS[self._player_code(state)].capitalize()
        lines = [
            size_line(lake.size, lake.size),
            f"Start: {names[lake.start]}",
            f"Goal: {names[lake.goal]}",
            f"{player_word}: {names[player]}",
        ]
        if lake.holes:
            lines.append(f"Holes: {list_cells(lake.holes, names)}")
        return "\n".join(lines)

    def parse_grid(self, text: str) -> FrozenLakeState:
        """The state of a drawn grid. The start is not drawn: the player's cell counts as the start."""
        rows = grid_rows(text)
        size = len(rows)
        if any(len(row) != size for row in rows):
            raise ValueError(f"a lake is square, this one has {size} rows of {len(rows[0])}")
        cells_of = dict.fromkeys(range(len(WORDS)), 0)
        for cell, symbol in enumerate(symbol for row in rows for symbol in row):
            if symbol not in SYMBOLS:
                raise ValueError(f"unknown symbol {symbol!r}; known: {SYMBOLS}")
            cells_of[SYMBOLS.index(symbol)] |= 1 << cell
        player = cells_of[PLAYER] | cells_of[PLAYER_IN_HOLE] | cells_of[PLAYER_ON_GOAL]
        goal = cells_of[GOAL] | cells_of[PLAYER_ON_GOAL]
        if player.bit_count() != 1 or goal.bit_count() != 1:
            raise ValueError(f"{player.bit_count()} players and {goal.bit_count()} goals: a lake has one of each")
        holes = cells_of[HOLE] | cells_of[PLAYER_IN_HOLE]
        start = player.bit_length() - 1
        return FrozenLakeState(Lake(size, holes, start, goal.bit_length() - 1), start)

    def task(self) -> str:
        """The rules and the reward; mentions slipping only where it happens."""
        text = (
            f"You are crossing a frozen lake of {self.config.size} by {self.config.size} cells. Walk to the goal; if "
            "you step into a hole, you have lost. A move that would leave the lake does nothing."
        )
        if self.config.slips:
            text += (
                f" The ice is slippery: you go where you meant to with a chance of {self.config.success_rate:.0%}, "
                "otherwise you slip to the left or the right of that direction, both equally likely."
            )
        return f"{text}\nReaching the goal earns 1, everything else 0."

    def legend(self) -> str:
        """The symbols and how positions are written, as far as the observation shows them."""
        return legend_text(self.symbols(), self.config.observation_format)

    def symbols(self) -> dict[str, str]:
        """The meaning of each character of the drawn grid."""
        return dict(zip(SYMBOLS, WORDS, strict=True))

    def action_names(self, state: FrozenLakeState) -> dict[Action, str]:
        """Left, Down, Right, Up."""
        return ACTION_NAMES

    def parse_action(self, state: FrozenLakeState, text: str) -> Action | None:
        """The action with this name in any case; also numbers, if the settings allow them."""
        return match_action(ACTION_NAMES, text, self.config.accept_numbers)


# --- maps -------------------------------------------------------------------------------------------------------


def generate_lake(size: int, p: float, *stream: int | str) -> Lake:
    """The map of a random stream: independent tiles, two different cells for start and goal, a path between them."""
    num_cells = size * size
    threshold = round(p * 2**32)
    for attempt in range(MAX_MAPS):
        draws = _draws_below_2_32("frozen_lake", size, *stream, attempt)
        holes = 0
        for cell in range(num_cells):
            if next(draws) >= threshold:
                holes |= 1 << cell
        start = next(draws) % num_cells
        goal = next(draws) % num_cells
        holes &= ~(1 << start | 1 << goal)
        if start != goal and _reaches(size, holes, start, goal):
            return Lake(size, holes, start, goal)
    raise ValueError(f"no {size}x{size} lake with p={p} has a path from start to goal: raise p")


def _draws_below_2_32(*key: int | str) -> Iterator[int]:
    for page in count():
        yield from struct.unpack("<16I", bits(*key, page).to_bytes(64, "little"))


def _reaches(size: int, holes: int, start: int, goal: int) -> bool:
    """Whether ice leads from start to goal: grow the set of reached cells until it stops growing."""
    all_cells = (1 << size * size) - 1
    first_col = sum(1 << row * size for row in range(size))
    not_first_col = all_cells ^ first_col
    not_last_col = all_cells ^ first_col << size - 1
    ice = all_cells ^ holes
    reached = 1 << start
    while not reached >> goal & 1:
        grown = reached | reached << size | reached >> size
        grown |= (reached & not_last_col) << 1 | (reached & not_first_col) >> 1
        grown &= ice
        if grown == reached:
            return False
        reached = grown
    return True


@lru_cache(maxsize=4096)
def _canvas(lake: Lake, cell_format: str) -> tuple[list[str], list[str]]:
    """The drawn lake without the player, line ends as separate entries, and how each code is drawn."""
    drawn = [draw_cell(symbol, cell_format) for symbol in SYMBOLS]
    cells = []
    for cell in range(lake.size * lake.size):
        if cell and cell % lake.size == 0:
            cells.append("\n")
        cells.append(drawn[GOAL if cell == lake.goal else HOLE if lake.holes >> cell & 1 else EMPTY])
    return cells, drawn
