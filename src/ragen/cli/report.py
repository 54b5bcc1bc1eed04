"""Write the HTML report of a run, even while it is running or after it was killed; or that of an experiment, with a
Markdown table of all its cells.

examples:
  ragen report pocket-sokoban --open
  ragen report checkpoints/RAGEN/pocket-sokoban
  ragen report logs/kl_sweep_pocket.log
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragen.cli import CommandParser
from ragen.errors import ConfigError
from ragen.invocation_dir import caller_folder, from_caller

if TYPE_CHECKING:
    from ragen.store.run_folder import RunFolder


def parser() -> argparse.ArgumentParser:
    made = CommandParser("report", __doc__)
    made.add_argument(
        "folder", metavar="RUN|SWEEP", help="a run, by name or directory, or the summary log of an experiment"
    )
    made.add_argument("--open", action="store_true", help="also open it in a browser")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from ragen.store.run_folder import RunFolder

    caller = caller_folder()
    folder, record = RunFolder(from_caller(options.folder, caller)), None
    if not folder.metrics_path.exists():
        from ragen.experiment.sweep_report import find_record, write_sweep_report

        record = find_record(folder.path)
    if record is not None:
        written = list(write_sweep_report(record))
    else:
        from ragen.report.run_report import write_report

        written = [write_report(_named(options.folder, caller))]
    for path in written:
        print(f"report: {path}")
    if options.open:
        _open(next(path for path in written if path.suffix == ".html"))
    return 0


def _open(page: Path) -> None:
    """In a browser, where there is a desktop: a text browser, which `webbrowser` may find, would take the terminal."""
    import webbrowser

    address = page.resolve().as_uri()
    has_desktop = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if not (has_desktop and webbrowser.open(address)):
        print(f"no browser here: copy the file, or open {address}")


def _named(name: str, caller: str) -> "RunFolder":
    from ragen.store.find_run import named_run

    try:
        return named_run(name, caller=caller)[1]
    except ConfigError as error:
        raise ConfigError(
            f"{error}. An experiment is named by its summary log, such as logs/kl_sweep_pocket.log"
        ) from None
