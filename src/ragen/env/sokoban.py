"""Sokoban: push every box onto a target.

    env = Sokoban(Sokoban.Config(num_boxes=1, observation_format="grid_coord"))
    state = env.reset(seed=123, split="val")
    env.render(state)                        # the board as text
    env.shortest_plan(state)                 # (1, 4, …): the shortest solution, None if there is none
    env.parse_grid("#####\n#PXO#\n#####")    # a custom board

A state is four numbers and a shared `Board`: sets of cells are integers with a bit for each cell, so a step is a few
integer operations. Every border cell is a wall, so no step has to test for the edge.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from ragen.env.base import Action, Environment, Tag, Transition, match_action
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
from ragen.env.sokoban_levels import generate_level
from ragen.env.sokoban_search import random_win_chance, shortest_moves

SYMBOLS = "#_O√XPS"
WORDS = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
WALL, EMPTY, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

ACTION_NAMES: dict[Action, str] = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
MOVES: dict[Action, tuple[int, int]] = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}  # action -> rows, columns

REWARD_ACTION = -0.1
REWARD_BOX_ON = 1.0
REWARD_BOX_OFF = -1.0
REWARD_SOLVED = 10.0


class Board(NamedTuple):
    """The fixed part of a level; `floor` (every cell that is not a wall) and `targets` are sets of cells."""

    num_rows: int
    num_cols: int
    floor: int
    targets: int


class SokobanState(NamedTuple):
    """A position: the set of box cells, the player's cell, and the number of actions taken."""

    board: Board
    boxes: int
    player: int
    num_steps: int = 0


@dataclass(frozen=True)
class SokobanConfig:
    """The settings of `Sokoban`. `search_depth` is the most moves that a level may need."""

    dim_room: tuple[int, int] = (6, 6)
    dim_x: int | None = None  # dim_x and dim_y together replace dim_room
    dim_y: int | None = None
    max_steps: int = 100
    num_boxes: int = 3
    search_depth: int = 300
    render_mode: str = "text"
    observation_format: str = "grid"  # grid, coord or grid_coord
    symbols: str = SYMBOLS  # one character for each of WORDS
    cell_format: str = "plain"  # plain, or spaced: each cell as space, symbol, space, tab
    accept_numbers: bool = False  # answers may also be `1` or `1 (Up)`

    def __post_init__(self):
        check_text_settings(self.render_mode, self.observation_format, self.cell_format)
        if (self.dim_x is None) != (self.dim_y is None):
            raise ValueError(f"dim_x={self.dim_x}, dim_y={self.dim_y}: set both or neither")
        if len(self.dim_room) != 2 or min(self.size) < 3:
            raise ValueError(f"room size {self.size}: needs two numbers of at least 3, since the outer ring is wall")
        if self.num_boxes < 1:
            raise ValueError(f"num_boxes={self.num_boxes}: must be at least 1")
        num_inner = (self.size[0] - 2) * (self.size[1] - 2)
        if num_inner <= self.num_boxes + 1:
            raise ValueError(f"num_boxes={self.num_boxes}: a room of {self.size} has only {num_inner} inner cells")
        if self.search_depth < self.num_boxes:
            raise ValueError(
                f"search_depth={self.search_depth}: {self.num_boxes} boxes need at least {self.num_boxes} moves"
            )
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}: must be at least 1")
        if len(self.symbols) != len(WORDS) or len(set(self.symbols)) != len(WORDS) or len(self.symbols.split()) != 1:
            raise ValueError(f"symbols={self.symbols!r}: needs {len(WORDS)} different characters, for {WORDS}")

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns, the outer wall included."""
        return self.dim_room if self.dim_x is None or self.dim_y is None else (self.dim_x, self.dim_y)


def _tag(max_tokens: int | None = 100, max_actions: int = 10, **env_config: Any) -> Tag:
    return Tag(env_type="sokoban", max_actions_per_traj=max_actions, max_tokens=max_tokens, env_config=env_config)


class Sokoban(Environment):
    """Rewards as in gym-sokoban: -0.1 per action, +1 or -1 when a box enters or leaves a target, +10 when solved."""

    Config = SokobanConfig
    TAGS: ClassVar[dict[str, Tag]] = {
        "SimpleSokoban": _tag(dim_x=6, dim_y=6, num_boxes=1, max_steps=100),
        "LargerSokoban": _tag(dim_x=8, dim_y=8, num_boxes=2, max_steps=100, search_depth=10),
        "SokobanDifferentGridVocab": _tag(dim_x=6, dim_y=6, num_boxes=1, search_depth=30, symbols="W.GCBA@"),
        "CoordSokoban": _tag(
            max_tokens=120, dim_x=6, dim_y=6, num_boxes=1, max_steps=100, observation_format="grid_coord"
        ),
        "SokobanV1": _tag(
            max_tokens=None,  # the prompt shows the reply limit
            max_actions=100,  # the number of turns is the only limit
            dim_x=6,
            dim_y=6,
            num_boxes=1,
            max_steps=100,
            search_depth=30,
            cell_format="spaced",
            accept_numbers=True,
        ),
    }

    def reset(self, seed: int, split: str = "train") -> SokobanState:
        """A solvable level with no box on a target; different splits have different boards."""
        num_rows, num_cols = self.config.size
        level = generate_level(num_rows, num_cols, self.config.num_boxes, self.config.search_depth, split, seed)
        return SokobanState(Board(num_rows, num_cols, level.floor, level.targets), level.boxes, level.player)

    def step(self, state: SokobanState, action: Action, noise: float = 0.0) -> Transition:
        """Walk one cell and push the box there, if any; if that is blocked, nothing moves."""
        if action not in MOVES:
            raise ValueError(f"action {action!r}: Sokoban has {ACTION_NAMES}")
        board, boxes, player, num_steps = state
        row_offset, col_offset = MOVES[action]
        offset = row_offset * board.num_cols + col_offset
        ahead = player + offset
        reward = REWARD_ACTION
        success = False
        effective = False
        if boxes >> ahead & 1:
            beyond = 1 << ahead + offset
            if beyond & board.floor & ~boxes:
                effective = True
                targets = board.targets
                num_before = (boxes & targets).bit_count()
                boxes ^= 1 << ahead | beyond
                num_after = (boxes & targets).bit_count()
                if num_after > num_before:
                    reward += REWARD_BOX_ON
                elif num_after < num_before:
                    reward += REWARD_BOX_OFF
                if boxes == targets:
                    reward += REWARD_SOLVED
                    success = True
        elif board.floor >> ahead & 1:
            effective = True
        num_steps += 1
        out_of_steps = not success and num_steps >= self.config.max_steps
        after = SokobanState(board, boxes, ahead if effective else player, num_steps)
        return Transition(after, reward, success or out_of_steps, success, effective, out_of_steps)

    def shortest_plan(self, state: SokobanState) -> tuple[int, ...] | None:
        """The shortest solution, or None if the board cannot be solved in the steps left."""
        plan = self._solve(state)
        return plan if plan is not None and len(plan) <= self.config.max_steps - state.num_steps else None

    def _solve(self, state: SokobanState) -> tuple[int, ...] | None:
        board = state.board
        return shortest_moves(board.num_cols, board.floor, board.targets, state.boxes, state.player)

    def is_dead(self, state: SokobanState) -> bool:
        """Whether the board can no longer be solved, ignoring the step limit."""
        return self._solve(state) is None

    def random_success(self, state: SokobanState, num_actions: int) -> float:
        """The exact chance that uniformly random actions solve the board."""
        board, boxes, player, num_steps = state
        num_actions = min(num_actions, self.config.max_steps - num_steps)
        return random_win_chance(board.num_cols, board.floor, board.targets, boxes, player, num_actions)

    # --- text ---------------------------------------------------------------------------------------------------

    def render(self, state: SokobanState) -> str:
        """The board as a grid, as coordinates, or both."""
        return observation(self.config.observation_format, state, self._draw, self._list_positions)

    def _draw(self, state: SokobanState) -> str:
        board, boxes, player, _ = state
        empty_board, drawn = _canvas(board, self.config.symbols, self.config.cell_format)
        cells = empty_board.copy()
        targets = board.targets
        while boxes:
            box = boxes & -boxes
            cells[box.bit_length() - 1] = drawn[BOX_ON_TARGET if box & targets else BOX]
            boxes ^= box
        cells[player] = drawn[PLAYER_ON_TARGET if targets >> player & 1 else PLAYER]
        return "".join(cells)

    def _list_positions(self, state: SokobanState) -> str:
        board, boxes, player, _ = state
        names = cell_names(board.num_rows, board.num_cols)
        targets = board.targets
        player_on_target = targets >> player & 1
        lines = [size_line(board.num_rows, board.num_cols)]
        free_targets = targets & ~(boxes | 1 << player)
        if free_targets:
            lines.append(f"Targets: {list_cells(free_targets, names)}")
        if boxes & ~targets:
            lines.append(f"Boxes: {list_cells(boxes & ~targets, names)}")
        if boxes & targets:
            lines.append(f"Boxes on target: {list_cells(boxes & targets, names)}")
        lines.append(f"{'Player on target' if player_on_target else 'Player'}: {names[player]}")
        return "\n".join(lines)

    def parse_grid(self, text: str, num_steps: int = 0) -> SokobanState:
        """The state of a drawn grid: the inverse of drawing, and the way to make a board by hand."""
        rows = grid_rows(text)
        num_rows, num_cols = len(rows), len(rows[0])
        cells_of = dict.fromkeys(range(len(WORDS)), 0)
        for cell, symbol in enumerate(symbol for row in rows for symbol in row):
            if symbol not in self.config.symbols:
                raise ValueError(f"unknown symbol {symbol!r}; known: {self.config.symbols}")
            code = self.config.symbols.index(symbol)
            on_border = cell % num_cols in (0, num_cols - 1) or cell // num_cols in (0, num_rows - 1)
            if on_border and code != WALL:
                raise ValueError(f"cell {cell_names(num_rows, num_cols)[cell]} on the border must be a wall")
            cells_of[code] |= 1 << cell
        player = cells_of[PLAYER] | cells_of[PLAYER_ON_TARGET]
        targets = cells_of[TARGET] | cells_of[BOX_ON_TARGET] | cells_of[PLAYER_ON_TARGET]
        boxes = cells_of[BOX] | cells_of[BOX_ON_TARGET]
        if player.bit_count() != 1:
            raise ValueError(f"a board has one player, this one has {player.bit_count()}")
        if targets.bit_count() != boxes.bit_count():
            raise ValueError(f"{boxes.bit_count()} boxes for {targets.bit_count()} targets")
        floor = ((1 << num_rows * num_cols) - 1) ^ cells_of[WALL]
        return SokobanState(Board(num_rows, num_cols, floor, targets), boxes, player.bit_length() - 1, num_steps)

    def task(self) -> str:
        """The rules and the rewards."""
        many = self.config.num_boxes > 1
        goal = f"Push all {self.config.num_boxes} boxes onto the targets" if many else "Push the box onto the target"
        return (
            f"You are solving a Sokoban puzzle. {goal}. You walk one cell at a time and push a box by walking into it. "
            "A box cannot be pulled, and it moves only if the cell behind it is free: not a wall, not another box. So "
            "a box in a corner is stuck; think ahead before you push.\n"
            "Every action costs 0.1. A box that comes onto a target earns 1, a box that leaves one loses 1, and "
            "solving the puzzle earns 10."
        )

    def legend(self) -> str:
        """The symbols and how positions are written, as far as the observation shows them."""
        return legend_text(self.symbols(), self.config.observation_format)

    def symbols(self) -> dict[str, str]:
        """The meaning of each character of the drawn grid."""
        return dict(zip(self.config.symbols, WORDS, strict=True))

    def action_names(self, state: SokobanState) -> dict[Action, str]:
        """Up, Down, Left, Right."""
        return ACTION_NAMES

    def parse_action(self, state: SokobanState, text: str) -> Action | None:
        """The action with this name in any case; also numbers, if the settings allow them."""
        return match_action(ACTION_NAMES, text, self.config.accept_numbers)


@lru_cache(maxsize=4096)
def _canvas(board: Board, symbols: str, cell_format: str) -> tuple[list[str], list[str]]:
    """The drawn cells of the board without boxes and player, and the drawing of each code. Callers copy the first."""
    drawn = [draw_cell(symbol, cell_format) for symbol in symbols]
    num_cells = board.num_rows * board.num_cols
    cells = []
    for cell in range(num_cells):
        code = TARGET if board.targets >> cell & 1 else EMPTY if board.floor >> cell & 1 else WALL
        # The last cell of a row is always a wall, so no box or player overwrites its line end.
        ends_line = cell % board.num_cols == board.num_cols - 1 and cell != num_cells - 1
        cells.append(drawn[code] + "\n" if ends_line else drawn[code])
    return cells, drawn
