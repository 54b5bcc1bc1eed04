"""The command line: one verb per task. Heavy imports happen inside the verb that needs them.

ragen train --config-name _2_sokoban trainer.test_freq=5 --dry-run
ragen play sokoban
"""

import argparse
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ragen import __version__
from ragen.typed import ConfigError, RunFailed, did_you_mean

if TYPE_CHECKING:
    from ragen.config.compose import Resolved

STATUSES = {"finished": 0, "early_stopped": 3, "interrupted": 130}  # of a run, as exit statuses

TRAIN_EXAMPLES = """examples:
  ragen train sokoban --dry-run
  ragen train --config-name _2_sokoban es_manager.train.group_size=8 --dry-run
  ragen train frozenlake training.n_rollout=8 training.ppo_batch_size=64 \\
      optimization.adv_estimator=brpo --dry-run

values (Hydra's forms):
  key=value   key=[8]   key="'0,1'"   key=null   key=
  +key=value  ~key      key='${other.key}'
"""

POCKET_EXAMPLES = """examples:
  ragen pocket build --dry-run
  ragen pocket build --output models/pocket
  ragen train sokoban model.base_model=models/pocket
"""

PLAY_EXAMPLES = """keys:
  arrows or w a s d, or the number or name of an action
  u undo   h hint   p the prompt of a model   r restart   n next level   q quit
  Without a terminal, one answer is read per line.

examples:
  ragen play sokoban
  ragen play CoordFrozenLake --seed 7 --split val
  ragen play sokoban --agent optimal
  ragen play bandit --agent random --prompt
  PYTHONPATH=$PWD ragen play my_module:MyEnvironment
"""


RUNS_EXAMPLES = """examples:
  ragen runs
  ragen runs model_saving/kl_sweep_Qwen2.5-3B --sort success
  ragen runs --metric actor/entropy
  ragen runs --compare pocket-sokoban pocket-sokoban-2
"""


class _Parser(argparse.ArgumentParser):
    """Says the nearest option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match("unrecognized arguments: (--[a-z-]+)", message)
        super().error(message + (did_you_mean(unknown[1], self._option_string_actions) if unknown else ""))


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0] == "train":
        # Options and key=value words may come in any order, which sub-parsers cannot do.
        options = _train_parser().parse_intermixed_args(arguments[1:])
        options.arguments = arguments[1:]
        verb = _train
    elif arguments[0] == "sweep":
        options, verb = arguments[1:], _sweep
    else:
        options = parser.parse_args(arguments)
        verb = options.verb
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without √ still shows the board
    try:
        status = verb(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure has a handler
        return status
    except ValueError as error:
        print(f"ragen {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"ragen {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # the reader of our output went away (`ragen envs | head`): nothing to report
        return 0
    except OSError as error:
        _discard_output()
        print(f"ragen {arguments[0]}: {error.strerror or error}: {error.filename or 'the output'}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """What is still buffered cannot be written; without this the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ragen", description="Multi-turn reinforcement learning for language-model agents."
    )
    parser.add_argument("--version", action="version", version=f"ragen {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    verbs.add_parser("train", help="train an agent, or show the plan of a run (--dry-run)", add_help=False)
    verbs.add_parser("sweep", help="run a documented experiment: many runs, one table", add_help=False)
    play = verbs.add_parser(
        "play",
        help="play an environment in the terminal, or watch a solver play",
        description="Play a level by hand, or watch random or optimal play.",
        epilog=PLAY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    play.add_argument(
        "environment",
        metavar="ENV",
        help="sokoban, frozenlake, bandit, a tag (see ragen envs), or your own as module:Class",
    )
    play.add_argument("--seed", type=int, default=0, help="which level (default 0)")
    play.add_argument(
        "--split", metavar="{train,val,test,sft}", default="val", help="which set of levels (default val)"
    )
    play.add_argument("--agent", metavar="{human,random,optimal}", default="human", help="who plays (default human)")
    play.add_argument("--prompt", action="store_true", help="show the prompt that a model would see")
    play.set_defaults(verb=_play)
    report = verbs.add_parser(
        "report",
        help="write the HTML report of a run or of a whole experiment",
        description="Write the HTML report of a run, also of one that still goes on or was killed; or of an "
        "experiment, with a table of all its cells in Markdown besides.",
        epilog="examples:\n  ragen report checkpoints/RAGEN/pocket-sokoban\n  ragen report logs/kl_sweep_pocket.log",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("folder", metavar="RUN|SWEEP", help="a run folder, or an experiment's summary log or folder")
    report.set_defaults(verb=_report)
    _add_runs(verbs)
    doctor = verbs.add_parser(
        "doctor",
        help="what this machine has, and which experiments can run on it",
        description="What this machine has, and which of the documented experiments can run on it with which model. "
        "Exit status 1 if not even the embedded model can be trained.",
    )
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(verb=_doctor)
    pocket = verbs.add_parser(
        "pocket",
        help="build the embedded model from solver data",
        description="Build the embedded model from solver data, as the weights that come with ragen.",
        epilog=POCKET_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pocket.add_argument("action", choices=["build"], help="what to do")
    pocket.add_argument("--output", default="models/pocket", metavar="DIR", help="folder (default models/pocket)")
    pocket.add_argument("--steps", type=int, default=None, help="training steps (default: those of the recipe)")
    pocket.add_argument("--dry-run", action="store_true", help="say what would be built and stop")
    pocket.set_defaults(verb=_pocket)
    envs = verbs.add_parser(
        "envs",
        help="list the environments, with random and optimal success",
        description="List every tag: the turns and actions that its agents have, and how often random and optimal "
        "play succeed with them.",
    )
    envs.add_argument("--levels", type=int, default=64, help="validation levels to average over (default 64)")
    envs.set_defaults(verb=_envs)
    return parser


def _add_runs(verbs: Any) -> None:
    runs = verbs.add_parser(
        "runs",
        help="list and compare the runs on disk",
        description="List or compare the runs below checkpoints/ and model_saving/, or elsewhere.",
        epilog=RUNS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_argument("folders", nargs="*", metavar="FOLDER", help="where to look for runs")
    runs.add_argument("--sort", default="age", metavar="COLUMN", help="a column of the list (default age)")
    runs.add_argument("--metric", metavar="NAME", help="show this metric in place of validation success")
    runs.add_argument("--compare", nargs="+", metavar="RUN", help="folders or names of two or more runs")
    runs.add_argument("--json", action="store_true", help="the same as JSON")
    runs.set_defaults(verb=_runs)


def _train_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ragen train",
        usage="ragen train [ENV | --config-name RECIPE] [key=value ...] [--dry-run]",
        description="Resolve a run from an environment name or a recipe.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="ENV key=value", help="sokoban, frozenlake or two_armed_bandit; and overrides"
    )
    parser.add_argument("--config-name", "-cn", metavar="RECIPE", help="base, _1_bandit, _2_sokoban, _3_frozen_lake")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with recipes of your own")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return parser


def _train(options: argparse.Namespace) -> int:
    from ragen.config.compose import resolve
    from ragen.config.explain import explain

    if options.multirun:
        raise ValueError("--multirun: one call is one run; for several see `ragen sweep --help`")
    options.config_dir = _from_caller(options.config_dir)
    resolved = resolve(options.words, options.config_name, options.config_dir)
    if options.dry_run:
        print(explain(resolved), end="")
        return 0
    if "RANK" not in os.environ:  # a worker's launcher has said it already
        _say_what_is_meant(resolved)

    from ragen.train import supported

    supported.check(resolved.config)
    from ragen.train.launcher import launch, leave, must_launch

    trainer = resolved.config.trainer
    if must_launch(trainer.n_gpus_per_node * trainer.nnodes):
        return launch(trainer.n_gpus_per_node, trainer.nnodes, options.arguments)

    from ragen.train.loop import train
    from ragen.train.memory import OutOfMemory

    try:
        return leave(STATUSES[train(resolved.config).status])
    except OutOfMemory as error:
        raise RunFailed(f"{error}\nWith half of each:\n  {_command(options, error.words)}") from error


def _command(options: argparse.Namespace, words: Sequence[str]) -> str:
    """The command that was typed, with more words, as far as they go together with those that were typed."""
    from ragen.config.compose import resolve

    added: list[str] = []
    for word in words:
        with suppress(ConfigError):
            resolve([*options.words, *added, word], options.config_name, options.config_dir)
            added.append(word)
    return shlex.join(["./ragen", "train", *options.arguments, *added])


def _sweep(arguments: Sequence[str]) -> int:
    from ragen.experiment.command import sweep

    return sweep(arguments)


def _say_what_is_meant(resolved: "Resolved") -> None:
    for key, reason in resolved.no_effect.items():
        print(f"no effect: {key}: {reason}", file=sys.stderr)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    origin = resolved.origins.get("model_path", "the default")
    print(f"model: {resolved.config.model_path} ({origin.removeprefix('derived: ')})", file=sys.stderr)


def _from_caller(folder: str | None) -> str | None:
    """A relative folder is meant from where the user is; the entry scripts change to the repository's root."""
    caller = os.environ.pop("RAGEN_CALLER_DIR", "")
    return folder if folder is None else os.path.join(caller, folder)


def _play(options: argparse.Namespace) -> int:
    from ragen.play import play

    return play(options.environment, options.seed, options.split, options.agent, options.prompt)


def _envs(options: argparse.Namespace) -> int:
    from ragen.play import list_environments

    return list_environments(options.levels)


def _report(options: argparse.Namespace) -> int:
    from ragen.report.folder import RunFolder
    from ragen.report.html import write_report

    folder = RunFolder(_from_caller(options.folder))
    if folder.metrics_path.exists():
        print(f"report: {write_report(folder)}")
        return 0
    from ragen.experiment.sweep_report import find_record, write_sweep_report

    record = find_record(folder.path)
    if record is None:
        raise ValueError(
            f"{folder} is no run folder, which has a {folder.metrics_path.name}, and no experiment: name its summary "
            "log, such as logs/kl_sweep_Qwen2.5-3B.log"
        )
    for path in write_sweep_report(record):
        print(f"report: {path}")
    return 0


def _runs(options: argparse.Namespace) -> int:
    from ragen.runs import compare_runs, list_runs

    caller = os.environ.pop("RAGEN_CALLER_DIR", "")
    folders = [os.path.join(caller, folder) for folder in options.folders]
    if options.compare:
        return compare_runs(options.compare, folders, options.json, caller)
    return list_runs(folders, options.sort, options.metric, options.json)


def _doctor(options: argparse.Namespace) -> int:
    from ragen.doctor import examine

    return examine(options.json)


def _pocket(options: argparse.Namespace) -> int:
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps}: must be at least 1")
    from pathlib import Path

    from ragen.model.pocket.build import STEPS, build, describe

    steps = STEPS if options.steps is None else options.steps
    print(describe(steps))
    if not options.dry_run:
        build(Path(options.output), steps)
    return 0
