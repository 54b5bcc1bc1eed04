"""How the embedded model learns: every game, several seeds, and Sokoban without its filter. Prints a Markdown table.

    PYTHONPATH=src .venv/bin/python scripts/studies/pocket.py --seeds 3        # about an hour on two cores

Each run is the documented command in a process of its own; finished runs are not repeated. The table is made from the
run folders alone, so `--only-table` can be asked at any time.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from ragen.report.folder import RunFolder

ROOT = Path(__file__).parents[2]
NO_FILTER = [
    "actor_rollout_ref.rollout.rollout_filter_value=1.0",
    "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
]
STUDIES = {
    "two_armed_bandit": ("two_armed_bandit", []),
    "frozenlake": ("frozenlake", []),
    "sokoban": ("sokoban", []),
    "sokoban-nofilter": ("sokoban", NO_FILTER),
}


def command(environment: str, extra: list[str], seed: int, folder: Path) -> list[str]:
    words = [environment, "model.base_model=pocket", f"seed.train={10_000 + 100_000 * seed}", *extra]
    return [sys.executable, "-m", "ragen", "train", *words, f"trainer.default_local_dir={folder}"]


def line(name: str, seed: int, folder: RunFolder) -> str:
    """One run: the first and the last validation, sampled and greedy, and the minutes it took."""
    rows = folder.read_metrics().rows
    validated = [row for row in rows if any(key.startswith("val-env/") for key in row)]
    if len(validated) < 2:
        return f"| {name} | {seed} | not finished | | | |"
    first, last = validated[0], validated[-1]
    tag = next(key.split("/")[1] for key in first if key.endswith("/success_low"))

    def rate(row: dict, kind: str) -> str:
        value, low, high = (100 * row[f"val-env/{tag}/{kind}{end}"] for end in ("", "_low", "_high"))
        return f"{value:.1f} [{low:.1f}, {high:.1f}]"

    minutes = sum(row.get("timing_s/step", row.get("timing_s/testing", 0.0)) for row in rows) / 60
    cells = (name, seed, *(f"{rate(first, kind)} → {rate(last, kind)}" for kind in ("success", "greedy_success")))
    return f"| {' | '.join(map(str, cells))} | {last['step']} | {minutes:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 … N-1 (default 3)")
    parser.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES), help="which studies")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/studies/pocket", help="where the runs go")
    parser.add_argument("--only-table", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    runs = [(name, seed, options.output / f"{name}-s{seed}") for name in options.only for seed in range(options.seeds)]
    for name, seed, folder in runs:
        if options.only_table or (folder / "report.html").exists():
            continue
        environment, extra = STUDIES[name]
        print(f"{name}, seed {seed} …", file=sys.stderr, flush=True)
        subprocess.run(command(environment, extra, seed, folder), stdout=subprocess.DEVNULL, check=True)
    print("| run | seed | T = 0.5, % [95 %] | greedy, % [95 %] | steps | minutes |\n|---|---|---|---|---|---|")
    for name, seed, folder in runs:
        print(line(name, seed, RunFolder(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
