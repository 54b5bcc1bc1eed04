"""`ragen sweep`: see `experiment.command`, where every experiment has a parser with its own options.

run(["kl_sweep", "--kl-values", "0,0.01", "--dry-run"])
"""

import argparse
from collections.abc import Sequence

from ragen.cli import CommandParser


def parser() -> argparse.ArgumentParser:
    """The names of the experiments, for shell completion."""
    from ragen.experiment.spec import names

    made = CommandParser("sweep", "Run a documented experiment.")
    made.add_argument("experiment", choices=names(), metavar="EXPERIMENT", help="see ragen sweep --help")
    return made


def run(arguments: Sequence[str]) -> int:
    from ragen.experiment.command import sweep

    return sweep(arguments)
