"""The argument parser of a verb. Its help is the docstring of the verb's module, so that it is written once.

parser = CommandParser("merge", __doc__)
"""

import argparse
import re
import textwrap
from typing import Any, NoReturn

from ragen.errors import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """The first paragraph of `about` becomes the description, the rest stands below the options as it is."""

    def __init__(self, verb: str, about: str | None, **settings: Any):
        description, _, epilog = (about or "").partition("\n\n")
        super().__init__(
            prog=f"ragen {verb}",
            description=textwrap.fill(description, 79),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        """Suggest the nearest option for an unknown one."""
        unknown = re.match("unrecognized arguments: (--[a-z-]+)", message)
        super().error(message + (did_you_mean(unknown[1], self._option_string_actions) if unknown else ""))
