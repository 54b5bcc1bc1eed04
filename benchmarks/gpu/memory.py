"""The peak of GPU memory that `ragen.run.memory_plan` predicts, and what a run of the trainer uses, side by side.

    python benchmarks/gpu/memory.py --list
    python benchmarks/gpu/memory.py --only "0.5B GRPO" "3B PPO, 80 GB"       # about 2 minutes each; all: 10 minutes
    python benchmarks/gpu/memory.py --only tiny                              # tries the script, also on a CPU

Each setting is a run in its own process: `_2_sokoban`, 8 x 16 episodes, replies of 100 tokens, two steps, no filter,
shapes of Qwen2.5 with random weights. Sampling, scoring and updates all count: the peak is torch's
`max_memory_allocated` over the whole run. A setting may cap the memory of its process. A prediction that is more than
10 % off is marked; the exit status is 1 then, or if a run failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import DEVICE, machine

from ragen.config.compose import resolve
from ragen.machine import prefer_growing_segments
from ragen.run.memory_plan import plan
from ragen.run.model_shape import shape_of
from ragen.train import trainer

PPO = ("algorithm.adv_estimator=gae",)
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")
OFFLOAD = ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",)
SMALL = (
    "es_manager.train.env_groups=2", "es_manager.train.group_size=2", "ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.forced_reply_tokens=8", "actor_rollout_ref.rollout.response_length=32",
)  # fmt: skip
COMMON = (
    "algorithm.adv_estimator=grpo", "micro_batch_size_per_gpu=4", "log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.forced_reply_tokens=100", "actor_rollout_ref.rollout.rollout_filter_value=1",
    "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
    "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=-1",
    "trainer.logger=console", "collapse_detection.compute_freq=0",
)  # fmt: skip


class Setting(NamedTuple):
    model: str
    overrides: tuple[str, ...] = ()
    cap: float | None = None  # GB


SETTINGS = {
    "tiny": Setting("pocket", (*PPO, *SMALL)),
    "0.5B GRPO": Setting("random:Qwen2.5-0.5B"),
    "1.5B GRPO": Setting("random:Qwen2.5-1.5B"),
    "3B GRPO": Setting("random:Qwen2.5-3B"),
    "3B GRPO, offloaded": Setting("random:Qwen2.5-3B", OFFLOAD),
    "3B PPO": Setting("random:Qwen2.5-3B", PPO),
    "3B PPO + reference": Setting("random:Qwen2.5-3B", (*PPO, *KL)),
    "3B PPO, 80 GB": Setting("random:Qwen2.5-3B", PPO, 80),
    "7B LoRA GRPO": Setting("random:Qwen2.5-7B", ("lora.rank=64",)),
}
TIMES = ("step", "gen", "old_log_prob", "values", "update_critic", "update_actor")


def measure(setting: Setting, folder: Path) -> dict[str, object]:
    """A run with the setting in this process."""
    words = [*COMMON, f"model_path={setting.model}", *setting.overrides, f"trainer.default_local_dir={folder}"]
    config = resolve(words, "_2_sokoban", environ={}).config
    if setting.cap and DEVICE.type == "cuda":
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(setting.cap * 1e9 / total)
    plans = []
    original = trainer.plan_memory

    def planned(*given):
        made = original(*given)
        plans.append(made or plan(shape_of(setting.model), config, 8 * 10**9))  # on a CPU, to try the script
        return made

    trainer.plan_memory = planned
    trainer.train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    on_gpu = DEVICE.type == "cuda"
    return {
        "predicted": plans[0].peak / 1e9,
        "measured": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else float("nan"),
        "reserved": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else float("nan"),
        "plan": plans[0].line(),
        "seconds": {name: rows[-1].get(f"timing_s/{name}") for name in TIMES},
        "redone": sum(value for name, value in rows[-1].items() if name.endswith("redone_for_memory")),
    }


def in_own_process(name: str) -> dict[str, object] | None:
    prefer_growing_segments()  # as the command line does, for processes that load torch from now on
    done = subprocess.run([sys.executable, __file__, "--only", name, "--json"], capture_output=True, text=True)
    if done.returncode:
        print(f"{name:22} failed: {' | '.join(done.stderr.strip().splitlines()[-3:])[:600]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, metavar="SETTING", help="one of --list, or several")
    parser.add_argument("--list", action="store_true", help="list the settings")
    parser.add_argument("--json", action="store_true", help="measure one setting in this process")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SETTINGS))
        return 0
    if options.json:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(SETTINGS[options.only[0]], Path(folder) / "run")))
        return 0
    print(machine())
    print(f"{'GB at the peak of a run':22} {'predicted':>9} {'measured':>9} {'ratio':>6} {'reserved':>9}  second step")
    is_right = True
    for name in options.only or [name for name in SETTINGS if not name.startswith("tiny")]:
        found = in_own_process(name)
        if found is None:
            is_right = False
            continue
        ratio = found["predicted"] / found["measured"]
        is_right &= not abs(ratio - 1) > 0.1
        times = ", ".join(f"{part} {value:.1f} s" for part, value in found["seconds"].items() if value)
        peaks = f"{found['predicted']:9.1f} {found['measured']:9.1f} {ratio:6.2f} {found['reserved']:9.1f}"
        print(
            f"{name:22} {peaks}  {times}"
            + (f"; redone {found['redone']:g} times" if found["redone"] else "")
            + ("  <- more than 10 % off" if abs(ratio - 1) > 0.1 else ""),
            flush=True,
        )
        print(f"{'':22} {found['plan']}", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
