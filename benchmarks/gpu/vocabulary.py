"""The learner's head: log-probs and entropies over the vocabulary, forward and backward, at the size of Qwen2.5-3B.

    python benchmarks/gpu/vocabulary.py                # needs a CUDA device; half a minute

Ours, with several sizes of chunks, against checkpointed chunks of `1 << 24` logits (the path of other devices) and
against cross-entropy over all logits at once, which has no entropy. Prints times, ratios, the share of the measured
speed of matrix products that the four products have to take, peak memory, and the relative error of the gradients
against float64.
"""

import argparse
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from measuring import DEVICE, machine, matrix_rate, milliseconds, relative
from torch.utils.checkpoint import checkpoint

from ragen.model.policy import MAX_CHUNK_LOGITS, _score_rows
from ragen.model.vocabulary import token_scores


def checkpointed(hidden, weight, targets, temperature):
    model = SimpleNamespace(logits=lambda rows: F.linear(rows, weight))
    size = max(1, MAX_CHUNK_LOGITS // weight.shape[0])
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    parts = [checkpoint(_score_rows, model, *pair, temperature, None, None, use_reentrant=False)[:2] for pair in pairs]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def cross_entropy(hidden, weight, targets, temperature):
    return (-F.cross_entropy(F.linear(hidden, weight) / temperature, targets, reduction="none"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    num_rows, vocab, size = options.rows, options.vocabulary, options.hidden
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, size, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(vocab, size, device=DEVICE).mul_(0.04).bfloat16().requires_grad_()
    targets, outer = torch.randint(vocab, (num_rows,), device=DEVICE), torch.randn(2, num_rows, device=DEVICE)
    outer /= num_rows
    rate = matrix_rate()
    floor = 4 * 2 * num_rows * vocab * size / rate * 1e3
    print(f"{machine()}; {num_rows} rows, {vocab} words, hidden size {size}, bf16")
    print(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s: four products take {floor:.1f} ms")

    def both_ways(compute):
        def run():
            hidden.grad = weight.grad = None
            parts = compute(hidden, weight, targets, 0.9)
            torch.autograd.backward(parts, tuple(outer[: len(parts)]))
            return parts

        return run

    ways = {
        f"ours, chunks of {rows} rows": both_ways(lambda *given, rows=rows: token_scores(*given, rows * vocab))
        for rows in (1024, 2048, 3533, 8192)
    }
    ways["checkpointed chunks of 110 rows"] = both_ways(checkpointed)
    ways["cross-entropy at once, no entropy"] = both_ways(cross_entropy)
    print(f"{'':36} {'ms':>8} {'of products':>12} {'peak GB':>8}")
    times = {}
    for name, run in ways.items():
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        times[name] = milliseconds(run, rounds=3, warm_up=1)
        peak = (torch.cuda.max_memory_allocated() - held) / 1e9
        print(f"{name:36} {times[name]:8.1f} {floor / times[name]:12.0%} {peak:8.1f}", flush=True)
    best = min(time for name, time in times.items() if name.startswith("ours"))
    for name in ("checkpointed chunks of 110 rows", "cross-entropy at once, no entropy"):
        print(f"{name}: {times[name] / best:.2f} of ours")
    with torch.no_grad():
        only = milliseconds(lambda: token_scores(hidden, weight, targets, 0.9), rounds=3)
    print(f"ours, forward only: {only:.1f} ms, one product takes {floor / 4:.1f}")
    errors(size)


def errors(size: int) -> None:
    """Against float64, on a smaller vocabulary."""
    torch.manual_seed(1)
    vocab, num_rows = 20_000, 1000
    hidden, weight = torch.randn(num_rows, size, device=DEVICE), torch.randn(vocab, size, device=DEVICE) * 0.04
    targets, outer = torch.randint(vocab, (num_rows,), device=DEVICE), torch.randn(2, num_rows, device=DEVICE)
    print("relative error against float64: log-probs, entropies, gradient of hidden states, of the weight")
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [part.to(dtype) for part in (hidden, weight)]
        found = {}
        for name, kind, compute in (
            ("float64", torch.float64, checkpointed_exactly),
            ("ours", dtype, lambda *given: token_scores(*given, 300 * vocab)),
            ("checkpointed", dtype, checkpointed),
        ):
            given = [part.to(kind, copy=True).requires_grad_() for part in rounded]
            parts = compute(*given, targets, 0.9)
            torch.autograd.backward(parts, tuple(row.to(part) for row, part in zip(outer, parts, strict=True)))
            found[name] = [*(part.detach() for part in parts), *(part.grad for part in given)]
        for name in ("ours", "checkpointed"):
            listed = [f"{relative(*pair):.1e}" for pair in zip(found[name], found["float64"], strict=True)]
            print(f"  {dtype!s:16} {name:14} {'  '.join(listed)}")


def checkpointed_exactly(hidden, weight, targets, temperature):
    log_probs = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


if __name__ == "__main__":
    main()
