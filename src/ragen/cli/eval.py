"""`ragen eval`: see `evaluate.command`.

run(["pocket", "--env", "sokoban", "--dry-run"])
"""

import argparse
from collections.abc import Sequence

from ragen.invocation_dir import caller_folder


def parser() -> argparse.ArgumentParser:
    from ragen.evaluate import command

    return command.parser()


def run(arguments: Sequence[str]) -> int:
    from ragen.evaluate.command import command

    return command(arguments, caller_folder())
