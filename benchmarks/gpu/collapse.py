"""The matrix of the collapse metrics on one GPU: ours, the naive way, and the floor that no implementation is below.

    python benchmarks/gpu/collapse.py                              # the shape of Qwen2.5-0.5B, both samples of a step
    python benchmarks/gpu/collapse.py --against ../older-checkout  # the same with other code, in its own process
    python benchmarks/gpu/collapse.py --shape tiny                 # to try it on a CPU

64 reasonings of 50 to 150 tokens after 8 prompts (first turns) and after 64 (trajectories), prompts of 600 to 1,400.
The floor is every prompt once and every reasoning after every prompt through the model's matrices, and the head for the
tokens that are scored: no attention, no logarithm, passes of 16,384 tokens. `with attention` adds the attention that is
needed, by torch's own kernel. Naive is one packed sequence for every pair, as a learner scores them, timed on a few
prompts and scaled by tokens. Exits with status 1 if ours and naive differ.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from measuring import DEVICE, SHAPES, in_each_checkout, machine, milliseconds, random_decoder

from ragen.diagnose.cross_score import CrossAttend, cross_log_probs
from ragen.distributed.workers import Workers
from ragen.model.packing import pack
from ragen.model.policy import score
from ragen.types import TokenSequence

MAX_PAIRS = 128  # collapse_detection.micro_batch_size
PASS_TOKENS = 16384
TOLERANCE = 0.02  # of a log-prob a token, in bf16
Ids = tuple[int, ...]


def made_up(num_prompts: int, is_tiny: bool, vocab_size: int) -> tuple[list[Ids], list[Ids]]:
    generator = torch.Generator().manual_seed(num_prompts)

    def ids(low: int, high: int) -> Ids:
        length = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist())

    scale = 20 if is_tiny else 1
    prompts = [ids(600 // scale, 1400 // scale) for _ in range(num_prompts)]
    return prompts, [ids(50 // scale + 1, 150 // scale) for _ in range(64 // scale)]


@torch.no_grad()
def naive(model, prompts: list[Ids], reasonings: list[Ids]) -> list[list[float]]:
    """Every pair a sequence of its own; a row of the result for each reasoning."""
    found = []
    for ids in reasonings:
        sequences = []
        for prompt in prompts:
            sampled = (False,) * len(prompt) + (True,) * len(ids)
            sequences.append(TokenSequence(prompt + ids, sampled, (0.0,) * len(sampled), 0, ((0, 0),)))
        parts = score(model, pack(sequences, DEVICE), 1.0).log_probs.view(len(prompts), len(ids))
        found.append(parts.double().sum(dim=1).tolist())
    return found


@torch.no_grad()
def floor(model, num_prompt_tokens: int, num_scored: int, attend=lambda layer, query, key, value: query) -> None:
    """As many tokens through the matrices; the head where tokens are scored."""
    share = num_scored / (num_scored + num_prompt_tokens)
    for start in range(0, num_prompt_tokens + num_scored, PASS_TOKENS):
        count = min(PASS_TOKENS, num_prompt_tokens + num_scored - start)
        ids = torch.arange(count, device=DEVICE) % model.shape.vocab_size
        hidden = model.hidden(ids, ids, attend, torch.arange(int(share * count), device=DEVICE))
        for part in hidden.split(4096):
            model.logits(part)


@torch.no_grad()
def attention(model, prompts: list[Ids], reasonings: list[Ids]) -> None:
    """All attention of the passes that ours makes, without the rest of the model."""
    shape = model.shape
    kind = next(model.parameters()).dtype
    num_together = max(1, MAX_PAIRS // len(reasonings))
    for start in range(0, len(prompts), num_together):
        lengths = [len(prompt) for prompt in prompts[start : start + num_together]]
        attend = CrossAttend({}, lengths, [len(ids) - 1 for ids in reasonings], DEVICE)
        query, key, value = (
            torch.empty(len(attend.positions), heads, shape.head_dim, device=DEVICE, dtype=kind)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        for layer in range(shape.num_layers):
            attend(layer, query, key, value)


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    is_tiny = options.shape == "tiny"
    model = random_decoder(SHAPES[options.shape], torch.float32 if is_tiny else torch.bfloat16)
    workers, results = Workers(device=DEVICE), []
    for num_prompts in (8, 64):
        prompts, reasonings = made_up(num_prompts, is_tiny, model.shape.vocab_size)
        few = prompts[: options.columns]
        ours = cross_log_probs(model, prompts, reasonings, 1.0, MAX_PAIRS, workers)
        rows = zip(ours, naive(model, few, reasonings), reasonings, strict=True)
        furthest = max(abs(a - b) / len(ids) for row, other, ids in rows for a, b in zip(row, other, strict=False))
        num_prompt_tokens = sum(map(len, prompts))
        num_scored = num_prompts * sum(map(len, reasonings))
        pair_tokens = [len(reasonings) * sum(map(len, part)) + num_scored * len(part) / num_prompts
                       for part in (prompts, few)]  # fmt: skip
        actions = {
            "ours": lambda p=prompts, r=reasonings: cross_log_probs(model, p, r, 1.0, MAX_PAIRS, workers),
            "naive": lambda p=few, r=reasonings: naive(model, p, r),
            "floor": lambda n=num_prompt_tokens, s=num_scored: floor(model, n, s),
            "attention": lambda p=prompts, r=reasonings: attention(model, p, r),
        }
        found = {name: milliseconds(action, options.rounds, warm_up=1) for name, action in actions.items()}
        found["naive"] *= pair_tokens[0] / pair_tokens[1]
        results.append(found | {"prompts": num_prompts, "reasonings": len(reasonings), "furthest": furthest})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--columns", type=int, default=4, help="prompts that the naive way is timed on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, measured first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options)))
        return
    print(f"{machine()}; {options.shape}", flush=True)
    furthest = 0.0
    for name, measured in in_each_checkout(options.against):
        for found in measured:
            furthest = max(furthest, found["furthest"])
            ours, least = found["ours"], found["floor"]
            print(f"{name:8} {found['reasonings']} x {found['prompts']:2} prompts: ours {ours:7.1f} ms", end="")
            print(f" = {ours / least:.2f} x the floor ({least:.1f} ms), ", end="")
            print(f"{ours / (least + found['attention']):.2f} x the floor with attention; ", end="")
            print(f"the naive way {found['naive'] / ours:.1f} x ours; ", end="")
            print(f"log-probs differ by at most {found['furthest']:.1g} a token", flush=True)
    sys.exit("ours and the naive way differ" if furthest > TOLERANCE else 0)


if __name__ == "__main__":
    main()
