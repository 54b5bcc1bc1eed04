"""Sokoban levels, generated backwards from the solved board, so each is solvable in a known number of moves.

    floor, targets, boxes, player = generate_level(6, 6, num_boxes=1, search_depth=30, split="val", seed=123)

A room is carved by a random walk that stamps small shapes. An exact breadth-first search then runs backwards
from all solved positions (the player steps back, or pulls a box), so layer k holds exactly the positions whose shortest
solution has k moves. The length is drawn first, and the level from the layer of that length.

Everything is a set of cells held in one integer (cell = row * num_cols + col). With one box the whole search frontier
is a single integer with a bit for each (box, player) pair: a step of all positions at once is a shift, and a pull,
which moves box and player by the same offset, is a shift too. A 6x6 level takes about 40 microseconds.

The only randomness is `prng.bits`, so a level never changes; changing anything here changes the levels, and
`tests/env/test_levels.py` fails.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ragen.env.base import split_index
from ragen.prng import bits

# How often each solution length 1, 2, … 10 is drawn, out of 512: one 9-bit draw. Short ones are common, so that a
# beginner finds rewards, and none is longer than an agent's ten actions.
LENGTH_WEIGHTS = (48, 127, 55, 86, 75, 52, 28, 26, 7, 8)
LENGTHS = tuple(length for length, weight in enumerate(LENGTH_WEIGHTS, 1) for _ in range(weight))

# Cells opened around a position of the walk, all equally likely: a horizontal bar, a vertical bar, and twice a single
# cell. Long solutions get long walks, hence larger rooms. With these numbers random play solves about 20 % of the 6x6
# levels.
STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, 0),),
    ((0, 0),),
)
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right
WALK_STEPS_BASE = 6
WALK_STEPS_PER_MOVE = 3

POOL_DRAWS = 40  # steps of the walk per pool of random bits, a byte each

PATIENCE_ONE_BOX = 64  # rooms that may miss the drawn length
PATIENCE = 4  # the same with several boxes, where a room costs more
MAX_ATTEMPTS = 2000  # rooms to try before raising
MAX_FRONTIER = 3000  # box arrangements in one search layer; beyond it the search stops
MAX_CELLS_ONE_INTEGER = 100  # on larger boards the one-integer frontier, with cells**2 bits, is slower
CHUNK = 6  # cells per table lookup
CHUNK_MASK = (1 << CHUNK) - 1


class Level(NamedTuple):
    """A starting position; `floor`, `targets` and `boxes` are sets of cells, `player` is a cell."""

    floor: int
    targets: int
    boxes: int
    player: int


def content_class(floor: int, targets: int, boxes: int, player: int) -> int:
    """0 to 3, computed from the board. Each split owns one class, so splits never share a board."""
    mixed = floor * 0x9E3779B97F4A7C15 + targets * 0xC2B2AE3D27D4EB4F
    mixed += boxes * 0x165667B19E3779F9 + player * 0x27D4EB2F165667C5
    return mixed % 0x1FFFFFFFFFFFFFFF >> 20 & 3  # a prime, 2**61 - 1, so that every bit of the board matters


def generate_level(num_rows: int, num_cols: int, num_boxes: int, search_depth: int, split: str, seed: int) -> Level:
    """The level of a seed: no box on a target, and solvable in at most `search_depth` moves."""
    key = ("sokoban", num_rows, num_cols, num_boxes, split, seed)
    owned_class = split_index(split)
    length, pool = _draw_length(bits(*key), num_boxes, search_depth)
    one_integer = num_boxes == 1 and num_rows * num_cols <= MAX_CELLS_ONE_INTEGER
    pick_level = _pick_one_box_level if one_integer else _pick_level
    patience = PATIENCE_ONE_BOX if num_boxes == 1 else PATIENCE
    for attempt in range(MAX_ATTEMPTS):
        # If the rooms keep missing the length, accept shorter ones first, later longer ones too.
        shortest = length if attempt < patience else 1
        longest = min(length + attempt // PATIENCE_ONE_BOX, search_depth)
        num_steps = (WALK_STEPS_BASE + WALK_STEPS_PER_MOVE * longest) * (num_rows + num_cols) // 12
        floor, pool = _carve_room(num_rows, num_cols, num_steps, pool, key)
        if floor.bit_count() > num_boxes + 1:
            level = pick_level(num_rows, num_cols, floor, num_boxes, shortest, longest, owned_class, pool)
            if level is not None:
                return level
        pool = bits(*key, "attempt", attempt + 1)
    raise ValueError(
        f"no Sokoban level with {num_boxes} boxes on {num_rows}x{num_cols} found for split {split!r}: "
        f"the board is too small, or search_depth {search_depth} too low, for this number of boxes"
    )


def _draw_length(pool: int, num_boxes: int, search_depth: int) -> tuple[int, int]:
    """The solution length, the sum of one draw per box, and the remaining random bits."""
    length = 0
    for _ in range(num_boxes):
        length += LENGTHS[pool & 511]
        pool >>= 9
    return min(length, search_depth), pool


# --- the room ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _walk_graph(num_rows: int, num_cols: int) -> tuple[list, ...]:
    """The random walk as linked lists: node[draw] is (cells to open, next node), for a draw below 64.

    A node is a position and a direction. Of the 64 draws 40 go straight and 24 take any of the four directions;
    the walk stays inside the outer wall.
    """
    nodes: dict[tuple[int, int, int], list] = {
        (row, col, direction): []
        for row in range(1, num_rows - 1)
        for col in range(1, num_cols - 1)
        for direction in range(len(DIRECTIONS))
    }
    for (row, col, direction), node in nodes.items():
        for draw in range(64):
            turn, stamp = divmod(draw, len(STAMPS))
            heading = turn % 4 if turn < 6 else direction
            next_row = min(max(row + DIRECTIONS[heading][0], 1), num_rows - 2)
            next_col = min(max(col + DIRECTIONS[heading][1], 1), num_cols - 2)
            opened = 0
            for row_offset, col_offset in STAMPS[stamp]:
                open_row, open_col = next_row + row_offset, next_col + col_offset
                if 0 < open_row < num_rows - 1 and 0 < open_col < num_cols - 1:
                    opened |= 1 << open_row * num_cols + open_col
            node.append((opened, nodes[next_row, next_col, heading]))
    return tuple(nodes.values())


def _carve_room(num_rows: int, num_cols: int, num_steps: int, pool: int, key: tuple[int | str, ...]) -> tuple[int, int]:
    """The floor of a random room, and the remaining random bits."""
    nodes = _walk_graph(num_rows, num_cols)
    pool, first = divmod(pool, len(nodes))
    draws = pool.to_bytes(64, "little")[:POOL_DRAWS]
    for page in range((num_steps - POOL_DRAWS + 63) // 64):  # a long walk takes more than the pool holds
        draws += bits(*key, "walk", pool, page).to_bytes(64, "little")
    node = nodes[first]
    floor = 0
    for draw in draws[:num_steps]:
        opened, node = node[draw & 63]
        floor |= opened
    return floor, pool >> 8 * POOL_DRAWS


def _take_cells(cells: int, num_taken: int, pool: int) -> tuple[int, int]:
    """Random distinct cells of a set, and the remaining random bits."""
    taken = 0
    for _ in range(num_taken):
        pool, skip = divmod(pool, cells.bit_count())
        rest = cells
        for _ in range(skip):
            rest &= rest - 1
        taken |= rest & -rest
        cells ^= rest & -rest
    return taken, pool


# --- one box: the frontier is one integer -----------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Constants for sets of (box, player) pairs on one board size; pair = box * num_cells + player."""

    same_cell: int  # box and player in one cell, which is impossible
    pulls: tuple[int, ...]  # pairs whose player has just pushed the box up, down, left, right
    boxes_in_chunk: tuple[tuple[int, ...], ...]  # [chunk][bits of the chunk] -> those boxes, the player in cell 0


@lru_cache(maxsize=16)
def _pairs(num_rows: int, num_cols: int) -> _Pairs:
    num_cells = num_rows * num_cols
    pulls = []
    for row_offset, col_offset in DIRECTIONS:
        behind = -(row_offset * num_cols + col_offset)
        inner = range(num_cols, num_cells - num_cols)
        pulls.append(sum(1 << box * num_cells + box + behind for box in inner))
    boxes_in_chunk = tuple(
        tuple(
            sum(1 << (start + cell) * num_cells for cell in range(CHUNK) if chunk_bits >> cell & 1)
            for chunk_bits in range(1 << CHUNK)
        )
        for start in range(0, num_cells, CHUNK)
    )
    return _Pairs(sum(1 << cell * num_cells + cell for cell in range(num_cells)), tuple(pulls), boxes_in_chunk)


def _pick_one_box_level(
    num_rows: int, num_cols: int, floor: int, _: int, shortest: int, longest: int, owned_class: int, pool: int
) -> Level | None:
    """A position of the room whose solution takes `longest` moves or the nearest number down to `shortest`."""
    num_cells = num_rows * num_cols
    pool, first_pair = divmod(pool, num_cells * num_cells)
    pairs = _allowed_pairs(num_rows, num_cols, floor)
    # Any floor cell may be the target: starting at a random one, take the first that has such a position.
    for target in _members_from(floor, pool % num_cells):
        solved = (floor ^ 1 << target) << target * num_cells
        layers = _pair_layers_back_from_solved(num_rows, num_cols, pairs, solved, longest)
        for layer in reversed(layers[shortest - 1 :]):
            for pair in _members_from(layer, first_pair):
                box, player = divmod(pair, num_cells)
                if content_class(floor, 1 << target, 1 << box, player) == owned_class:
                    return Level(floor, 1 << target, 1 << box, player)
    return None


def _allowed_pairs(num_rows: int, num_cols: int, floor: int) -> int:
    """All pairs of two different floor cells."""
    constants = _pairs(num_rows, num_cols)
    boxes, rest = 0, floor
    for boxes_of in constants.boxes_in_chunk:
        boxes |= boxes_of[rest & CHUNK_MASK]
        rest >>= CHUNK
    # A product of two sets is the set of pairs: each box bit carries a copy of the floor for the player.
    return boxes * floor & ~constants.same_cell


def _pair_layers_back_from_solved(num_rows: int, num_cols: int, pairs: int, solved: int, depth: int) -> list[int]:
    """The pairs that need exactly 1, 2, … moves."""
    pushed_up, pushed_down, pushed_left, pushed_right = _pairs(num_rows, num_cols).pulls
    along_row = num_rows * num_cols + 1  # box and player move together
    along_col = num_cols * along_row
    unseen = pairs ^ solved
    frontier = solved
    layers = []
    for _ in range(depth):
        frontier = (
            frontier << 1
            | frontier >> 1
            | frontier << num_cols
            | frontier >> num_cols
            | (frontier & pushed_up) << along_col
            | (frontier & pushed_down) >> along_col
            | (frontier & pushed_left) << along_row
            | (frontier & pushed_right) >> along_row
        ) & unseen
        if not frontier:
            break
        unseen ^= frontier
        layers.append(frontier)
    return layers


def _members_from(members: int, first: int) -> Iterator[int]:
    """The members of a set, upwards from `first`, then the smaller ones."""
    upper = members >> first << first
    for part in (upper, members ^ upper):
        while part:
            lowest = part & -part
            yield lowest.bit_length() - 1
            part ^= lowest


# --- several boxes: the frontier maps each box arrangement to a set of player cells -----------------------------


def _pick_level(
    num_rows: int, num_cols: int, floor: int, num_boxes: int, shortest: int, longest: int, owned_class: int, pool: int
) -> Level | None:
    """A position of the room, no box on a target, whose solution takes `longest` moves or the nearest number down
    to `shortest`."""
    targets, pool = _take_cells(floor, num_boxes, pool)
    layers = _layers_back_from_solved(num_cols, floor, targets, longest)
    for layer in reversed(layers[shortest:]):
        candidates = [item for item in layer.items() if not item[0] & targets]
        if not candidates:
            continue
        pool, first = divmod(pool, len(candidates))
        for boxes, players in candidates[first:] + candidates[:first]:
            while players:
                player = (players & -players).bit_length() - 1
                if content_class(floor, targets, boxes, player) == owned_class:
                    return Level(floor, targets, boxes, player)
                players &= players - 1
    return None


def _layers_back_from_solved(num_cols: int, floor: int, targets: int, depth: int) -> list[dict[int, int]]:
    """Layer k: the positions that need exactly k moves, as {boxes: player cells}; stops when a layer is too wide."""
    offsets = [row_offset * num_cols + col_offset for row_offset, col_offset in DIRECTIONS]
    frontier = {targets: floor & ~targets}
    seen = dict(frontier)
    layers = [frontier]
    for _ in range(depth):
        if not frontier or len(frontier) > MAX_FRONTIER:
            break
        reached: dict[int, int] = {}
        for boxes, players in frontier.items():
            free = floor & ~boxes
            stepped = (players << 1 | players >> 1 | players << num_cols | players >> num_cols) & free
            reached[boxes] = reached.get(boxes, 0) | stepped
            for offset in offsets:
                # The player stands behind a box that it has just pushed, and the cell behind the player is free.
                pullers = players & _shift(boxes, -offset) & _shift(free, offset)
                while pullers:
                    player = pullers & -pullers
                    pulled = boxes ^ _shift(player, offset) | player
                    reached[pulled] = reached.get(pulled, 0) | _shift(player, -offset)
                    pullers ^= player
        frontier = {}
        for boxes, players in reached.items():
            players &= ~seen.get(boxes, 0)
            if players:
                frontier[boxes] = players
                seen[boxes] = seen.get(boxes, 0) | players
        layers.append(frontier)
    return layers


def _shift(cells: int, offset: int) -> int:
    return cells << offset if offset > 0 else cells >> -offset
