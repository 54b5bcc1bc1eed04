"""Sokoban's rules, rewards and texts: against hand-made boards, a naive oracle, and recordings of gym-sokoban."""

import gzip
import json
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen.env.registry import catalogue, make
from ragen.env.sokoban import Sokoban

TRACES = Path(__file__).parents[1] / "data" / "gym_sokoban_traces.json.gz"
CODES = "#_O√XPS"
UP, DOWN, LEFT, RIGHT = 1, 2, 3, 4


def sokoban(**changes) -> Sokoban:
    return Sokoban(Sokoban.Config(**{"num_boxes": 1, **changes}))


# --- an oracle that shares nothing with the code: characters in a dict, one move at a time ------------------------


class Oracle:
    """A board as {(row, col): symbol without things}, a set of boxes and a player."""

    MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}  # noqa: RUF012

    def __init__(self, text: str):
        cells = {(r, c): ch for r, line in enumerate(text.splitlines()) for c, ch in enumerate(line)}
        self.walls = {cell for cell, ch in cells.items() if ch == "#"}
        self.targets = frozenset(cell for cell, ch in cells.items() if ch in "O√S")
        self.start = (
            frozenset(cell for cell, ch in cells.items() if ch in "X√"),
            next(cell for cell, ch in cells.items() if ch in "PS"),
        )

    def move(self, position, action):
        boxes, (row, col) = position
        down, right = self.MOVES[action]
        ahead, beyond = (row + down, col + right), (row + 2 * down, col + 2 * right)
        if ahead in self.walls:
            return position
        if ahead in boxes:
            if beyond in self.walls or beyond in boxes:
                return position
            return boxes - {ahead} | {beyond}, ahead
        return boxes, ahead

    def shortest_length(self):
        """Breadth-first search over single moves; None where the board cannot be solved."""
        queue, seen = deque([(self.start, 0)]), {self.start}
        while queue:
            position, length = queue.popleft()
            if position[0] == self.targets:
                return length
            for action in self.MOVES:
                after = self.move(position, action)
                if after not in seen:
                    seen.add(after)
                    queue.append((after, length + 1))
        return None

    def draw(self, position, num_rows, num_cols):
        boxes, player = position
        symbol = {}
        for cell in ((r, c) for r in range(num_rows) for c in range(num_cols)):
            on_target = cell in self.targets
            if cell in self.walls:
                symbol[cell] = "#"
            elif cell in boxes:
                symbol[cell] = "√" if on_target else "X"
            elif cell == player:
                symbol[cell] = "S" if on_target else "P"
            else:
                symbol[cell] = "O" if on_target else "_"
        return "\n".join("".join(symbol[r, c] for c in range(num_cols)) for r in range(num_rows))


# --- rules ------------------------------------------------------------------------------------------------------


def test_winning_push_pays_ten_point_nine():
    env = sokoban()
    after = env.step(env.parse_grid("#####\n#PXO#\n#####"), RIGHT)
    assert env.render(after.state) == "#####\n#_P√#\n#####"
    assert after.reward == pytest.approx(10.9)
    assert after.done and after.success and after.effective and not after.out_of_steps


def test_pushing_a_box_off_its_target_costs_one():
    env = sokoban(num_boxes=2)
    state = env.parse_grid("#######\n#P√_XO#\n#######")
    after = env.step(state, RIGHT)
    assert env.render(after.state) == "#######\n#_SXXO#\n#######"
    assert after.reward == pytest.approx(-1.1)
    assert not after.done


def test_one_of_two_boxes_placed_pays_one_without_the_prize():
    env = sokoban(num_boxes=2)
    after = env.step(env.parse_grid("#######\n#PXO__#\n#_XO__#\n#######"), RIGHT)
    assert after.reward == pytest.approx(0.9)
    assert not after.done and not after.success


@pytest.mark.parametrize(
    ("board", "action"),
    [
        ("#####\n#PXO#\n#####", LEFT),  # wall
        ("######\n#OPX##\n######", RIGHT),  # box against a wall
        ("#######\n#PXXOO#\n#######", RIGHT),  # box against a box
    ],
)
def test_blocked_actions_cost_and_change_nothing_on_the_board(board, action):
    env = sokoban()
    state = env.parse_grid(board)
    after = env.step(state, action)
    assert env.render(after.state) == board
    assert after.reward == pytest.approx(-0.1)
    assert not after.effective


def test_walking_is_effective_and_a_player_hides_a_target():
    env = sokoban()
    after = env.step(env.parse_grid("######\n#PO_X#\n######"), RIGHT)
    assert after.effective and env.render(after.state) == "######\n#_S_X#\n######"


def test_step_limit_ends_the_game_without_success():
    env = sokoban(max_steps=2)
    first = env.step(env.parse_grid("#####\n#PXO#\n#####"), LEFT)
    second = env.step(first.state, LEFT)
    assert not first.done
    assert second.done and second.out_of_steps and not second.success
    won_at_the_limit = env.step(first.state, RIGHT)
    assert won_at_the_limit.success and won_at_the_limit.done and not won_at_the_limit.out_of_steps


def test_unknown_action_is_refused():
    env = sokoban()
    with pytest.raises(ValueError, match="5"):
        env.step(env.reset(0), 5)


@settings(max_examples=400)
@given(seed=st.integers(0, 10**9), size=st.sampled_from([(5, 6), (6, 6), (8, 7)]), data=st.data())
def test_random_play_agrees_with_the_oracle(seed, size, data):
    env = sokoban(dim_room=size, num_boxes=data.draw(st.integers(1, 2)))
    state = env.reset(seed)
    oracle = Oracle(env.render(state))
    position = oracle.start
    for action in data.draw(st.lists(st.integers(1, 4), max_size=25)):
        before = len(position[0] & oracle.targets)
        moved = oracle.move(position, action)
        after = env.step(state, action)
        solved = moved[0] == oracle.targets
        placed = len(moved[0] & oracle.targets) - before
        assert env.render(after.state) == oracle.draw(moved, *size)
        assert after.reward == pytest.approx(-0.1 + placed + 10 * solved)
        assert (after.success, after.effective) == (solved, moved[1] != position[1])
        if after.done:
            return
        state, position = after.state, moved


def test_agrees_with_gym_sokoban_step_by_step():
    with gzip.open(TRACES, "rt") as file:
        episodes = json.load(file)
    num_steps = num_wins = 0
    for episode in episodes:
        rows, cols = episode["size"]

        def drawn(codes, cols=cols):
            symbols = "".join(CODES[int(code)] for code in codes)
            return "\n".join(symbols[start : start + cols] for start in range(0, len(symbols), cols))

        env = sokoban(max_steps=episode["max_steps"])
        state = env.parse_grid(drawn(episode["start"]))
        assert (state.board.num_rows, state.board.num_cols) == (rows, cols)
        for action, board, reward, done in episode["steps"]:
            after = env.step(state, action)
            assert env.render(after.state) == drawn(board)
            assert after.reward == pytest.approx(reward)
            assert after.done == done
            state = after.state
            num_steps += 1
        num_wins += after.success
    assert num_steps > 5000 and num_wins > 10


# --- solver -----------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(
    seed=st.integers(0, 10**9),
    size=st.sampled_from([(5, 6), (6, 6), (5, 8), (7, 7)]),
    num_boxes=st.integers(1, 3),
    search_depth=st.sampled_from([6, 10, 300]),
    split=st.sampled_from(["train", "val", "test", "sft"]),
)
def test_every_level_is_solvable_and_its_plan_is_shortest(seed, size, num_boxes, search_depth, split):
    env = sokoban(dim_room=size, num_boxes=num_boxes, search_depth=search_depth)
    start = state = env.reset(seed, split)
    assert state.boxes.bit_count() == num_boxes and not state.boxes & state.board.targets
    plan = env.shortest_plan(state)
    assert plan is not None and len(plan) == Oracle(env.render(start)).shortest_length() <= search_depth
    for index, action in enumerate(plan):
        after = env.step(state, action)
        assert after.success == (index == len(plan) - 1)
        state = after.state


@settings(max_examples=400)
@given(seed=st.integers(0, 10**9), num_boxes=st.integers(1, 3), actions=st.lists(st.integers(1, 4), max_size=12))
def test_dead_states_are_those_that_no_search_solves(seed, num_boxes, actions):
    env = sokoban(dim_room=(5, 6), num_boxes=num_boxes)
    state = env.reset(seed)
    for action in actions:
        after = env.step(state, action)
        if after.done:
            return
        state = after.state
    assert env.is_dead(state) == (Oracle(env.render(state)).shortest_length() is None)


def test_a_box_in_a_corner_is_dead():
    env = sokoban()
    assert env.is_dead(env.parse_grid("#####\n#X_O#\n#_P_#\n#####"))
    assert not env.is_dead(env.parse_grid("######\n#_XO_#\n#P___#\n######"))


def test_a_plan_longer_than_the_steps_left_is_none():
    env = sokoban(max_steps=3)
    board = "######\n#PX_O#\n######"
    assert env.shortest_plan(env.parse_grid(board)) == (4, 4)
    assert env.shortest_plan(env.parse_grid(board, num_steps=2)) is None
    assert not env.is_dead(env.parse_grid(board, num_steps=2))


# --- text -------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**9),
    symbols=st.sampled_from([CODES, "W.GCBA@"]),
    cell_format=st.sampled_from(["plain", "spaced"]),
    actions=st.lists(st.integers(1, 4), max_size=10),
)
def test_a_drawn_grid_reads_back(seed, symbols, cell_format, actions):
    env = sokoban(symbols=symbols, cell_format=cell_format, num_boxes=2)
    state = env.reset(seed)
    for action in actions:
        state = env.step(state, action).state
    assert env.parse_grid(env.render(state), num_steps=state.num_steps) == state


def test_spaced_cells():
    env = sokoban(cell_format="spaced")
    lines = env.render(env.parse_grid("#####\n#PXO#\n#####")).split("\n")
    assert lines[1] == " # \t P \t X \t O \t # \t"


def test_coordinates_list_what_the_grid_shows():
    grid = "#######\n#O√_X_#\n#_XS__#\n#######"
    env = sokoban(observation_format="coord")
    size, *lines = env.render(env.parse_grid(grid)).splitlines()
    assert "4 rows x 7 cols" in size and "zero-indexed" in size
    assert lines == [
        "Targets: (1, 1)",
        "Boxes: (1, 4), (2, 2)",
        "Boxes on target: (1, 2)",
        "Player on target: (2, 3)",
    ]
    both = sokoban(observation_format="grid_coord")
    coordinates = env.render(env.parse_grid(grid))
    assert both.render(both.parse_grid(grid)) == f"Coordinates:\n{coordinates}\nGrid Map:\n{grid}"


def test_legend_tells_what_is_shown_and_no_more():
    grid = make(catalogue()["SokobanDifferentGridVocab"]).legend()
    assert "W is wall" in grid and "@ is player on target" in grid and "(row, col)" not in grid and "#" not in grid
    coord = sokoban(observation_format="coord").legend()
    assert "(row, col)" in coord and "wall" not in coord
    both = make(catalogue()["CoordSokoban"]).legend()
    assert "√ is box on target" in both and "(row, col)" in both


def test_task_counts_the_boxes():
    assert "all 3 boxes" in sokoban(num_boxes=3).task()
    assert "the box onto the target" in sokoban().task()


def test_answers_by_name_and_by_number():
    env, older = sokoban(), make(catalogue()["SokobanV1"])
    state = env.reset(0)
    assert [env.parse_action(state, text) for text in ("up", " DOWN ", "Left", "right")] == [1, 2, 3, 4]
    assert [env.parse_action(state, text) for text in ("1", "1 (Up)", "jump", "")] == [None] * 4
    assert [older.parse_action(state, text) for text in ("1", "2 (down)", "LEFT", "4 (Right)")] == [1, 2, 3, 4]
    assert [older.parse_action(state, text) for text in ("1 (Down)", "5", "0", "(Up)")] == [None] * 4


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"render_mode": "rgb_array"}, "'text'"),
        ({"observation_format": "pixels"}, "'grid_coord'"),
        ({"cell_format": "wide"}, "'spaced'"),
        ({"num_boxes": 0}, "num_boxes=0"),
        ({"num_boxes": 15}, "16 inner cells"),
        ({"dim_room": (6, 2)}, "at least 3"),
        ({"dim_x": 6}, "both"),
        ({"num_boxes": 3, "search_depth": 2}, "search_depth=2"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"symbols": "#_O√XP"}, "7 different"),
        ({"symbols": "#_O√XPP"}, "7 different"),
        ({"symbols": "# O√XPS"}, "7 different"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sokoban(**changes)


def test_dim_x_and_dim_y_replace_dim_room():
    state = sokoban(dim_room=(6, 6), dim_x=5, dim_y=8).reset(1)
    assert (state.board.num_rows, state.board.num_cols) == (5, 8)


def test_a_board_too_small_for_any_level_says_so():
    env = sokoban(dim_room=(4, 4))
    with pytest.raises(ValueError, match="too small"):
        env.reset(0)


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ("#####\n#_XO#\n#####", "one player"),
        ("#####\n#PX_#\n#####", "1 boxes for 0 targets"),
        ("#####\n#PXO_\n#####", "border"),
        ("#####\n#PXO?\n#####", "unknown symbol"),
        ("#####\n#PXO#\n####", "equal length"),
    ],
)
def test_impossible_boards_are_refused(board, message):
    with pytest.raises(ValueError, match=message):
        sokoban().parse_grid(board)


def test_tags_are_those_of_the_catalogue():
    tags = Sokoban.TAGS
    assert {name: tag.max_tokens for name, tag in tags.items()} == {
        "SimpleSokoban": 100,
        "LargerSokoban": 100,
        "SokobanDifferentGridVocab": 100,
        "CoordSokoban": 120,
        "SokobanV1": None,
    }
    assert all(tag.max_workers == 32 for tag in tags.values())
    assert {name for name, tag in tags.items() if tag.max_actions_per_traj != 10} == {"SokobanV1"}
    larger = make(tags["LargerSokoban"]).config
    assert (larger.size, larger.num_boxes, larger.search_depth, larger.max_steps) == ((8, 8), 2, 10, 100)
