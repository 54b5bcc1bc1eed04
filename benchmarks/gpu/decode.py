"""Decode speed of the sampler on one GPU, with the real draw: tokens a second, and the share of the memory roofline.

    python benchmarks/gpu/decode.py                                  # random:Qwen2.5-3B, 128 rows, context 400
    python benchmarks/gpu/decode.py --model random:Qwen2.5-0.5B --rows 128 --profile

Ours: bursts of the engine's graphs from a full cache, as a rollout runs them. The peer: `transformers.generate`,
sampling, with its dynamic and its static cache (its prefill is left out), the faster one counts. The roofline reads
weights and cache once a token at the copy bandwidth that is measured first.
"""

import argparse
import itertools
from functools import partial

import torch
from measuring import copy_bandwidth, machine, middle, seconds, their_model
from torch import Tensor

from ragen.engine.base import Sampling
from ragen.engine.native.eager import Inputs
from ragen.engine.native.graphs import GraphRows
from ragen.engine.native.way import choose_way
from ragen.model.load import find_model, load_model

SAMPLING = Sampling(1.0, 1.0, -1, greedy=False, max_tokens=1 << 30, stop_at_answer=False)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:Qwen2.5-3B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--context", type=int, nargs="+", default=[400])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options = parser.parse_args()

    print(machine())
    loaded = load_model(find_model(options.model))
    model, way = loaded.model, choose_way(loaded.model)
    print(f"{options.model}, bf16, temperature 1; {way.text}; {options.tokens} new tokens in bursts of {way.burst}")
    bandwidth = copy_bandwidth()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    rate = 0.0
    for num_rows, context in itertools.product(options.rows, options.context):
        rows = full_rows(model, way.triton and not options.no_triton, num_rows, context, options.tokens)
        decode = partial(bursts, rows, num_rows, context, options.tokens, way.burst)
        decode()
        took, spread = middle(decode, options.rounds)
        token = rows.slots.num_bytes // (rows.slots.num_rows + 1) // rows.slots.cache.capacity
        read = weights + token * num_rows * (context + options.tokens // 2)
        rate, roofline = num_rows * options.tokens / took, num_rows * bandwidth / read
        told = f"{took / options.tokens * 1e3:.2f} ms a token, {rate / roofline:.0%} of the roofline ({roofline:,.0f})"
        print(f"  {num_rows:>4} rows, context {context:>5}: {rate:>8,.0f} tokens/s, {told}, spread {spread:.0%}")
        if options.profile:
            profile(decode, options.tokens)
        del rows, decode
        torch.cuda.empty_cache()
    if not options.no_peer:
        peer(loaded, options, options.rows[-1] * options.tokens, rate)


def full_rows(model, has_triton: bool, num_rows: int, context: int, num_tokens: int) -> GraphRows:
    rows = GraphRows(model, has_triton)
    rows.begin(SAMPLING)
    rows.add(num_rows)
    rows.reserve(context + num_tokens)
    for part in (*rows.slots.cache.keys, *rows.slots.cache.values):
        part.normal_()
    return rows


def bursts(rows: GraphRows, num_rows: int, context: int, num_tokens: int, burst: int) -> None:
    ids = [5] * num_rows
    for done in range(0, num_tokens, burst):
        inputs = Inputs([context + done] * num_rows, ids, list(range(num_rows)), [done] * num_rows)
        sampled, _ = rows.burst(inputs, burst, no_draw)
        ids = [row[-1] for row in sampled]


def no_draw(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("graphs draw by themselves")


def profile(action, num_tokens: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        action()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.device_time_total)[:16]
    for event in events:
        calls = event.count / num_tokens
        print(
            f"      {event.device_time_total / num_tokens / 1e3:7.3f} ms a token, {calls:6.1f} calls  {event.key[:90]}"
        )


def peer(loaded, options, num_tokens: int, ours: float) -> None:
    """`generate` at the last number of rows and the last context."""
    theirs = their_model(loaded)
    prompts = torch.randint(2, 1000, (options.rows[-1], options.context[-1]), device="cuda")
    settings = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, eos_token_id=None)
    caches = {"dynamic cache": {}, "static cache": {"cache_implementation": "static", "disable_compile": True}}

    def generate(num: int, extra: dict) -> None:
        mask = torch.ones_like(prompts)
        theirs.generate(prompts, attention_mask=mask, min_new_tokens=num, max_new_tokens=num, **settings, **extra)

    best = 0.0
    for name, extra in caches.items():
        generate(2, extra)
        first = min(seconds(partial(generate, 1, extra)) for _ in range(2))
        took = min(seconds(partial(generate, options.tokens + 1, extra)) for _ in range(2)) - first
        best = max(best, num_tokens / took)
        print(f"  peer: generate, {name}: {num_tokens / took:,.0f} tokens/s")
    print(f"  ratio against the best peer: {ours / best:.1f}")


if __name__ == "__main__":
    main()
