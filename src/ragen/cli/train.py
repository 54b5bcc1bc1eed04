"""Train an agent from an environment name or a recipe.

examples:
  ragen train sokoban --dry-run
  ragen train --config-name _2_sokoban es_manager.train.group_size=8 --dry-run
  ragen train model_path=random:Qwen2.5-3B --dry-run --gpu-memory 80GB
  ragen train frozenlake training.n_rollout=8 training.ppo_batch_size=64 \\
      optimization.adv_estimator=brpo --dry-run

values (Hydra syntax):
  key=value   key=[8]   key="'0,1'"   key=null   key=
  +key=value  ~key      key='${other.key}'
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ragen.cli import CommandParser
from ragen.command_hint import hint
from ragen.errors import ConfigError, RunFailed
from ragen.extras import install_loggers, require
from ragen.invocation_dir import caller_folder, from_caller

if TYPE_CHECKING:
    from ragen.config.compose import Resolved
    from ragen.config.schema import Config

# By the status of a run.
EXIT_STATUSES = {"finished": 0, "early_stopped": 3, "environment_failed": 4, "interrupted": 130, "preempted": 143}


def parser() -> argparse.ArgumentParser:
    return run_parser("train", __doc__)


def run_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """The options of every training run."""
    usage = f"ragen {verb} [ENV | --config-name RECIPE] [key=value ...] [--dry-run]"
    made = CommandParser(verb, about, usage=usage, allow_abbrev=False)
    made.add_argument(
        "overrides", nargs="*", metavar="ENV key=value", help="sokoban, frozenlake or two_armed_bandit; and overrides"
    )
    made.add_argument("--config-name", "-cn", metavar="RECIPE", help="base, _1_bandit, _2_sokoban, _3_frozen_lake")
    made.add_argument("--config-dir", "-cd", metavar="DIR", help="a directory with your own recipes")
    made.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    made.add_argument("--gpu-memory", metavar="SIZE", help="with --dry-run: for a GPU with this memory, such as 80GB")
    made.add_argument("--stage", choices=["sft", "rl"], help="only this stage of rl_or_sft=sft_then_rl")
    made.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return made


def run(arguments: Sequence[str]) -> int:
    # Options and overrides may come in any order.
    options = parser().parse_intermixed_args(arguments)
    if options.multirun:
        raise ConfigError(f"--multirun: one call is one run; for several runs see `{hint('sweep', '--help')}`")
    caller = caller_folder()
    if options.config_dir is not None:
        options.config_dir = from_caller(options.config_dir, caller)

    from ragen.api import check_stage, run_config
    from ragen.config.explain import Tuning, explain
    from ragen.run.prepare import prepare
    from ragen.sft.output_dir import planned_output

    if options.gpu_memory is not None and not options.dry_run:
        raise ConfigError(f"--gpu-memory {options.gpu_memory}: a run uses the GPU that is here; add --dry-run")
    resolved = prepare(options.overrides, options.config_name, options.config_dir)
    check_stage(resolved.config, options.stage)
    if options.dry_run:
        tuning = None if resolved.config.rl_or_sft == "rl" else Tuning(*planned_output(resolved.config))
        print(explain(resolved, options.stage, tuning, _memory_lines(resolved.config, options.gpu_memory)), end="")
        return 0
    if "RANK" not in os.environ:  # a worker's launcher has printed them already
        _print_notes(resolved)
        _install_extras(resolved.config)

    from ragen.distributed.launcher import leave, must_launch

    trainer = resolved.config.trainer
    if must_launch(trainer.n_gpus_per_node * trainer.nnodes):
        return _launch(resolved.config, options.stage, arguments)

    from ragen.run.memory import OutOfMemory

    try:
        return leave(EXIT_STATUSES[run_config(resolved.config, options.stage).status])
    except OutOfMemory as error:
        command = smaller_command(options, arguments, error.overrides)
        raise RunFailed(f"{error}\nWith half of each:\n  {command}") from error


def _memory_lines(config: "Config", gpu_memory: str | None) -> list[str]:
    """The memory plan for the GPU that is named, or else for the one that is here. A run that cannot fit is refused."""
    from ragen.machine import ram_bytes, read_size
    from ragen.run.nearest_fit import check_named, gpu_of

    if gpu_memory is None:
        planned = check_named(config, gpu_of(config), ram_bytes()[1])
    else:
        planned = check_named(config, read_size(gpu_memory))
        if planned is None:
            return [
                f"memory: not planned for {gpu_memory}: the shape of the model is not known before it is downloaded"
            ]
    return [] if planned is None else [planned.line()]


def _install_extras(config: "Config") -> None:
    if config.rl_or_sft != "rl":
        require("sft")
        install_loggers(config.sft.training.logger)
    if config.rl_or_sft != "sft":
        install_loggers(config.trainer.logger)


def _launch(config: "Config", stage: str | None, arguments: Sequence[str]) -> int:
    """Start the workers of a run; each stage of sft_then_rl has its own, so that the first frees its memory."""
    from ragen.distributed.launcher import launch
    from ragen.sft.output_dir import tuning_config, wait_for_others

    stages: list[list[str]] = [[]]
    if config.rl_or_sft == "sft_then_rl" and stage != "rl":
        # Workers cannot each wait for another command that fine-tunes the same model.
        wait_for_others(tuning_config(config))
        stages = [["--stage=sft"], ["--stage=rl"]] if stage is None else stages
    status = 0
    for more in stages:
        status = launch(config.trainer.n_gpus_per_node, config.trainer.nnodes, [*arguments, *more])
        if status != 0:
            break
    return status


def smaller_command(options: argparse.Namespace, arguments: Sequence[str], overrides: Sequence[str]) -> str:
    """The command as typed, with the overrides that do not contradict it."""
    from ragen.run.prepare import prepare

    added: list[str] = []
    for override in overrides:
        with suppress(ConfigError):
            prepare([*options.overrides, *added, override], options.config_name, options.config_dir)
            added.append(override)
    typed = [argument for argument in arguments if not argument.startswith("--stage=")]
    return hint("train", *typed, *added)


def _print_notes(resolved: "Resolved") -> None:
    lines = [f"no effect: {line}" for line in resolved.no_effect_lines()]
    lines += [f"note: {note}" for note in resolved.notes]
    origin = resolved.origins.get("model_path", "the default").removeprefix("derived: ")
    print("\n".join([*lines, f"model: {resolved.config.model_path} ({origin})"]), file=sys.stderr)
