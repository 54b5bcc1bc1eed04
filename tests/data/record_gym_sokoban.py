"""Record how gym-sokoban 0.0.6 plays, so that `tests/env/test_sokoban.py` can compare our rules with it.

Run it in an environment of its own (its dependencies are old), from the repository's root:

    python -m venv /tmp/gym-sokoban && /tmp/gym-sokoban/bin/pip install "setuptools<70" gym-sokoban==0.0.6
    /tmp/gym-sokoban/bin/python tests/data/record_gym_sokoban.py tests/data/gym_sokoban_traces.json.gz

Each episode is random play. A board is written as a string of cell codes, row by row: 0 wall, 1 floor, 2 target, 3 box
on target, 4 box, 5 player, 6 player on target. A step is [action, board, reward, done].
"""

import gzip
import json
import random
import sys
import warnings

import numpy

warnings.filterwarnings("ignore")

from gym_sokoban.envs.sokoban_env import SokobanEnv  # noqa: E402

SETTINGS = [((6, 6), 1), ((6, 6), 2), ((7, 7), 1), ((7, 7), 2), ((8, 8), 2), ((8, 8), 3), ((6, 8), 3)]
EPISODES_PER_SETTING = 36
MAX_STEPS = 60


def board_codes(env):
    codes = env.room_state.copy()
    codes[(env.room_state == 5) & (env.room_fixed == 2)] = 6
    return "".join(str(int(code)) for code in codes.flatten())


def make_room(size, num_boxes):
    while True:
        try:
            return SokobanEnv(dim_room=size, num_boxes=num_boxes, max_steps=MAX_STEPS)
        except (RuntimeError, RuntimeWarning):  # its generator gives up on some rooms
            continue


def play(env, size):
    episode = {"size": size, "max_steps": MAX_STEPS, "start": board_codes(env), "steps": []}
    while True:
        action = random.randint(1, 4)
        _, reward, done, _ = env.step(action, observation_mode="tiny_rgb_array")
        episode["steps"].append([action, board_codes(env), round(float(reward), 6), bool(done)])
        if done:
            return episode


def main(path):
    random.seed(2024)
    numpy.random.seed(2024)
    episodes = [
        play(make_room(size, num_boxes), size) for size, num_boxes in SETTINGS for _ in range(EPISODES_PER_SETTING)
    ]
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write(json.dumps(episodes, separators=(",", ":")).encode())
    num_steps = sum(len(episode["steps"]) for episode in episodes)
    wins = sum(episode["steps"][-1][2] > 5 for episode in episodes)
    print(f"{len(episodes)} episodes, {num_steps} steps, {wins} won")


main(sys.argv[1])
