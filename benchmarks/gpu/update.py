"""One optimizer step of the actor on one GPU, at the shape of Qwen2.5-3B with random weights.

    python benchmarks/gpu/update.py                                # needs a CUDA device; a minute
    python benchmarks/gpu/update.py --against ../older-checkout    # the same with other code, each in its own process
    python benchmarks/gpu/update.py --shape 0.5B --episodes 128

The work is `ragen.train.update.update_actor` with the PPO loss: 32 episodes of 1,500 tokens, 500 of them sampled, in
micro-batches of about 8,192 tokens. Useful FLOPs are 6 per weight and token of what the loss depends on (the last
layer's output and the head only for sampled tokens), and those of causal attention; recomputing counts for nothing.
MFU is against the vendor's peak of 989 TFLOP/s. Prints milliseconds, MFU, peak memory, and the optimizer's share.
"""

import argparse
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import DEVICE, PEAK, SHAPES, in_each_checkout, machine, matrix_rate, milliseconds, random_decoder

from ragen.config.compose import resolve
from ragen.distributed.workers import Workers
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import Targets, update_actor
from ragen.types import TokenSequence


@dataclass(frozen=True)
class Sample:
    sequence: TokenSequence
    num_sampled: int


def samples(num_episodes: int, num_tokens: int, num_turns: int, reply: int, vocab: int) -> list[Sample]:
    """Episodes of equal turns, each a prompt and a reply."""
    generator = torch.Generator().manual_seed(0)
    turn = num_tokens // num_turns
    sampled = ((False,) * (turn - reply) + (True,) * reply) * num_turns
    made = []
    for _ in range(num_episodes):
        ids = torch.randint(vocab, (len(sampled),), generator=generator).tolist()
        log_probs = tuple(-12.0 if flag else 0.0 for flag in sampled)
        made.append(Sample(TokenSequence(tuple(ids), sampled, log_probs, 0, ()), sum(sampled)))
    return made


def useful_flops(shape, episodes: list[Sample]) -> float:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    before = shape.hidden_size * (queries + 2 * keys)
    after = shape.hidden_size * (queries + 3 * shape.intermediate_size)
    num_tokens = sum(len(sample.sequence.ids) for sample in episodes)
    num_rows = sum(sample.num_sampled for sample in episodes)
    layers = shape.num_layers * before * num_tokens + after * ((shape.num_layers - 1) * num_tokens + num_rows)
    attention = shape.num_layers * queries * sum(len(sample.sequence.ids) ** 2 for sample in episodes)
    return 6.0 * (layers + attention + shape.vocab_size * shape.hidden_size * num_rows)


def measure(options: argparse.Namespace) -> dict[str, float]:
    shape = SHAPES[options.shape]
    if options.memory:
        torch.cuda.set_per_process_memory_fraction(options.memory * 1e9 / torch.cuda.mem_get_info()[1])
    size = max(1, options.tokens // options.length)
    overrides = [
        f"micro_batch_size_per_gpu={size}", f"ppo_mini_batch_size={options.episodes}",
        f"actor_rollout_ref.rollout.max_model_len={options.tokens // size}",
        f"actor_rollout_ref.actor.entropy_coeff={options.entropy}", "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.response_length={options.reply}",
    ]  # fmt: skip
    config = resolve(overrides, "_2_sokoban", environ={}).config
    model = random_decoder(shape)
    model.gradient_checkpointing = not options.keep
    optimizer = MasterAdamW(model.parameters(), config.actor_rollout_ref.actor.optim, 10)
    episodes = samples(options.episodes, options.length, options.turns, options.reply, shape.vocab_size)
    targets = Targets(
        advantages=[torch.randn(sample.num_sampled) for sample in episodes],
        old_log_probs=[torch.full((sample.num_sampled,), -12.0) for sample in episodes],
    )
    held = torch.cuda.memory_allocated()
    workers = Workers(device=DEVICE)
    norms = []

    def step():
        norms.append(update_actor(model, optimizer, episodes, targets, config, workers).metrics["actor/grad_norm"])

    time = milliseconds(step, rounds=options.rounds, warm_up=1)
    peak = torch.cuda.max_memory_allocated()
    gradients = [torch.full_like(master, 1e-3) for master in optimizer.masters]
    knows_norm = "norm" in inspect.signature(optimizer.step).parameters

    def optimize():
        for master, gradient in zip(optimizer.masters, gradients, strict=True):
            master.grad = gradient
        norm = optimizer.norm()
        optimizer.step(1.0, **({"norm": norm} if knows_norm else {}))

    return {
        "ms": time,
        "mfu": useful_flops(shape, episodes) / (time / 1e3) / PEAK,
        "tokens_s": options.episodes * options.length / (time / 1e3),
        "held_gb": held / 1e9,
        "peak_gb": peak / 1e9,
        "optimizer_ms": milliseconds(optimize, rounds=3, warm_up=1),
        "grad_norm": norms[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, at most")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=100)
    parser.add_argument("--entropy", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="never recompute a layer")
    parser.add_argument("--memory", type=float, help="GB that may be used")
    parser.add_argument("--against", type=Path, help="another checkout, measured first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options)))
        return
    print(f"{machine()}; {options.shape}, {options.episodes} episodes of {options.length} tokens, ", end="")
    print(f"{options.turns * options.reply} sampled, micro-batches of {options.tokens} tokens", end="")
    print(f", memory capped to {options.memory:g} GB" if options.memory else "")
    print(f"bf16 matrix product {matrix_rate() / 1e12:.0f} TFLOP/s", flush=True)
    torch.cuda.empty_cache()
    found = {}
    for name, values in in_each_checkout(options.against):
        found[name] = values
        print(
            f"{name:8} {values['ms']:8.0f} ms  {values['mfu']:6.1%} MFU  {values['tokens_s']:8,.0f} tokens/s  peak "
            f"{values['peak_gb']:6.1f} GB (held {values['held_gb']:.1f})  optimizer {values['optimizer_ms']:.0f} ms  "
            f"gradient norm {values['grad_norm']:.6f}",
            flush=True,
        )
    if len(found) == 2:
        print(f"before / now: {found['before']['ms'] / found['now']['ms']:.2f}")


if __name__ == "__main__":
    main()
