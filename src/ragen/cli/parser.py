"""The argument parser of a verb.

parser = CommandParser("merge", "Write the model of a checkpoint …", "examples:\n  ragen merge …")
"""

import argparse
import re
import textwrap
from typing import Any, NoReturn

from ragen.errors import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """Keeps the lines of the epilog and suggests the nearest option for an unknown one."""

    def __init__(self, verb: str, description: str, epilog: str = "", **settings: Any):
        super().__init__(
            prog=f"ragen {verb}",
            description=textwrap.fill(description, 79),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.match("unrecognized arguments: (--[a-z-]+)", message)
        super().error(message + (did_you_mean(unknown[1], self._option_string_actions) if unknown else ""))
