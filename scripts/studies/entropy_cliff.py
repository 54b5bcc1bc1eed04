"""How low may entropy fall in a run that is well? Stored runs, and when `entropy_cliff` would warn at other limits.

    PYTHONPATH=src .venv/bin/python scripts/studies/entropy_cliff.py runs/smollm2/ppo-* runs/smollm2/grpo-*
    PYTHONPATH=src .venv/bin/python scripts/studies/entropy_cliff.py RUN... --shares 0.5 0.33 0.25

Prints a row for each run: training success (the first and the last ten steps), entropy (the mean of the first five
steps, of the last five, and the lowest of five as a share of the start), and the first warning at each share of the
start. The limit in force is `ragen.diagnose.history.Limits.entropy_low_share`.
"""

import argparse
from pathlib import Path
from statistics import fmean

from ragen.diagnose.health import Health
from ragen.diagnose.history import Limits, series_of
from ragen.format import markdown_table, percent, short
from ragen.store.run_folder import RunFolder

CHECK = "entropy_cliff"
NUM = Limits().num_recent


def first_warning(rows: list[dict], share: float) -> str:
    warnings = Health.of(rows, Limits(entropy_low_share=share)).spells[CHECK]
    return str(warnings[0].first_step) if warnings else "–"


def row_of(folder: Path, shares: list[float]) -> list[str] | None:
    """None if the run is too short to compare a start with an end."""
    rows = RunFolder(folder).read_metrics().rows
    entropy, success = ([value for _, value in series_of(rows, name)] for name in ("entropy", "success"))
    if len(entropy) < 2 * NUM:
        return None
    start = fmean(entropy[:NUM])
    lowest = min(fmean(entropy[end - NUM : end]) for end in range(NUM, len(entropy) + 1))
    return [
        folder.name,
        str(rows[-1]["step"]),
        f"{percent(fmean(success[:10]))} → {percent(fmean(success[-10:]))}",
        f"{short(start)} → {short(fmean(entropy[-NUM:]))}",
        percent(lowest / start) if start else "–",
        *(first_warning(rows, share) for share in shares),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.33, 0.25], help="limits to compare")
    options = parser.parse_args()
    found = [(folder, row_of(folder, options.shares)) for folder in options.folders]
    heads = ["run", "steps", "training success", "entropy", "lowest / start", *map(str, options.shares)]
    print(markdown_table(heads, [row for _, row in found if row]))
    for folder, row in found:
        if row is None:
            print(f"{folder}: fewer than {2 * NUM} training steps with entropy")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
