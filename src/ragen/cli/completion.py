"""Print the script that completes ragen commands in a shell.

examples:
  eval "$(ragen completion bash)"
  ragen completion zsh > ~/.zsh/completions/_ragen
"""

import argparse
from collections.abc import Sequence

from ragen.cli import CommandParser, top_parser
from ragen.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    made = CommandParser("completion", __doc__)
    made.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="your shell")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs the package shtab: pip install shtab") from None
    print(shtab.complete(top_parser(with_options=True), options.shell))
    return 0
