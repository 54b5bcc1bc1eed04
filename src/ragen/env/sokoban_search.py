"""Exact search over Sokoban positions, on sets of cells held as integers (see `sokoban_levels.py`).

    shortest_moves(num_cols=6, floor=floor, targets=targets, boxes=boxes, player=player)   # -> (1, 4, 4) or None

All player cells of one box arrangement are searched at once: a layer is {boxes: player cells}.
"""

from functools import lru_cache

from ragen.env.sokoban_levels import DIRECTIONS

ACTIONS = (1, 2, 3, 4)  # up, down, left, right: the order of DIRECTIONS


def action_offsets(num_cols: int) -> tuple[int, ...]:
    """The cell offset of each action, in the order of `ACTIONS`."""
    return tuple(row_offset * num_cols + col_offset for row_offset, col_offset in DIRECTIONS)


def shortest_moves(num_cols: int, floor: int, targets: int, boxes: int, player: int) -> tuple[int, ...] | None:
    """The shortest solution of the position, or None if there is none."""
    alive = _cells_alive(num_cols, floor, targets)
    frontier = {boxes: 1 << player}
    seen = dict(frontier)
    layers = [frontier]
    while targets not in frontier:
        frontier = _next_layer(num_cols, floor, alive, frontier, seen)
        if not frontier:
            return None
        layers.append(frontier)
    return _trace_back(num_cols, layers, targets)


def _next_layer(
    num_cols: int, floor: int, alive: int, frontier: dict[int, int], seen: dict[int, int]
) -> dict[int, int]:
    """Every new position one action further; adds them to `seen`."""
    reached: dict[int, int] = {}
    for boxes, players in frontier.items():
        free = floor & ~boxes
        for offset in action_offsets(num_cols):
            ahead = players << offset if offset > 0 else players >> -offset
            reached[boxes] = reached.get(boxes, 0) | ahead & free
            pushing = ahead & boxes
            while pushing:
                box = pushing & -pushing
                pushing ^= box
                pushed = box << offset if offset > 0 else box >> -offset
                if pushed & free & alive:
                    moved = boxes ^ box | pushed
                    reached[moved] = reached.get(moved, 0) | box
    layer = {}
    for boxes, players in reached.items():
        new = players & ~seen.get(boxes, 0)
        if new:
            layer[boxes] = new
            seen[boxes] = seen.get(boxes, 0) | new
    return layer


@lru_cache(maxsize=1024)
def _cells_alive(num_cols: int, floor: int, targets: int) -> int:
    """Cells from which a lone box could still be pushed to some target; a box anywhere else is stuck."""
    alive = targets
    while True:
        grown = alive
        for offset in action_offsets(num_cols):
            # A box is pushed into an alive cell from the cell before it, with the player one cell further back.
            before = (alive >> offset if offset > 0 else alive << -offset) & floor
            grown |= before & (floor << offset if offset > 0 else floor >> -offset)
        if grown == alive:
            return alive
        alive = grown


def _trace_back(num_cols: int, layers: list[dict[int, int]], targets: int) -> tuple[int, ...]:
    """The actions that lead through the layers to the solved board in the last one."""
    boxes = targets
    player = layers[-1][targets].bit_length() - 1
    actions = []
    for layer in reversed(layers[:-1]):
        action, boxes, player = _predecessor(num_cols, layer, boxes, player)
        actions.append(action)
    return tuple(reversed(actions))


def _predecessor(num_cols: int, layer: dict[int, int], boxes: int, player: int) -> tuple[int, int, int]:
    """An action and the position in the previous layer that lead here, as (action, boxes, player)."""
    for action, offset in zip(ACTIONS, action_offsets(num_cols), strict=True):
        came_from = player - offset
        if layer.get(boxes, 0) >> came_from & 1:
            return action, boxes, came_from
        pulled = boxes ^ 1 << player + offset | 1 << player
        if boxes >> player + offset & 1 and layer.get(pulled, 0) >> came_from & 1:
            return action, pulled, came_from
    raise AssertionError("a position of the search has no predecessor")


def random_win_chance(num_cols: int, floor: int, targets: int, boxes: int, player: int, num_actions: int) -> float:
    """The exact share of action sequences of this length that solve the position."""
    offsets = action_offsets(num_cols)
    counts = {(boxes, player): 1}
    wins = 0
    for actions_left in reversed(range(num_actions)):
        following: dict[tuple[int, int], int] = {}
        for position, num_ways in counts.items():
            boxes, player = position
            for offset in offsets:
                ahead = player + offset
                after = position
                if boxes >> ahead & 1:
                    if floor & ~boxes & 1 << ahead + offset:
                        moved = boxes ^ 1 << ahead | 1 << ahead + offset
                        if moved == targets:
                            wins += num_ways * 4**actions_left
                            continue
                        after = (moved, ahead)
                elif floor >> ahead & 1:
                    after = (boxes, ahead)
                following[after] = following.get(after, 0) + num_ways
        counts = following
    return wins / 4**num_actions
