"""The metrics of a run as tests compare them: without those of the clock, which differ each time.

assert metrics_without_clock(resumed) == metrics_without_clock(unbroken)
"""

import json
from pathlib import Path

CLOCK = ("timing_", "perf/")


def metrics_without_clock(folder):
    """One dictionary for each step, as it is stored: a value that is not finite is a text, which equals itself."""
    stored = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [without_clock(json.loads(line)) for line in stored]


def without_clock(row):
    return {name: value for name, value in row.items() if not name.startswith(CLOCK)}
