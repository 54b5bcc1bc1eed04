"""One GRPO step at the shape of Qwen2.5-0.5B on one GPU: ours and TRL's `GRPOTrainer`, in one run, each alone.

    PYTHONPATH=src:benchmarks/.peers/gpu python benchmarks/gpu/grpo_step.py      # packages: fetch_packages.py
    python benchmarks/gpu/grpo_step.py --model pocket --groups 2 --size 4 --reply 16 --rounds 1 --tries 0   # on a CPU

The workload, the check that it is the same step, and the search for the peer's best settings are those of
benchmarks/step.py: five turns, 8 x 16 episodes, every reply 100 tokens, one optimizer step over all episodes, no KL
term, temperature 1. Rows of the peer: `environment_factory` as TRL has it, and a `rollout_func` that keeps the cache
from turn to turn, the fastest loop over `generate` that we know. Both sides are in bf16: ours with float32 master
weights, the peer first with pure bf16 weights and optimizer, which is less work, then with float32 weights. All trials
are printed. vLLM and flash-attn are not on that machine. Ours also prints the MFU of its update.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from measuring import DEVICE, PEAK, machine
from safetensors.torch import save_file
from update import useful_flops

sys.path.append(str(Path(__file__).parents[1]))
import step as both
from step import AS_IT_IS, Ours, Peer, Place, check_same_step, describe, make_workload, show, tune_ours, tune_peer

from ragen.agent.chat_template import ChatTemplate
from ragen.distributed.workers import Workers
from ragen.model.decoder import to_huggingface
from ragen.model.load import LoadedModel, find_model, load_model
from ragen.model.packing import samples_of

ON_GPU = Place(
    workers=Workers(device=DEVICE),
    request={"device": "cuda"},
    settings=({"dtype": "float32"}, {"cache_implementation": "static"}, {"optim": "adamw_torch"},
              {"gradient_checkpointing": True}),
    norm_tolerance=0.05,  # bf16, other kernels
)  # fmt: skip


def saved(name: str, folder: Path) -> LoadedModel:
    """The model, loaded from files that the peer reads too: random weights have none."""
    loaded = load_model(find_model(name), DEVICE)
    source = loaded.source.folder
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(".safetensors"):
            shutil.copy(file, folder / file.name)
    weights = {key: value.contiguous().cpu() for key, value in to_huggingface(loaded.model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del loaded
    return load_model(find_model(str(folder)), DEVICE)


def measure_ours(loaded: LoadedModel, workload, place: Place, options: argparse.Namespace) -> list[both.Seconds]:
    ours = Ours(loaded, workload, place)
    tune_ours(ours, options.tries)
    steps = [ours.step() for _ in range(options.rounds)]
    samples = samples_of(ours._play())
    update = min(step.update for step in steps)
    mfu = useful_flops(loaded.model.shape, samples) / update / PEAK
    print(f"  ours: MFU of all that follows the rollout {mfu:.1%}, of {PEAK / 1e12:.0f} TFLOP/s", flush=True)
    ours.engine.release()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:Qwen2.5-0.5B")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=1, help="timed steps for each setting tried; 0: no search")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    place = ON_GPU if DEVICE.type == "cuda" else both.CPU
    print(f"{machine()}; {options.model}, {options.rounds} rounds, each side alone on the device")
    # The peer reads what it needs from the same path as we do.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    both.PEER_LOG = Path(tempfile.gettempdir()) / "trl_peer.log"
    both.PEER_LOG.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        loaded = saved(options.model, Path(folder))
        chat = ChatTemplate(loaded.tokenizer)
        workload = make_workload("multi-turn", chat, options.groups, options.size, options.turns, options.reply)
        describe(workload)
        seconds = {"ours": measure_ours(loaded, workload, place, options)}
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        if options.no_peer:
            print(f"  ours {min(step.total for step in seconds['ours']):.2f} s")
            return
        tuner = Peer(Path(sys.executable), loaded, workload, "environment", place)
        settings = tune_peer(tuner, options.tries)
        tuner.close()
        own_cache = {name: value for name, value in settings.items() if name != "cache_implementation"}
        for name, kind, chosen in (
            (AS_IT_IS, "environment", settings), ("TRL, rollout_func", "rollout_func", own_cache),
        ):  # fmt: skip
            peer = Peer(Path(sys.executable), loaded, workload, kind, place)
            first = peer.begin(chosen)
            told = first.get("problem") or check_same_step(loaded, workload, first, place)
            print(f"  {name}: {chosen}\n    {told}", flush=True)
            if "problem" not in first:
                seconds[name] = [peer.step() for _ in range(options.rounds)]
            peer.close()
        show(workload.name, seconds)


if __name__ == "__main__":
    main()
