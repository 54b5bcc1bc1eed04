"""The schedule of a multi-turn rollout without a GPU: which graphs run how often, and what the host does in between.

    python benchmarks/gpu/schedule.py                  # equal and ragged replies, as benchmarks/gpu/rollout.py has them
    python benchmarks/gpu/schedule.py --burst 4 16     # other numbers of tokens between two looks

The engine runs over a device that computes nothing and notes its calls. The schedule depends on token counts alone, so
it is the GPU's. Seconds are by a cost model of the 3B shape on an H200 (results/decode.txt, results/rollout.txt): a
step costs 2.7 ms and 7.2 µs a row; a prefill 1.5 ms and 11 µs a token. `host` is this machine's Python, which a GPU
waits for.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from conversations import NO_SUCH_TOKEN, EveryToken, Scripted

sys.path.append(str(Path(__file__).parents[2] / "src"))

from ragen.engine.base import Sampling
from ragen.engine.forced_length import ForcedLength
from ragen.engine.native.engine import NativeEngine
from ragen.engine.native.slot_memory import rounded

STEP, ROW = 2.7e-3, 7.2e-6  # seconds of a decoded token, and of a row in it
FILL, TOKEN = 1.5e-3, 11e-6  # seconds of a prefill, and of a token in it
VOCAB = 1000


class Noted:
    """Rows that compute nothing."""

    def __init__(self):
        self.bursts: Counter[tuple[int, int]] = Counter()  # rows of the graph, tokens
        self.fills: list[int] = []

    def add(self, count): ...
    def keep(self, rows): ...
    def reserve(self, num_tokens): ...
    def copy(self, source, targets, num_tokens): ...

    def fill(self, rows, starts, ids):
        self.fills.append(sum(map(len, ids)))

    def burst(self, inputs, num_tokens, draw):
        count = len(inputs.lengths)
        self.bursts[rounded(count), num_tokens] += 1
        return [[2] * num_tokens] * count, [[0.0] * num_tokens] * count


def prompts_of(options: argparse.Namespace) -> list[list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 600, (count,), generator=generator).tolist())

    system = some(380)
    return [[system + some(163), *(some(155) for _ in range(options.turns - 1))] for _ in range(options.groups)]


def play(options: argparse.Namespace, burst: int, is_ragged: bool, seed: int) -> tuple[float, str]:
    """Seconds by the model, and the schedule in words."""
    model = SimpleNamespace(
        parameters=lambda: iter([torch.zeros(1)]), shape=SimpleNamespace(vocab_size=VOCAB), is_cacheable=True
    )
    engine = NativeEngine(model, EveryToken(VOCAB), NO_SUCH_TOKEN, burst=burst)
    noted = Noted()
    engine.lend_rows = lambda run: noted
    rows = [
        Scripted(group, (seed << 20) + 1000 * index + member)
        for index, group in enumerate(prompts_of(options))
        for member in range(options.size)
    ]
    sampling = Sampling(1.0, 1.0, -1, False, 1 << 30, False, ForcedLength(options.reply, is_ragged))
    started = time.perf_counter()
    engine.run(rows, sampling)
    host = time.perf_counter() - started
    num_steps = sum(times * tokens for (_, tokens), times in noted.bursts.items())
    decode = sum(times * tokens * (STEP + ROW * rows) for (rows, tokens), times in noted.bursts.items())
    fill = sum(FILL + TOKEN * tokens for tokens in noted.fills)
    longest = max(sum(len(reply.ids) for reply in row.replies) for row in rows)
    by_rows = ", ".join(f"{rows}: {sum(n * t for (r, t), n in noted.bursts.items() if r == rows)}"
                        for rows in sorted({rows for rows, _ in noted.bursts}, reverse=True))  # fmt: skip
    told = f"{num_steps} steps (longest episode {longest} tokens), decode {decode:.2f} s, {len(noted.fills)} prefills "
    told += f"{fill:.2f} s, host {host:.2f} s; steps by rows {by_rows}"
    return decode + fill, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    for burst in options.burst:
        totals = {}
        for is_ragged in (False, True):
            name = "ragged" if is_ragged else "equal"
            for seed in range(options.rounds):
                modelled, told = play(options, burst, is_ragged, seed)
                totals[name] = totals.get(name, 0.0) + modelled / options.rounds
                print(f"bursts of {burst}, {name}: {modelled:.2f} s by the model; {told}", flush=True)
        print(f"bursts of {burst}: ragged at {totals['equal'] / totals['ragged']:.0%} of equal, without the host")


if __name__ == "__main__":
    main()
