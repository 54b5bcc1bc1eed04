"""The matrix of the collapse metrics: ours against the naive way, against its floor, and its share of a training run.

    python benchmarks/collapse.py                             # pocket, one step of the Sokoban run, 64 samples
    python benchmarks/collapse.py --steps 0 --threads 1       # without the training run

On a GPU: benchmarks/gpu/collapse.py.

Both samples of a step (first turns, trajectories) are scored. Naive is one sequence for every pair of prompt and
reasoning, packed as the learner packs them and scored with its entropies; it is timed on some columns and scaled by
tokens to all of them. That both give the same numbers is checked first.

The floor is 2 x parameters x (all prompt tokens once + prompts x all reasoning tokens), in seconds: as many tokens
through the model's own matrices and its vocabulary, with attention left out and no logarithm taken. It is given for the
samples as drawn, and for what differs among them, which is what we compute.

Rounds are interleaved and medians are shown. The share of a run is collapse / (collapse + 5 x a training step), for the
default `compute_freq` of 5, from the clock of a real run of `--steps` steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ragen.diagnose.collapse import (
    FIRST_TURN,
    TRAJECTORY,
    Samples,
    first_turns,
    pairs_of,
    thinking_counter,
    trajectory_uniform,
)
from ragen.diagnose.cross_score import cross_log_probs
from ragen.distributed.workers import Workers
from ragen.model.packing import pack
from ragen.model.policy import score
from ragen.model.scoring import CPU_TOKENS, micro_batches
from ragen.types import TokenSequence

MAX_PAIRS = 128  # collapse_detection.micro_batch_size
RUN = ["sokoban", "model_path=pocket", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=-1"]


def played() -> tuple[Any, dict[str, Samples]]:
    """The model, and both samples of one step of its run."""
    from ragen.agent.chat_template import ChatTemplate
    from ragen.config.compose import resolve
    from ragen.engine.native.engine import NativeEngine
    from ragen.model.load import find_model, load_model
    from ragen.rollout.collect import World, collect
    from ragen.train.levels import UniformLevels, slots
    from ragen.train.rollouts import train_sampling

    config = resolve(RUN, environ={}).config
    loaded = load_model(find_model("pocket"), "cpu")
    chat = ChatTemplate(loaded.tokenizer)
    engine = NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id)
    worlds = {tag: World.make(config, tag, chat) for tag in config.es_manager.train.env_configs.tags}
    groups = collect(
        engine, worlds, UniformLevels(config).choose(slots(config, 1)), train_sampling(config), ("benchmark", 0)
    )
    pairs = pairs_of(groups, thinking_counter(loaded.tokenizer))
    return loaded.model, {FIRST_TURN: first_turns(pairs, 64, (0,)), TRAJECTORY: trajectory_uniform(pairs, 64, (0,))}


@torch.no_grad()
def naive(model: Any, prompts: Sequence[Any], reasonings: Sequence[Any], device: torch.device) -> list[list[float]]:
    """Every pair a sequence of its own."""
    sequences = [
        TokenSequence(
            prompt + ids, (False,) * len(prompt) + (True,) * len(ids), (0.0,) * len(prompt + ids), 0, ((0, 0),)
        )
        for ids in reasonings
        for prompt in prompts
    ]
    sums = [0.0] * len(sequences)
    for indices in micro_batches([len(sequence.ids) for sequence in sequences], MAX_PAIRS, device):
        packed = pack([sequences[index] for index in indices], device)
        parts = score(model, packed, 1.0).log_probs.split([sum(sequences[index].sampled) for index in indices])
        for index, part in zip(indices, parts, strict=True):
            sums[index] = part.double().sum().item()
    return [sums[start : start + len(prompts)] for start in range(0, len(sums), len(prompts))]


@torch.no_grad()
def floor(model: Any, num_tokens: int, device: torch.device) -> None:
    """So many tokens through the matrices, in passes of the usual size."""
    chunk = max(1, (1 << 24) // model.shape.vocab_size)
    for start in range(0, num_tokens, CPU_TOKENS):
        ids = torch.arange(min(CPU_TOKENS, num_tokens - start), device=device) % model.shape.vocab_size
        hidden = model.hidden(ids, ids, lambda layer, query, key, value: query)
        for part in hidden.split(chunk):
            model.logits(part)


def num_floor_tokens(prompts: Sequence[Any], reasonings: Sequence[Any]) -> int:
    return sum(map(len, prompts)) + len(prompts) * sum(map(len, reasonings))


def num_pair_tokens(prompts: Sequence[Any], reasonings: Sequence[Any]) -> int:
    return len(reasonings) * sum(map(len, prompts)) + len(prompts) * sum(map(len, reasonings))


def seconds_of(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(label: str, model: Any, samples: Samples, device: torch.device, num_columns: int, rounds: int) -> None:
    prompts, reasonings = samples.prompts, [pair.reasoning for pair in samples.pairs]
    few = prompts[:num_columns]
    drawn = num_floor_tokens(prompts, reasonings)
    distinct = num_floor_tokens(list(dict.fromkeys(prompts)), list(dict.fromkeys(reasonings)))
    workers = Workers(device=device)
    actions = {
        "ours": lambda: cross_log_probs(model, prompts, reasonings, 1.0, MAX_PAIRS, workers),
        "naive": lambda: naive(model, few, reasonings, device),
        "floor": lambda: floor(model, distinct, device),
    }
    ours, theirs = actions["ours"](), actions["naive"]()
    rows = zip(ours, theirs, reasonings, strict=True)
    furthest = max(abs(a - b) / len(ids) for row, other, ids in rows for a, b in zip(row, other, strict=False))
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(seconds_of(action))
    scale = num_pair_tokens(prompts, reasonings) / num_pair_tokens(few, reasonings)
    ratio = statistics.median(scale * b / a for a, b in zip(times["ours"], times["naive"], strict=True))
    above = statistics.median(a / b for a, b in zip(times["ours"], times["floor"], strict=True))
    differing = f"{len(set(reasonings))} x {len(set(prompts))} differ"
    print(f"{label}: {len(reasonings)} reasonings x {len(prompts)} prompts, of which {differing}")
    print(f"  ours {statistics.median(times['ours']):.3f} s; the naive way takes {ratio:.1f} times as long")
    print(f"  {above:.2f} x the floor of what differs, {above * distinct / drawn:.2f} x that of all that was drawn")
    print(f"  log-probs differ by {furthest:.1g} a token at most")


def share_of_a_run(num_steps: int) -> None:
    from ragen.cli import main as ragen

    with tempfile.TemporaryDirectory() as folder:
        words = [*RUN, f"trainer.total_training_steps={num_steps}", "trainer.logger=console"]
        assert ragen(["train", *words, f"trainer.default_local_dir={folder}"]) == 0
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    collapse = statistics.median(row["timing_s/collapse_metrics"] for row in rows if "timing_s/collapse_metrics" in row)
    step = statistics.median(row["timing_s/train_step"] for row in rows)
    share = collapse / (collapse + 5 * step)
    print(f"a run: {collapse:.2f} s each time, beside {step:.2f} s a step: {share:.1%} of its time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=8, help="prompts that the naive way is timed on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of the training run; 0 for none")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, both = played()
    device = torch.device("cpu")
    for label, samples in both.items():
        compare(label, model, samples, device, options.columns, options.rounds)
    if options.steps:
        share_of_a_run(options.steps)


if __name__ == "__main__":
    main()
