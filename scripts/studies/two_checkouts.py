"""Is a newer checkout faster, and does it learn as much? SmolLM2, 100 GRPO steps with each, one after the other.

    PYTHONPATH=src python scripts/studies/two_checkouts.py run runs/two --old ../older --model MODEL --minutes 9
    PYTHONPATH=src python scripts/studies/two_checkouts.py table runs/two

`run` fine-tunes MODEL (smollm2, or its directory) on demonstrations with this checkout, then trains from there with the
older checkout and with this one, each alone on the device. After `--minutes` it stops the run in progress, which saves;
the same command resumes, also after a kill. `table` prints time per step, validation success, and how far the sampler's
log-probs are from the learner's over the updates.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median

from smollm2 import COMMON, RL, _short, success, validated

HERE = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
GRPO = [
    *COMMON, *RL, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.rollout_filter_value=1.0",
    f"{ROLLOUT}.rollout_filter_include_zero=True", "trainer.save_freq=10", "trainer.val_before_train=True",
]  # fmt: skip
PARTS = ("gen", "old_log_prob", "update_actor", "step")
SAVING = 60  # seconds from SIGTERM to the end of a run, at most


def commands(folder: Path, old: Path, model: str, more: list[str]) -> dict[str, tuple[Path, Path, list[str]]]:
    """Name -> checkout, the file that says that it is done, words of `ragen train`."""
    start = folder / "start"
    tuned = ["rl_or_sft=sft", f"sft.training.base_model={model}", f"sft.output_dir={start}",
             "sft.training.logger=[console]", "sft.training.micro_batch_size=8", *_short(1_600), *COMMON]  # fmt: skip
    found = {"start": (HERE, start / "merged_model" / "config.json", tuned)}
    for name, checkout in (("old", old.resolve()), ("new", HERE)):
        words = [f"model_path={start / 'merged_model'}", f"trainer.default_local_dir={folder / name}", *GRPO]
        found[name] = (checkout, folder / name / "finished.json", words)
    return {name: (checkout, done, [*words, *more]) for name, (checkout, done, words) in found.items()}


def run(folder: Path, old: Path, model: str, minutes: float, more: list[str]) -> int:
    """0 when all is done, 75 when the time was up before: run the same command again."""
    deadline = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    for name, (checkout, done, words) in commands(folder.resolve(), old, model, more).items():
        if done.exists():
            print(f"{name}: done", flush=True)
            continue
        environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "ragen", "train", "--config-name", "_2_sokoban", *words]
        with open(folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = process.wait(timeout=max(1.0, deadline - SAVING - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=10 * SAVING)
                print(f"{name}: the time is up; the same command resumes", flush=True)
                return 75
        print(f"{name}: exit status {status}", flush=True)
        if status != 0 or not done.exists():
            print("\n".join((folder / f"{name}.log").read_text().splitlines()[-15:]))
            return 1
    return 0


def table(folder: Path) -> None:
    print("| | " + " | ".join(f"{part}, s" for part in PARTS) + " | success, % | training success, last 20 steps, % |")
    print("|---" * (len(PARTS) + 3) + "|")
    medians, names = {}, [name for name in ("old", "new") if (folder / name / "metrics.jsonl").exists()]
    for name in names:
        rows = trained(folder / name)
        cells = [median(row[f"timing_s/{part}"] for row in rows) for part in PARTS]
        medians[name] = cells[-1]
        curve = " → ".join(f"{100 * success(row):.1f}" for row in validated(folder / name))
        last = fmean(value for row in rows[-20:] for key, value in row.items() if is_success(key))
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {curve} | {100 * last:.1f} |")
    if len(medians) == 2:
        print(f"\nold / new, median time of a step: {medians['old'] / medians['new']:.2f}")
    print("\n| sampler and learner | steps | mean of the gap | 99.9th percentile | KL |\n|---|---|---|---|---|")
    for name in names:
        rows = [row for row in trained(folder / name) if "rollout/log_prob_diff_mean" in row]
        for start in range(0, len(rows), 25):
            part = rows[start : start + 25]
            cells = [mean_of(part, f"rollout/{key}") for key in ("log_prob_diff_mean", "log_prob_diff_p999")]
            cells.append(mean_of(part, "rollout/sampler_learner_kl"))
            print(f"| {name} | {part[0]['step']}–{part[-1]['step']} | " + " | ".join(cells) + " |")


def trained(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "timing_s/gen" in row]


def is_success(key: str) -> bool:
    return key.startswith("train/") and key.endswith("/success")


def mean_of(rows: list[dict], key: str) -> str:
    found = [row[key] for row in rows if key in row]
    return f"{fmean(found):.2e}" if found else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--old", type=Path, help="with `run`: the older checkout")
    parser.add_argument("--model", default="smollm2", help="with `run`: smollm2, or its directory")
    parser.add_argument("--minutes", type=float, default=9.0, help="with `run`: stop and save after this time")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_intermixed_args()
    if given.verb == "table":
        table(given.folder)
        return 0
    if given.old is None:
        parser.error("run: --old CHECKOUT is missing")
    return run(given.folder, given.old, given.model, given.minutes, given.overrides)


if __name__ == "__main__":
    sys.exit(main())
