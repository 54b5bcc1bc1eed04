"""Build the embedded model from solver data.

examples:
  ragen pocket build --dry-run
  ragen pocket build --output models/pocket
  ragen train sokoban model.base_model=models/pocket
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ragen.cli import CommandParser
from ragen.errors import ConfigError
from ragen.invocation_dir import caller_folder, from_caller


def parser() -> argparse.ArgumentParser:
    made = CommandParser("pocket", __doc__)
    made.add_argument("action", choices=["build"], help="what to do")
    made.add_argument("--output", metavar="DIR", help="default models/pocket")
    made.add_argument("--steps", type=int, metavar="N", help="training steps (default: those of the recipe)")
    made.add_argument("--dry-run", action="store_true", help="print what would be built and stop")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: must be at least 1")
    from ragen.sft.pocket.build import STEPS, build, describe

    steps = options.steps or STEPS
    output = from_caller(options.output, caller_folder()) if options.output else "models/pocket"
    print(describe(steps))
    if not options.dry_run:
        build(Path(output), steps)
    return 0
