"""Environments against their peers: levels and steps, measured in one run on one machine.

    python benchmarks/env.py                   # under a minute; makes benchmarks/.peers/gym-sokoban on the first run
    python benchmarks/env.py --rounds 3 --seed 7

Both sides work in turns, round by round, on one core each, one level at a time, on seeds never used before (a random
first seed, which is printed). The peers are gym-sokoban 0.0.6, in a virtual environment of its own, and Gymnasium's
FrozenLake-v1. Times are wall-clock; a ratio is the median over the rounds of (peer / ours).
"""

import argparse
import json
import random
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import gymnasium  # noqa: E402
from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # noqa: E402

from ragen.env.base import Environment  # noqa: E402
from ragen.env.frozen_lake import FrozenLake  # noqa: E402
from ragen.env.sokoban import Sokoban  # noqa: E402
from ragen.prng import uniform  # noqa: E402

PEER_FOLDER = ROOT / "benchmarks" / ".peers" / "gym-sokoban"
PEER_SCRIPT = ROOT / "benchmarks" / "peers" / "gym_sokoban_peer.py"
PEER_PACKAGES = ["setuptools<70", "wheel", "gym-sokoban==0.0.6"]
PEER_WALK_STEPS = (10, 15, 20, 25)  # SokobanEnv itself uses int(1.7 * (6 + 6)) = 20
ACTIONS_PER_LEVEL = 100


class SokobanPeer:
    """The peer's process: asked one request at a time, idle in between."""

    def __init__(self):
        python = PEER_FOLDER / "bin" / "python"
        if not python.exists():
            print(f"making {PEER_FOLDER.relative_to(ROOT)} with {' '.join(PEER_PACKAGES)} …", flush=True)
            venv.create(PEER_FOLDER, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
        command = [python, PEER_SCRIPT]
        print("peer command:", " ".join(str(part.relative_to(ROOT)) for part in command))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request) -> list:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self.process.wait()} on {request}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def time_each(make_one: Callable[[int], object], seeds: range) -> list[float]:
    """Seconds for each call."""
    seconds = []
    for seed in seeds:
        start = time.perf_counter()
        make_one(seed)
        seconds.append(time.perf_counter() - start)
    return seconds


def steps_per_second(env: Environment, seeds: range) -> float:
    """Random play, every observation rendered; levels are made beforehand."""
    num_steps, seconds = 0, 0.0
    for seed in seeds:
        state = env.reset(seed)
        names = list(env.action_names(state))
        draws = [uniform("benchmark", seed, index) for index in range(ACTIONS_PER_LEVEL)]
        plan = [(names[int(draw * len(names))], draw * len(names) % 1) for draw in draws]
        start = time.perf_counter()
        for action, noise in plan:
            transition = env.step(state, action, noise)
            env.render(transition.state)
            state = transition.state
            num_steps += 1
            if transition.done:
                break
        seconds += time.perf_counter() - start
    return num_steps / seconds


def gymnasium_steps_per_second(env: gymnasium.Env, seeds: range, render: bool) -> float:
    """Random play in Gymnasium's FrozenLake; resets are not counted."""
    num_steps, seconds = 0, 0.0
    for seed in seeds:
        env.reset(seed=seed)
        actions = [random.Random(f"{seed} {index}").randrange(4) for index in range(ACTIONS_PER_LEVEL)]
        start = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if render:
                env.render()
            num_steps += 1
            if terminated or truncated:
                break
        seconds += time.perf_counter() - start
    return num_steps / seconds


def show_ratio(title: str, ours: list[float], peers: dict[str, list[float]], unit: str, faster_is_less: bool) -> None:
    """One table: our median over the rounds, each peer's, and the median of the ratios."""
    print(f"\n{title}")
    print(f"  {'ours':<58} {median(ours):>12,.1f} {unit}")
    for name, theirs in peers.items():
        pairs = zip(theirs, ours, strict=True)
        ratios = [their / our if faster_is_less else our / their for their, our in pairs]
        print(f"  {name:<58} {median(theirs):>12,.1f} {unit}   ours is {median(ratios):,.1f} times faster")


def bench_sokoban_levels(peer: SokobanPeer, first_seed: int, rounds: int) -> None:
    env = Sokoban(Sokoban.Config(num_boxes=1, search_depth=30))
    env.reset(first_seed - 1)  # builds the tables of the board size
    walk_names = {steps: f"peer: generate_room, num_steps={steps}" for steps in PEER_WALK_STEPS}
    ours, ours_mean = [], []
    theirs = {name: [] for name in (*walk_names.values(), "peer: SokobanEnv.reset, tiny_rgb_array")}
    theirs_mean = {name: [] for name in theirs}
    lengths: Counter[int] = Counter()
    for round_index in range(rounds):
        seeds = range(first_seed + 1000 * round_index, first_seed + 1000 * round_index + 1000)
        seconds = time_each(env.reset, seeds)
        ours.append(median(seconds) * 1e6)
        ours_mean.append(mean(seconds) * 1e6)
        lengths.update(len(env.shortest_plan(env.reset(seed))) for seed in seeds)
        for steps, name in walk_names.items():
            seconds = peer.ask(task="room", seed=seeds[0] + steps, number=100, num_steps=steps)
            theirs[name].append(median(seconds) * 1e6)
            theirs_mean[name].append(mean(seconds) * 1e6)
        seconds = peer.ask(task="reset", seed=seeds[0], number=50)
        theirs["peer: SokobanEnv.reset, tiny_rgb_array"].append(median(seconds) * 1e6)
        theirs_mean["peer: SokobanEnv.reset, tiny_rgb_array"].append(mean(seconds) * 1e6)
    show_ratio("Sokoban levels, 6x6, one box: median time for one", ours, theirs, "us", faster_is_less=True)
    show_ratio("the same, mean time for one", ours_mean, theirs_mean, "us", faster_is_less=True)
    total = sum(lengths.values())
    shares = ", ".join(f"{length}: {lengths[length] / total:.1%}" for length in sorted(lengths))
    print(f"  our optimal lengths over {total} levels: {shares}")
    print(f"  mean {sum(length * number for length, number in lengths.items()) / total:.2f}")


def bench_sokoban_steps(peer: SokobanPeer, first_seed: int, rounds: int) -> None:
    env = Sokoban(Sokoban.Config(num_boxes=1, observation_format="grid_coord"))
    ours, theirs = [], []
    for round_index in range(rounds):
        start = first_seed + 1000 * round_index
        ours.append(steps_per_second(env, range(start, start + 300)))
        steps, seconds = peer.ask(task="step", seed=start, number=20, actions=ACTIONS_PER_LEVEL)
        theirs.append(steps / seconds)
    peers = {"peer: SokobanEnv.step, tiny_rgb_array": theirs}
    show_ratio("Sokoban steps with rendered text (grid and coordinates)", ours, peers, "steps/s", faster_is_less=False)


def bench_frozen_lake(first_seed: int, rounds: int) -> None:
    env = FrozenLake(FrozenLake.Config(observation_format="grid_coord"))
    bare = gymnasium.make("FrozenLake-v1", is_slippery=True).unwrapped
    drawn = gymnasium.make("FrozenLake-v1", is_slippery=True, render_mode="ansi").unwrapped
    maps, their_maps, steps = [], [], []
    their_steps = {"peer: FrozenLake-v1 step, no text": [], "peer: FrozenLake-v1 step and ansi text": []}
    for round_index in range(rounds):
        start = first_seed + 1000 * round_index
        seeds = range(start, start + 500)
        maps.append(median(time_each(env.reset, seeds)) * 1e6)
        their_maps.append(median(time_each(lambda seed: generate_random_map(size=4, p=0.9, seed=seed), seeds)) * 1e6)
        steps.append(steps_per_second(env, seeds))
        their_steps["peer: FrozenLake-v1 step, no text"].append(gymnasium_steps_per_second(bare, seeds, render=False))
        their_steps["peer: FrozenLake-v1 step and ansi text"].append(
            gymnasium_steps_per_second(drawn, seeds[:50], render=True)
        )
    peers = {"peer: generate_random_map(size=4, p=0.9)": their_maps}
    show_ratio("FrozenLake maps, 4x4: median time for one", maps, peers, "us", faster_is_less=True)
    title = "FrozenLake steps, ours with rendered text (grid and coordinates)"
    show_ratio(title, steps, their_steps, "steps/s", faster_is_less=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--seed", type=int, help="first seed (default: a random one)")
    arguments = parser.parse_args()
    first_seed = random.SystemRandom().randrange(10**6, 10**9) if arguments.seed is None else arguments.seed
    print(f"python {sys.version.split()[0]}, gymnasium {gymnasium.__version__}, first seed {first_seed}")
    peer = SokobanPeer()
    try:
        bench_sokoban_levels(peer, first_seed, arguments.rounds)
        bench_sokoban_steps(peer, first_seed, arguments.rounds)
    finally:
        peer.close()
    bench_frozen_lake(first_seed, arguments.rounds)


if __name__ == "__main__":
    main()
