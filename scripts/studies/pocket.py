"""How the embedded model learns: every game, every kind of training, with and without the filter. Prints tables.

    PYTHONPATH=src .venv/bin/python scripts/studies/pocket.py                  # about two hours on two cores
    PYTHONPATH=src .venv/bin/python scripts/studies/pocket.py --only gae brpo

Each run is the documented command in a separate process; finished runs are not repeated. The tables come from the run
directories alone, so `--only-table` works at any time, also while runs are active.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragen.statistics import paired_difference
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SHORT = ("trainer.total_training_steps=60", "trainer.test_freq=60")
NO_FILTER = (
    "actor_rollout_ref.rollout.rollout_filter_value=1.0",
    "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
)
FILTERED, UNFILTERED = "sokoban", "sokoban-nofilter"


@dataclass(frozen=True)
class Study:
    environment: str
    words: tuple[str, ...] = ()
    num_seeds: int = 3


STUDIES = {
    "two_armed_bandit": Study("two_armed_bandit"),
    "frozenlake": Study("frozenlake"),
    FILTERED: Study("sokoban"),
    UNFILTERED: Study("sokoban", NO_FILTER),
    "gae": Study("sokoban", ("algorithm.adv_estimator=gae", *SHORT), 1),
    "brpo": Study("sokoban", ("algorithm.adv_estimator=brpo", *SHORT), 1),
    "nothink": Study("sokoban", ("agent_proxy.enable_think=False", *SHORT), 1),
}


def command(study: Study, seed: int, folder: Path) -> list[str]:
    words = [study.environment, "model.base_model=pocket", f"seed.train={10_000 + 100_000 * seed}", *study.words]
    return [sys.executable, "-m", "ragen", "train", *words, f"trainer.default_local_dir={folder}"]


def outcomes(folder: RunFolder, step: int) -> dict[int, bool]:
    """Which validation levels were solved at a step."""
    (path,) = [file.path for file in folder.episode_files("val") if file.step == step]
    return {episode["seed"]: episode["success"] for episode in read_episodes(path)}


def change(before: dict[int, bool], after: dict[int, bool]) -> str:
    """The paired difference in points, with its interval."""
    levels = sorted(before.keys() & after.keys())
    found = paired_difference([before[level] for level in levels], [after[level] for level in levels])
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def line(name: str, seed: int, folder: RunFolder) -> str:
    """One run: the first and the last validation, the gain on the same levels, and the minutes it took."""
    rows = folder.read_metrics().rows
    validated = [row for row in rows if any(key.startswith("val-env/") for key in row)]
    if len(validated) < 2:
        return f"| {name} | {seed} | not finished | | | | |"
    first, last = validated[0], validated[-1]
    tag = next(key.split("/")[1] for key in first if key.endswith("/success_low"))

    def rate(row: dict, kind: str) -> str:
        value, low, high = (100 * row[f"val-env/{tag}/{kind}{end}"] for end in ("", "_low", "_high"))
        return f"{value:.1f} [{low:.1f}, {high:.1f}]"

    gain = change(outcomes(folder, first["step"]), outcomes(folder, last["step"]))
    minutes = sum(row.get("timing_s/step", row.get("timing_s/testing", 0.0)) for row in rows) / 60
    shown = [f"{rate(first, kind)} → {rate(last, kind)}" for kind in ("success", "greedy_success")]
    return f"| {name} | {seed} | {shown[0]} | {gain} | {shown[1]} | {last['step']} | {minutes:.1f} |"


def filter_lines(output: Path, num_seeds: int) -> Iterator[str]:
    """With against without the filter, seed by seed, at the last validation that both runs have."""
    yield "| seed | step | with, % | without, % | difference [95 %] |\n|---|---|---|---|---|"
    for seed in range(num_seeds):
        runs = [RunFolder(output / f"{name}-s{seed}") for name in (UNFILTERED, FILTERED)]
        steps = set.intersection(*({file.step for file in run.episode_files("val")} for run in runs)) - {0}
        if not steps:
            continue
        without, with_ = (outcomes(run, max(steps)) for run in runs)
        rates = [f"{100 * sum(won.values()) / len(won):.1f}" for won in (with_, without)]
        yield f"| {seed} | {max(steps)} | {rates[0]} | {rates[1]} | {change(without, with_)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 … N-1, where a study has several (default 3)")
    parser.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES), help="which studies")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/studies/pocket", help="where the runs go")
    parser.add_argument("--only-table", action="store_true", help="print the tables of what is there")
    options = parser.parse_args()
    runs = [
        (name, seed, options.output / f"{name}-s{seed}")
        for name in options.only
        for seed in range(min(options.seeds, STUDIES[name].num_seeds))
    ]
    for name, seed, folder in runs:
        if options.only_table or RunFolder(folder).finished_path.exists():
            continue
        print(f"{name}, seed {seed} …", file=sys.stderr, flush=True)
        subprocess.run(command(STUDIES[name], seed, folder), stdout=subprocess.DEVNULL, check=True)
    print("| run | seed | T = 0.5, % [95 %] | gain on the same levels | greedy, % [95 %] | steps | minutes |")
    print("|---|---|---|---|---|---|---|")
    for name, seed, folder in runs:
        print(line(name, seed, RunFolder(folder)))
    if {FILTERED, UNFILTERED} <= set(options.only):
        print()
        print("\n".join(filter_lines(options.output, options.seeds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
