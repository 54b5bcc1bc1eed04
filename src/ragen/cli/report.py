"""Write the HTML report of a run, even while it is running or after it was killed; or that of an experiment, with a
Markdown table of all its cells.

examples:
  ragen report checkpoints/RAGEN/pocket-sokoban
  ragen report logs/kl_sweep_pocket.log
"""

import argparse
from collections.abc import Sequence

from ragen.cli import CommandParser
from ragen.errors import ConfigError
from ragen.invocation_dir import caller_folder, from_caller


def parser() -> argparse.ArgumentParser:
    made = CommandParser("report", __doc__)
    made.add_argument("folder", metavar="RUN|SWEEP", help="a run directory, or the summary log of an experiment")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from ragen.store.run_folder import RunFolder

    folder = RunFolder(from_caller(options.folder, caller_folder()))
    if folder.metrics_path.exists():
        from ragen.report.run_report import write_report

        written = [write_report(folder)]
    else:
        from ragen.experiment.sweep_report import find_record, write_sweep_report

        record = find_record(folder.path)
        if record is None:
            raise ConfigError(
                f"{folder}: not a run directory (no {folder.metrics_path.name}), and not an experiment: name its "
                "summary log, such as logs/kl_sweep_Qwen2.5-3B.log"
            )
        written = list(write_sweep_report(record))
    for path in written:
        print(f"report: {path}")
    return 0
