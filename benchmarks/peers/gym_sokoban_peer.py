"""The gym-sokoban side of `benchmarks/env.py`; it runs in an environment of its own and imports nothing of ours.

It reads one request a line from stdin and answers one line of JSON. So it can be asked in turns with our side:

    {"task": "room", "seed": 7, "number": 100, "num_steps": 20}   -> seconds for each room
    {"task": "reset", "seed": 7, "number": 100}                   -> seconds for each reset
    {"task": "step", "seed": 7, "number": 20, "actions": 100}     -> [steps, seconds]
"""

import contextlib
import io
import json
import random
import sys
import time
import warnings

import numpy

warnings.filterwarnings("ignore")
with contextlib.redirect_stderr(io.StringIO()):
    from gym_sokoban.envs.room_utils import generate_room
    from gym_sokoban.envs.sokoban_env import SokobanEnv

SIZE = (6, 6)
NUM_BOXES = 1


def time_room(num_steps):
    """Seconds until its generator has made one room; a room that it gives up on is tried again, as its reset does."""
    start = time.perf_counter()
    while True:
        try:
            generate_room(dim=SIZE, num_steps=num_steps, num_boxes=NUM_BOXES)
            return time.perf_counter() - start
        except (RuntimeError, RuntimeWarning):
            continue


def time_reset(env):
    start = time.perf_counter()
    env.reset(render_mode="tiny_rgb_array")
    return time.perf_counter() - start


def time_steps(env, number, num_actions):
    """Random play with its smallest rendering; resets are not counted."""
    steps, seconds = 0, 0.0
    for _ in range(number):
        env.reset(render_mode="tiny_rgb_array")
        actions = [random.randint(1, 4) for _ in range(num_actions)]
        start = time.perf_counter()
        for action in actions:
            _, _, done, _ = env.step(action, observation_mode="tiny_rgb_array")
            steps += 1
            if done:
                break
        seconds += time.perf_counter() - start
    return [steps, seconds]


def answer(request, env):
    random.seed(request["seed"])
    numpy.random.seed(request["seed"] % 2**32)
    if request["task"] == "room":
        return [time_room(request["num_steps"]) for _ in range(request["number"])]
    if request["task"] == "reset":
        return [time_reset(env) for _ in range(request["number"])]
    return time_steps(env, request["number"], request["actions"])


def main():
    with contextlib.redirect_stdout(io.StringIO()):  # it prints when it gives up on a room
        env = SokobanEnv(dim_room=SIZE, num_boxes=NUM_BOXES, max_steps=100)
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            result = answer(json.loads(line), env)
        print(json.dumps(result), flush=True)


main()
