"""FrozenLake against Gymnasium's FrozenLake-v1, and its own maps and texts."""

from collections import deque
from itertools import product

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.env.frozen_lake import FrozenLake
from ragen.env.registry import catalogue, make

LEFT, DOWN, RIGHT, UP = 1, 2, 3, 4


def frozen_lake(**changes) -> FrozenLake:
    return FrozenLake(FrozenLake.Config(**changes))


def gymnasium_lake(env: FrozenLake, seed: int, **settings):
    """Gymnasium's environment on our map of a seed, and our starting state."""
    state = env.reset(seed)
    drawn = env.render(state).replace("P", "S").replace("_", "F").replace("O", "H")
    return gymnasium.make("FrozenLake-v1", desc=drawn.splitlines(), **settings).unwrapped, state


@pytest.mark.parametrize("success_rate", [1.0, 0.8, 1 / 3, 0.1, 0.0])
@pytest.mark.parametrize("is_slippery", [True, False])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_transition_chances_are_those_of_gymnasium(success_rate, is_slippery, size):
    env = frozen_lake(size=size, p=0.8, success_rate=success_rate, is_slippery=is_slippery)
    theirs, start = gymnasium_lake(env, seed=3, is_slippery=is_slippery, success_rate=success_rate)
    for cell, action in product(range(size * size), range(4)):
        if cell == start.lake.goal or start.lake.holes >> cell & 1:
            continue  # the game is over there
        state = start._replace(player=cell)
        ours, expected = {}, {}
        for chance, noise in env.chances(state, action + 1):
            after = env.step(state, action + 1, noise)
            key = (after.state.player, after.reward, after.done)
            ours[key] = ours.get(key, 0.0) + chance
        for chance, after, reward, done in theirs.P[cell][action]:
            if chance > 0:
                key = (int(after), float(reward), bool(done))
                expected[key] = expected.get(key, 0.0) + chance
        assert ours == pytest.approx(expected)


def test_thousands_of_steps_agree_with_gymnasium():
    env = frozen_lake(is_slippery=False, p=0.8)
    num_steps = 0
    for seed in range(400):
        theirs, state = gymnasium_lake(env, seed, is_slippery=False)
        theirs.reset(seed=seed)
        theirs.action_space.seed(seed)
        for _ in range(40):
            action = int(theirs.action_space.sample())
            cell, reward, terminated, *_ = theirs.step(action)
            after = env.step(state, action + 1)
            assert (after.state.player, after.reward, after.done) == (int(cell), float(reward), bool(terminated))
            assert after.effective == (after.state.player != state.player)
            num_steps += 1
            if after.done:
                break
            state = after.state
    assert num_steps > 3000


def test_noise_decides_where_a_slip_goes():
    env = frozen_lake(success_rate=0.8)
    state = env.parse_grid("___\n_P_\n__G")
    after = [env.step(state, RIGHT, noise).state.player for noise in (0.0, 0.79, 0.81, 0.89, 0.91, 0.999)]
    assert after == [5, 5, 7, 7, 1, 1]


def test_goal_is_success_and_a_hole_is_only_the_end():
    env = frozen_lake(success_rate=1.0)
    state = env.parse_grid("PG\nO_")
    goal, hole = env.step(state, RIGHT), env.step(state, DOWN)
    assert (goal.reward, goal.done, goal.success) == (1.0, True, True)
    assert (hole.reward, hole.done, hole.success) == (0.0, True, False)
    assert env.render(goal.state) == "_√\nO_"
    assert env.render(hole.state) == "_G\nX_"
    border = env.step(state, UP)
    assert border.state == state and not border.effective


def test_unknown_action_is_refused():
    env = frozen_lake()
    with pytest.raises(ValueError, match="0"):
        env.step(env.reset(0), 0)


def reachable(drawn: str) -> bool:
    """Whether the goal can be reached; written without our code."""
    cells = {(r, c): ch for r, line in enumerate(drawn.splitlines()) for c, ch in enumerate(line)}
    start = next(cell for cell, ch in cells.items() if ch == "P")
    queue, seen = deque([start]), {start}
    while queue:
        row, col = queue.popleft()
        for cell in ((row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)):
            if cells.get(cell) == "G":
                return True
            if cells.get(cell) == "_" and cell not in seen:
                seen.add(cell)
                queue.append(cell)
    return False


@given(seed=st.integers(0, 10**9), size=st.integers(2, 9), p=st.floats(0.5, 1.0))
def test_every_goal_can_be_reached(seed, size, p):
    env = frozen_lake(size=size, p=p)
    drawn = env.render(env.reset(seed, "val"))
    assert drawn.count("P") == drawn.count("G") == 1
    assert [len(line) for line in drawn.splitlines()] == [size] * size
    assert reachable(drawn)


def test_maps_have_the_tiles_that_p_promises():
    env = frozen_lake(size=8, p=0.9)
    holes = sum(env.reset(seed).lake.holes.bit_count() for seed in range(300))
    assert 0.07 < holes / (300 * 62) < 0.105  # a little under 0.1, since maps without a way are dropped
    assert all(frozen_lake(p=1.0).reset(seed).lake.holes == 0 for seed in range(20))


def test_map_seed_fixes_the_map_of_every_level():
    env = frozen_lake(map_seed=5)
    assert len({env.reset(seed, split) for seed in range(10) for split in ("train", "val")}) == 1
    assert frozen_lake(map_seed=6).reset(0) != env.reset(0)


@given(seed=st.integers(0, 10**9), cell_format=st.sampled_from(["plain", "spaced"]))
def test_a_drawn_grid_reads_back(seed, cell_format):
    env = frozen_lake(cell_format=cell_format)
    state = env.reset(seed)
    assert env.parse_grid(env.render(state)) == state


def test_coordinates_list_what_the_grid_shows():
    env = frozen_lake(observation_format="coord", success_rate=1.0)
    state = env.parse_grid("P_O\n_O_\n__G")
    size, *lines = env.render(env.step(state, DOWN).state).splitlines()
    assert "3 rows x 3 cols" in size and "zero-indexed" in size
    assert lines == ["Start: (0, 0)", "Goal: (2, 2)", "Player: (1, 0)", "Holes: (0, 2), (1, 1)"]
    in_hole = env.step(env.step(state, RIGHT).state, DOWN).state
    assert "Player in hole: (1, 1)" in env.render(in_hole)
    both = frozen_lake(observation_format="grid_coord").render(state)
    assert both == f"Coordinates:\n{env.render(state)}\nGrid Map:\nP_O\n_O_\n__G"


def test_the_task_speaks_of_slipping_only_where_it_happens():
    assert "slippery" in frozen_lake().task() and "80%" in frozen_lake().task()
    assert "slippery" not in frozen_lake(success_rate=1.0).task()
    assert "slippery" not in frozen_lake(is_slippery=False).task()
    assert "5 by 5" in frozen_lake(size=5).task()


def test_answers_by_name_and_by_number():
    env, older = frozen_lake(), make(catalogue()["FrozenLakeV1"])
    state = env.reset(0)
    assert [env.parse_action(state, text) for text in ("LEFT", "down", " Right", "Up")] == [1, 2, 3, 4]
    assert env.parse_action(state, "1") is None
    assert [older.parse_action(state, text) for text in ("1", "2 (Down)", "right", "4 (down)")] == [1, 2, 3, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"render_mode": "rgb_array"}, "'text'"),
        ({"observation_format": "x"}, "'coord'"),
        ({"size": 1}, "size=1"),
        ({"p": 0.0}, "p=0.0"),
        ({"p": 1.2}, "p=1.2"),
        ({"success_rate": 1.5}, "success_rate=1.5"),
        ({"success_rate": -0.1}, "success_rate=-0.1"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        frozen_lake(**changes)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [("P_\n_", "equal length"), ("P_G", "square"), ("P_\n__", "goal"), ("P?\n_G", "unknown symbol")],
)
def test_impossible_lakes_are_refused(drawn, message):
    with pytest.raises(ValueError, match=message):
        frozen_lake().parse_grid(drawn)


def test_tags_are_those_of_the_catalogue():
    tags = FrozenLake.TAGS
    assert {name: tag.max_tokens for name, tag in tags.items()} == {
        "FrozenLake": 100,
        "CoordFrozenLake": 120,
        "FrozenLakeV1": None,
    }
    assert make(tags["FrozenLake"]).config == FrozenLake.Config()
    assert make(tags["CoordFrozenLake"]).config.observation_format == "grid_coord"
    older = make(tags["FrozenLakeV1"]).config
    assert (older.size, older.p, older.success_rate, older.is_slippery) == (4, 0.8, 1 / 3, True)
