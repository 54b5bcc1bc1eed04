"""PPO steps of the documented experiment on one GPU, as a user runs them: `ragen train`, read from `metrics.jsonl`.

    python benchmarks/gpu/ppo_step.py                            # all rows, three steps each; ten minutes
    python benchmarks/gpu/ppo_step.py --only ppo reference       # some of them
    python benchmarks/gpu/ppo_step.py --only ppo --memory 80     # as on a card of 80 GB
    python benchmarks/gpu/ppo_step.py --model pocket-blank --groups 2 --size 2 --reply 4 --steps 1       # on a CPU

`_2_sokoban` with `gae`: 8 x 16 episodes, five turns, every reply 100 tokens (about 1,660 tokens an episode, 500 of them
sampled), no filter. Nothing switches a fast path on. A row is the last step; the first also compiles kernels and
captures graphs, and is printed in parentheses. A row that fails is reported with the end of its output; the others run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import machine

ROLLOUT = "actor_rollout_ref.rollout"
COMMON = [
    "algorithm.adv_estimator=gae", f"{ROLLOUT}.rollout_filter_value=1", f"{ROLLOUT}.rollout_filter_include_zero=True",
    "collapse_detection.compute_freq=0", "trainer.val_before_train=False", "trainer.test_freq=-1",
    "trainer.save_freq=-1", "trainer.logger=[console]",
]  # fmt: skip
ROWS = {
    "ppo": [],
    "reference": ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001"],
    "sampler": ["actor_rollout_ref.actor.old_log_probs=sampler"],
    "ragged": [f"{ROLLOUT}.forced_reply_tokens=lognormal:{{reply}}"],
}
PARTS = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "step")
CAPPED = """
import sys, torch
torch.cuda.set_per_process_memory_fraction({memory} * 1e9 / torch.cuda.mem_get_info()[1])
from ragen.cli import main
sys.exit(main(sys.argv[1:]))
"""
GAPS = ("rollout/log_prob_diff_mean", "rollout/log_prob_diff_p999", "rollout/sampler_learner_kl")


def command(options: argparse.Namespace, name: str, folder: str) -> list[str]:
    words = [
        f"model_path={options.model}", *COMMON, f"{ROLLOUT}.forced_reply_tokens={options.reply}",
        f"es_manager.train.env_groups={options.groups}", f"es_manager.train.group_size={options.size}",
        f"trainer.total_training_steps={options.steps}", f"trainer.default_local_dir={folder}",
        *(word.format(reply=options.reply) for word in ROWS[name]), *options.override,
    ]  # fmt: skip
    start = ["-c", CAPPED.format(memory=options.memory)] if options.memory else ["-m", "ragen"]
    return [sys.executable, *start, "train", "--config-name", "_2_sokoban", *words]


def told(row: dict[str, float]) -> str:
    found = [f"{part} {row[f'timing_s/{part}']:.2f}" for part in PARTS if f"timing_s/{part}" in row]
    named = sum(row.get(f"timing_s/{part}", 0.0) for part in PARTS[:-1])
    return "  ".join([*found, f"rest {row['timing_s/step'] - named:.2f}"])


def measure(options: argparse.Namespace, name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        words, started = command(options, name, folder), time.perf_counter()
        print(f"\n{name}: ragen {' '.join(words[3:])}", flush=True)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        took = time.perf_counter() - started
        notes = [line for line in done.stdout.splitlines() if line.startswith(("memory", "sampling"))]
        if done.returncode:
            print(f"  FAILED with status {done.returncode}:\n" + "\n".join(done.stdout.splitlines()[-15:]), flush=True)
            return False
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    print(*(f"  {line}" for line in notes), sep="\n")
    for row in rows:
        is_last = row is rows[-1]
        print(f"  step {row['step']}: {told(row)}" if is_last else f"  (step {row['step']}: {told(row)})")
    last = rows[-1]
    print("  " + "  ".join(f"{key} {last[key]:.2e}" for key in GAPS if key in last))
    peaks = [f"{key} {value:.1f}" for key, value in last.items() if key.startswith("perf/")]
    print("  " + "  ".join(peaks) + f"  whole command {took:.0f} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:Qwen2.5-3B")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--reply", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", type=float, help="GB that may be used")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("override", nargs="*", help="further overrides of every row")
    options = parser.parse_args()
    print(machine())
    good = [measure(options, name) for name in options.only]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
