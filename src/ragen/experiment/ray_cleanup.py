"""Ends what is left of the Ray that a sweep has started on this machine, as soon as the sweep is gone.

    python -I ray_cleanup.py RAGEN_SWEEP=4f0c    # at the end of stdin it kills every process that has this mark

Ray ends by itself, but not at once: when the process that started it is killed, Ray's agents first try for half a
minute to reach a server that is gone as well. Other clusters do not have the mark.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ragen.lifeline import kill_marked


def clean_up(mark: str) -> None:
    while os.read(0, 1 << 16):
        pass
    kill_marked(mark)


if __name__ == "__main__":
    clean_up(sys.argv[1])
