"""The memory that `ragen.run.memory_plan` predicts for an update, and what one uses, side by side.

    python benchmarks/gpu/memory.py                     # needs a CUDA device; two minutes on an H200
    python benchmarks/gpu/memory.py --only "3B PPO"     # one setting
    python benchmarks/gpu/memory.py --memory 80         # as if the card had 80 GB

Models have the shapes of Qwen2.5 and random weights. Each setting runs in its own process: models, optimizers, one
optimizer step of the actor and, with a critic, of the critic, on episodes of 1,500 tokens, 500 of them sampled, that
fill two micro-batches. Only the learner is measured: the sampler's cache is not alive then.
"""

import argparse
import json
import subprocess
import sys

import torch
from measuring import DEVICE, SHAPES, machine, random_decoder
from update import samples

from ragen.config.compose import resolve
from ragen.distributed.workers import Workers
from ragen.model.critic import Critic
from ragen.model.lora import add_adapters
from ragen.run.memory_plan import ModelShape, plan
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import Targets, update_actor, update_critic

PPO = ("algorithm.adv_estimator=gae",)
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")
SETTINGS = {
    "tiny PPO": ("tiny", PPO),
    "0.5B GRPO": ("0.5B", ()),
    "1.5B GRPO": ("1.5B", ()),
    "3B GRPO": ("3B", ()),
    "3B PPO": ("3B", PPO),
    "3B PPO + reference": ("3B", (*PPO, *KL)),
    "7B LoRA GRPO": ("7B", ("lora.rank=64",)),
}
LENGTH, TURNS, REPLY = 1500, 5, 100


def measure(name: str, cap: float | None) -> dict[str, float]:
    shape, overrides = SHAPES[SETTINGS[name][0]], SETTINGS[name][1]
    words = [
        "micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.response_length={REPLY}",
    ]
    config = resolve([*words, "model_path=x", *overrides], "_2_sokoban", environ={}).config
    capacity = torch.cuda.mem_get_info()[1]
    if cap:
        torch.cuda.set_per_process_memory_fraction(cap * 1e9 / capacity)
        capacity = int(cap * 1e9)
    size = ModelShape(
        name, shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads,
        shape.head_dim, shape.vocab_size, shape.tied_embeddings, shape.qkv_bias,
    )  # fmt: skip
    planned = plan(size, config, capacity)
    print(planned.line(capacity), file=sys.stderr)
    num_episodes = max(1, 2 * planned.num_tokens // LENGTH)
    episodes = samples(num_episodes, LENGTH, TURNS, REPLY, shape.vocab_size)
    tokens = [torch.full((sample.num_sampled,), -12.0) for sample in episodes]
    targets = Targets([torch.randn_like(part) for part in tokens], tokens, tokens, tokens, tokens)
    actor, workers = random_decoder(shape), Workers(device=DEVICE)
    actor.gradient_checkpointing = True
    settings = config.actor_rollout_ref
    if settings.model.lora_rank:
        add_adapters(actor, settings.model.lora_rank, settings.model.lora_alpha)
    optimizer = MasterAdamW(actor.parameters(), settings.actor.optim, 10)
    reference = random_decoder(shape).requires_grad_(False) if overrides[1:] else None
    critic = None
    if overrides[:1] == PPO:
        backbone = random_decoder(shape)
        backbone.gradient_checkpointing = True
        critic = Critic(backbone)
        critic_optimizer = MasterAdamW(critic.parameters(), config.critic.optim, 10)
    for _ in range(2):  # Adam's moments are there from the second step on
        if critic is not None:
            update_critic(critic, critic_optimizer, episodes, targets, config, workers)
        update_actor(actor, optimizer, episodes, targets, config, workers, reference)
    return {
        "predicted": planned.update / 1e9,
        "measured": torch.cuda.max_memory_allocated() / 1e9,
        "reserved": torch.cuda.max_memory_reserved() / 1e9,
        "tokens": planned.num_tokens,
        "recomputed": planned.num_recomputed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--memory", type=float, help="GB that may be used")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.only, options.memory)))
        return
    print(machine() + (f", memory capped to {options.memory:g} GB" if options.memory else ""))
    print(f"{'GB at the peak of an update':30} {'predicted':>9} {'measured':>9} {'ratio':>6} {'reserved':>9}")
    for name in [options.only] if options.only else [name for name in SETTINGS if not name.startswith("tiny")]:
        command = [sys.executable, __file__, "--only", name, "--json"]
        command += ["--memory", str(options.memory)] if options.memory else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:30} {done.stderr.strip().splitlines()[-1][:150]}", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:30} {found['predicted']:9.1f} {found['measured']:9.1f} "
            f"{found['predicted'] / found['measured']:6.2f} {found['reserved']:9.1f}  "
            f"micro-batches of {found['tokens']:,} tokens, {found['recomputed']} layers recomputed",
            flush=True,
        )


if __name__ == "__main__":
    main()
