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
from ragen.errors import ConfigError, RunFailed, did_you_mean
from ragen.invocation_dir import caller_folder, from_caller, model_from

if TYPE_CHECKING:
    from ragen.config.compose import Resolved
    from ragen.config.schema import Config

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

SFT_EXAMPLES = """examples:
  ragen sft sokoban sft.training.base_model=Qwen/Qwen2.5-0.5B-Instruct --dry-run
  ragen sft frozenlake sft.training.base_model=smollm2 \\
      sft.data_generation.train_size=500 sft.output_dir=models/sft/frozenlake
  ragen train sokoban rl_or_sft=sft_then_rl sft.output_dir=models/sft/sokoban
"""

MERGE_EXAMPLES = """examples:
  ragen merge checkpoints/RAGEN/pocket-sokoban/global_step_200 --dry-run
  ragen merge checkpoints/RAGEN/pocket-sokoban/global_step_200 \\
      --output models/sokoban-agent
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
  ragen play sokoban --agent pocket --temperature 0.5
  PYTHONPATH=$PWD ragen play my_module:MyEnvironment
"""


SERVE_EXAMPLES = """examples:
  ragen serve pocket
  ragen serve checkpoints/RAGEN/pocket-sokoban/global_step_150 --name mine
  ragen eval --api-base http://127.0.0.1:8000/v1 --api-model mine --env sokoban
"""

RUNS_EXAMPLES = """examples:
  ragen runs
  ragen runs model_saving/kl_sweep_Qwen2.5-3B --sort success
  ragen runs --metric actor/entropy
  ragen runs --compare pocket-sokoban pocket-sokoban-2
"""


PLOT_EXAMPLES = """examples:
  ragen plot gradients checkpoints/ragen/test --list-steps
  ragen plot gradients checkpoints/ragen/test --step 1 51
  ragen plot gradients RUN OTHER_RUN --output-dir pictures
  ragen plot gradients --wandb-path entity/project/run
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
    if arguments[0] in ("train", "sft"):
        # Options and key=value words may come in any order, which sub-parsers cannot do.
        options = _train_parser(arguments[0]).parse_intermixed_args(arguments[1:])
        options.arguments = arguments[1:]
        verb = {"train": _train, "sft": _sft}[arguments[0]]
    elif arguments[0] == "sweep":
        options, verb = arguments[1:], _sweep
    elif arguments[0] == "eval":
        options, verb = arguments[1:], _eval
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
        told = f"{error.strerror}: {error.filename or 'the output'}" if error.strerror else error
        print(f"ragen {arguments[0]}: {told}", file=sys.stderr)
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
    verbs.add_parser("sft", help="fine-tune a model on solved levels, merge it and let it play", add_help=False)
    verbs.add_parser("sweep", help="run a documented experiment: many runs, one table", add_help=False)
    verbs.add_parser("eval", help="let models play the validation levels, and compare them", add_help=False)
    _add_serve(verbs)
    play = verbs.add_parser(
        "play",
        help="play an environment in the terminal, or watch a solver or a model play",
        description="Play a level by hand, or watch random play, optimal play or a model.",
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
    play.add_argument(
        "--agent",
        metavar="{human,random,optimal}|MODEL",
        default="human",
        help="who plays (default human); a model: pocket, a folder or a checkpoint, as for ragen eval",
    )
    play.add_argument("--temperature", type=float, default=0.0, help="of a model's sampling (default 0: greedy)")
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
    _add_plot(verbs)
    doctor = verbs.add_parser(
        "doctor",
        help="what this machine has, and which experiments can run on it",
        description="What this machine has, and which of the documented experiments can run on it with which model. "
        "Exit status 1 if not even the embedded model can be trained.",
    )
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(verb=_doctor)
    _add_merge(verbs)
    pocket = verbs.add_parser(
        "pocket",
        help="build the embedded model from solver data",
        description="Build the embedded model from solver data, as the weights that come with ragen.",
        epilog=POCKET_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pocket.add_argument("action", choices=["build"], help="what to do")
    pocket.add_argument("--output", metavar="DIR", help="folder (default models/pocket)")
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


def _add_serve(verbs: Any) -> None:
    serve = verbs.add_parser(
        "serve",
        help="offer a model to other programs: an OpenAI-compatible server on this machine",
        description="Serve a checkpoint, a model folder or the embedded model to programs on this\n"
        "machine, at /v1/chat/completions. Ctrl-C ends it.",
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("model", metavar="MODEL", help="a checkpoint, a run folder, a model folder, or pocket")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port (default 8000; 0: any that is free)")
    serve.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and reply (default: the model's)"
    )
    serve.add_argument("--name", help="the name that requests give (default: the model's own)")
    serve.add_argument("--api-key-env", metavar="VARIABLE", help="require the API key that this variable holds")
    serve.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="also answer requests to this host name"
    )
    serve.add_argument("--dry-run", action="store_true", help="say what would be served and stop")
    serve.set_defaults(verb=_serve)


def _add_runs(verbs: Any) -> None:
    runs = verbs.add_parser(
        "runs",
        help="list and compare the runs on disk",
        description="List or compare the runs below checkpoints/, model_saving/ and models/, or\nelsewhere.",
        epilog=RUNS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_argument("folders", nargs="*", metavar="FOLDER", help="where to look for runs")
    runs.add_argument("--sort", default="age", metavar="COLUMN", help="a column of the list (default age)")
    runs.add_argument("--metric", metavar="NAME", help="show this metric in place of validation success")
    runs.add_argument("--compare", nargs="+", metavar="RUN", help="folders or names of two or more runs")
    runs.add_argument("--json", action="store_true", help="the same as JSON")
    runs.set_defaults(verb=_runs)


def _add_plot(verbs: Any) -> None:
    plot = verbs.add_parser(
        "plot",
        help="draw the gradient analysis of runs",
        description="Draw what a gradient analysis has measured: pictures, JSON and CSV for\n"
        "each step, and one figure over all steps and runs.",
        epilog=PLOT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plot.add_argument("what", choices=["gradients"], help="what to draw")
    plot.add_argument("folders", nargs="*", metavar="RUN", help="run folders")
    plot.add_argument("--step", nargs="+", action="extend", type=int, metavar="N", help="only these steps")
    plot.add_argument("--list-steps", action="store_true", help="say which steps there are and stop")
    plot.add_argument("--output-dir", metavar="DIR", help="folder (default gradient_analysis_outputs/<run name>)")
    plot.add_argument("--wandb-path", metavar="PATH", help="a W&B run, entity/project/run, in place of a folder")
    plot.set_defaults(verb=_plot)


def _add_merge(verbs: Any) -> None:
    merge = verbs.add_parser(
        "merge",
        help="merge the adapter of a LoRA run into its base: an ordinary model folder",
        description="Write the model of a checkpoint with an adapter (lora.rank above 0) as an\nordinary Hugging Face "
        "folder. Nothing is overwritten, and the checkpoint stays\nas it is.",
        epilog=MERGE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument("checkpoint", metavar="CHECKPOINT", help="global_step_<N> of a run, or a folder with an adapter")
    merge.add_argument("--output", metavar="DIR", help="folder (default CHECKPOINT_merged)")
    merge.add_argument("--base", metavar="MODEL", help="folder or name of the base (default: as the adapter names it)")
    merge.add_argument("--dry-run", action="store_true", help="say what would be written and stop")
    merge.set_defaults(verb=_merge)


def _train_parser(verb: str = "train") -> argparse.ArgumentParser:
    descriptions = {
        "train": "Resolve a run from an environment name or a recipe.",
        "sft": "Fine-tune a model on solved levels, merge the best epoch and let it play the\n"
        "validation levels: ragen train with rl_or_sft=sft.",
    }
    parser = _Parser(
        prog=f"ragen {verb}",
        usage=f"ragen {verb} [ENV | --config-name RECIPE] [key=value ...] [--dry-run]",
        description=descriptions[verb],
        epilog={"train": TRAIN_EXAMPLES, "sft": SFT_EXAMPLES}[verb],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="ENV key=value", help="sokoban, frozenlake or two_armed_bandit; and overrides"
    )
    parser.add_argument("--config-name", "-cn", metavar="RECIPE", help="base, _1_bandit, _2_sokoban, _3_frozen_lake")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with recipes of your own")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument("--stage", choices=["sft", "rl"], help="of rl_or_sft=sft_then_rl, only this part")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return parser


def _sft(options: argparse.Namespace) -> int:
    for word in options.words:
        key, _, value = word.partition("=")
        if key.strip().lstrip("+~") == "rl_or_sft" and value.strip(" '\"") != "sft":
            raise ConfigError(f"{word}: ragen sft only fine-tunes; for other runs it is ragen train … {word}")
    options.words.append("rl_or_sft=sft")
    options.arguments.append("rl_or_sft=sft")
    return _train(options)


def _train(options: argparse.Namespace) -> int:
    from ragen.config.compose import resolve
    from ragen.config.explain import explain
    from ragen.train import check_stage, train_any

    if options.multirun:
        raise ValueError("--multirun: one call is one run; for several see `ragen sweep --help`")
    caller = caller_folder()
    if options.config_dir is not None:
        options.config_dir = from_caller(options.config_dir, caller)
    resolved = resolve(options.words, options.config_name, options.config_dir)
    check_stage(resolved.config, options.stage)
    if options.dry_run:
        print(explain(resolved, options.stage), end="")
        return 0
    if "RANK" not in os.environ:  # a worker's launcher has said it already
        _say_what_is_meant(resolved)

    from ragen.distributed.launcher import launch, leave, must_launch

    trainer = resolved.config.trainer
    if must_launch(trainer.n_gpus_per_node * trainer.nnodes):
        _wait_for_fine_tuning(resolved.config, options.stage)
        for more in _stages(resolved.config, options.stage):
            status = launch(trainer.n_gpus_per_node, trainer.nnodes, [*options.arguments, *more])
            if status != 0:
                break
        return status

    from ragen.run.memory import OutOfMemory

    try:
        return leave(STATUSES[train_any(resolved.config, options.stage).status])
    except OutOfMemory as error:
        raise RunFailed(f"{error}\nWith half of each:\n  {_command(options, error.words)}") from error


def _wait_for_fine_tuning(config: "Config", stage: str | None) -> None:
    """Workers cannot wait each for itself: what another command is fine-tuning is waited for before they start."""
    from ragen.sft.output_dir import tuning_config, wait_for_others

    if config.rl_or_sft == "sft_then_rl" and stage != "rl":
        wait_for_others(tuning_config(config))


def _stages(config: "Config", stage: str | None) -> list[list[str]]:
    """The words of one launch after the other: where fine-tuning has processes of its own, none of it is left."""
    both = config.rl_or_sft == "sft_then_rl" and stage is None
    return [["--stage=sft"], ["--stage=rl"]] if both else [[]]


def _command(options: argparse.Namespace, words: Sequence[str]) -> str:
    """The command that was typed, with more words, as far as they go together with those that were typed."""
    from ragen.config.compose import resolve

    added: list[str] = []
    for word in words:
        with suppress(ConfigError):
            resolve([*options.words, *added, word], options.config_name, options.config_dir)
            added.append(word)
    typed = [word for word in options.arguments if not word.startswith("--stage=")]
    return shlex.join(["./ragen", "train", *typed, *added])


def _sweep(arguments: Sequence[str]) -> int:
    from ragen.experiment.command import sweep

    return sweep(arguments)


def _eval(arguments: Sequence[str]) -> int:
    from ragen.evaluate.command import command

    return command(arguments, caller_folder())


def _serve(options: argparse.Namespace) -> int:
    from ragen.serve import serve

    model = model_from(options.model, caller_folder())
    access = {"api_key_env": options.api_key_env, "allowed_hosts": options.allowed_host}
    return serve(model, options.host, options.port, options.max_model_len, options.name, options.dry_run, **access)


def _say_what_is_meant(resolved: "Resolved") -> None:
    for line in resolved.no_effect_lines():
        print(f"no effect: {line}", file=sys.stderr)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    origin = resolved.origins.get("model_path", "the default")
    print(f"model: {resolved.config.model_path} ({origin.removeprefix('derived: ')})", file=sys.stderr)


def _play(options: argparse.Namespace) -> int:
    from ragen.play.game import play

    agent = model_from(options.agent, caller_folder())
    return play(options.environment, options.seed, options.split, agent, options.prompt, options.temperature)


def _envs(options: argparse.Namespace) -> int:
    from ragen.play.game import list_environments

    return list_environments(options.levels)


def _report(options: argparse.Namespace) -> int:
    from ragen.report.html import write_report
    from ragen.store.run_folder import RunFolder

    folder = RunFolder(from_caller(options.folder, caller_folder()))
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
    from ragen.report.runs import compare_runs, list_runs

    caller = caller_folder()
    folders = [from_caller(folder, caller) for folder in options.folders]
    if options.compare:
        return compare_runs(options.compare, folders, options.json, caller)
    return list_runs(folders, options.sort, options.metric, options.json)


def _plot(options: argparse.Namespace) -> int:
    from pathlib import Path

    from ragen.report import gradient_data

    caller = caller_folder()
    sources = [gradient_data.from_folder(from_caller(folder, caller)) for folder in options.folders]
    sources += [gradient_data.from_wandb(options.wandb_path)] if options.wandb_path else []
    if not sources:
        raise ValueError("nothing to draw: name a run folder, or a W&B run with --wandb-path")
    if options.list_steps:
        for source in sources:
            print(f"{source.name}: {', '.join(map(str, gradient_data.steps(source))) or 'no gradient analysis'}")
        return 0
    from ragen.report.gradient_plots import note_without_table, plot

    output = Path(from_caller(options.output_dir, caller)) if options.output_dir else None
    for note in filter(None, map(note_without_table, sources)):
        print(f"note: {note}", file=sys.stderr)
    for path in plot(sources, options.step or (), output):
        print(path)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ragen.cli.doctor import examine

    return examine(options.json)


def _merge(options: argparse.Namespace) -> int:
    from pathlib import Path

    from ragen.store.merge import merge, plan

    caller = caller_folder()
    output = Path(from_caller(options.output, caller)) if options.output else None
    base = model_from(options.base, caller) if options.base else None
    planned = plan(Path(from_caller(options.checkpoint, caller)), output, base)
    print(planned)
    if not options.dry_run:
        merge(planned)
        print(f"merged: {planned.output}")
    return 0


def _pocket(options: argparse.Namespace) -> int:
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps}: must be at least 1")
    from pathlib import Path

    from ragen.sft.pocket.build import STEPS, build, describe

    steps = STEPS if options.steps is None else options.steps
    output = Path(from_caller(options.output, caller_folder()) if options.output else "models/pocket")
    print(describe(steps))
    if not options.dry_run:
        build(output, steps)
    return 0
