"""Draw a gradient analysis: pictures, JSON and CSV for each step, and one figure over all steps and runs.

examples:
  ragen plot gradients checkpoints/ragen/test --list-steps
  ragen plot gradients test --step 1 51
  ragen plot gradients RUN OTHER_RUN --output-dir pictures
  ragen plot gradients --wandb-path entity/project/run
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ragen.cli import CommandParser
from ragen.errors import ConfigError
from ragen.extras import require
from ragen.format import harmless
from ragen.invocation_dir import caller_folder, from_caller


def parser() -> argparse.ArgumentParser:
    made = CommandParser("plot", __doc__)
    made.add_argument("what", choices=["gradients"], help="what to draw")
    made.add_argument("folders", nargs="*", metavar="RUN", help="runs, by name or directory")
    made.add_argument("--step", nargs="+", action="extend", type=int, metavar="N", help="only these steps")
    made.add_argument("--list-steps", action="store_true", help="list the analysed steps and stop")
    made.add_argument("--output-dir", metavar="DIR", help="default gradient_analysis_outputs/<run name>")
    made.add_argument("--wandb-path", metavar="PATH", help="a W&B run, entity/project/run, instead of a directory")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from ragen.report import gradient_data

    caller = caller_folder()
    sources = [gradient_data.from_folder(_folder_of(folder, caller)) for folder in options.folders]
    sources += [gradient_data.from_wandb(options.wandb_path)] if options.wandb_path else []
    if not sources:
        raise ConfigError("nothing to draw: name a run directory, or a W&B run with --wandb-path")
    if options.list_steps:
        for source in sources:
            print(
                harmless(f"{source.name}: {', '.join(map(str, gradient_data.steps(source))) or 'no gradient analysis'}")
            )
        return 0
    require("plots")
    from ragen.report.gradient_plots import plot

    output = Path(from_caller(options.output_dir, caller)) if options.output_dir else None
    for name in (source.name for source in sources if not source.table):
        print(f"note: {name} has no {gradient_data.TABLE}: its CSV holds the means of the buckets", file=sys.stderr)
    for path in plot(sources, options.step or (), output):
        print(path)
    return 0


def _folder_of(name: str, caller: str) -> Path:
    from ragen.store.find_run import named_run

    path = Path(from_caller(name, caller))
    return path if path.is_dir() else named_run(name, caller=caller)[1].path
