"""The command line: one module for each verb, imported when the verb is used.

    ragen train --config-name _2_sokoban trainer.test_freq=5 --dry-run
    ragen play sokoban

Each module has `parser()` and `run(arguments)`; `run` returns the exit status:
0 done, 1 failed, 2 wrong usage, 3 stopped early by a rule or a budget, 4 the environment failed (too often),
130 interrupted, 143 preempted (SIGTERM).
"""

import argparse
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from ragen import __version__
from ragen.errors import RunFailed, did_you_mean
from ragen.format import harmless
from ragen.machine import check_platform

VERBS = {
    "train": "train an agent, or show the plan of a run (--dry-run)",
    "sft": "fine-tune a model on solved levels, then merge and validate it",
    "sweep": "run a documented experiment: many runs, one table",
    "eval": "measure and compare models on the validation levels",
    "serve": "serve a model to other programs through an OpenAI-compatible API",
    "play": "play an environment in the terminal, or watch a solver or a model",
    "report": "write the HTML report of a run or an experiment",
    "runs": "list and compare the runs on disk",
    "plot": "draw the gradient analysis of runs",
    "doctor": "show what this machine has and which experiments it can run",
    "merge": "merge a LoRA adapter into its base: an ordinary model directory",
    "pocket": "build the embedded model from solver data",
    "envs": "list the environments, with random and optimal success",
    "completion": "print the completion script for a shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. User errors are one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        top_parser().print_help()
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        if near := did_you_mean(verb, VERBS):
            top_parser().error(f"there is no command {verb!r}{near}")
        top_parser().parse_args(arguments)  # --help, --version, or an error: these exit
        top_parser().error("name a command first")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without √ still shows the board
    try:
        check_platform()
        status = verb_module(verb).run(rest)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a failure still has a handler
        return status
    except ValueError as error:
        return _failed(verb, error, 2)
    except RunFailed as error:
        return _failed(verb, error, error.status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # the reader of our output has left (`ragen envs | head`)
        return 0
    except OSError as error:
        _discard_output()
        return _failed(verb, f"{error.strerror}: {error.filename or 'the output'}" if error.strerror else error, 1)


def verb_module(verb: str) -> ModuleType:
    return importlib.import_module(f"ragen.cli.{verb}")


def top_parser(with_options: bool = False) -> argparse.ArgumentParser:
    """The verbs for `ragen --help`; `with_options` adds the options of every verb, for shell completion."""
    about = "Multi-turn reinforcement learning for language-model agents."
    parser = argparse.ArgumentParser(prog="ragen", description=about)
    parser.add_argument("--version", action="version", version=f"ragen {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose in VERBS.items():
        parents = [verb_module(name).parser()] if with_options else []
        verbs.add_parser(name, help=purpose, parents=parents, add_help=False)
    return parser


class CommandParser(argparse.ArgumentParser):
    """Its help is the docstring of a verb: a description, and after the first empty line what follows the options."""

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


def _failed(verb: str, error: object, status: int) -> int:
    with suppress(OSError):  # stderr may be a file on a full disk
        print(harmless(f"ragen {verb}: {error}"), file=sys.stderr)
    return status


def _discard_output() -> None:
    """Drop what is still buffered; otherwise the interpreter tries to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
