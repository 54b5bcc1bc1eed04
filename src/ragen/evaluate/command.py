"""`ragen eval`: the command line of evaluation.

ragen eval pocket --env sokoban --episodes 64 --samples 4
ragen eval checkpoints/RAGEN/pocket-sokoban pocket --max-turns 5,25
ragen eval --api-base http://127.0.0.1:8000/v1 --api-model pocket --env sokoban
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.command_hint import hint
from ragen.config.quoting import quoted
from ragen.errors import ConfigError, RunFailed
from ragen.evaluate import models
from ragen.evaluate.models import LocalModel, Model, ServerModel
from ragen.evaluate.setting import Setting, Wanted, settings
from ragen.extras import require
from ragen.invocation_dir import from_caller
from ragen.store.lineage import is_path

FRESH = "--fresh"
STATUSES = {"finished": 0, "failed": 1, "stopped": 3, "environment_failed": 4}
LONGEST_TIMEOUT = 1_000_000  # seconds; sockets refuse an infinite one
EXAMPLES = """a model is
  a Hugging Face directory or hub name, pocket, a checkpoint (.../global_step_200),
  a run, by name or directory (its best checkpoint if it keeps one, else the newest;
  for fine-tuning the merged model), or the summary log of an experiment (the newest
  checkpoint of each of its runs)

examples:
  ragen eval pocket
  ragen eval pocket --env frozenlake --episodes 128 --samples 8
  ragen eval pocket-sokoban --with-base       # a run against the model it began from
  ragen eval checkpoints/RAGEN/mine/global_step_150 pocket --max-turns 5,25
  ragen eval --api-base http://127.0.0.1:8000/v1 --api-model mine --env sokoban
  ragen eval pocket --output results/mine --token-ids output.format=jsonl

Run the same command to resume an interrupted evaluation. Exit status: 0 done,
1 some episodes failed, 2 wrong usage, 3 the budget was spent, 4 the environment
failed in too many episodes, 130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ragen eval",
        usage="ragen eval MODEL ... [--env TAG | --config-name RECIPE] [key=value ...]",
        description="Play validation levels with one or several models: success, pass@k, return,\n"
        "turns, tokens and invalid replies with intervals, and random and optimal play.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("arguments", nargs="*", metavar="MODEL key=value", help="models, and overrides as for training")
    add("--env", action="append", default=[], metavar="TAG", help="environments: a, or a,b (ragen envs)")
    add("--config-name", "-cn", metavar="RECIPE", help="setting of a recipe, such as eval or _2_sokoban")
    add("--config-dir", "-cd", metavar="DIR", help="a directory with your own recipes")
    add("--episodes", type=int, metavar="N", help="levels (default 32; a checkpoint: those of its run)")
    add("--samples", type=int, metavar="K", help="episodes of each level (default 16; a checkpoint: as its run)")
    add("--max-turns", default="", metavar="N[,N]", help="replies in an episode; several limits in one table")
    add("--temperature", type=float, metavar="T", help="of sampling; 0 is greedy (default 0.5)")
    add("--split", default="val", metavar="{train,val,test,sft}", help="which levels (default val)")
    add("--output", metavar="DIR", help="where to write results (output.dir, default results/eval)")
    add("--token-ids", action="store_true", help="write token ids and log-probs to the JSON lines too")
    add("--no-report", dest="page", action="store_false", help="write no page and no Markdown table")
    add(FRESH, action="store_true", help="discard what an interrupted evaluation has finished")
    add("--with-base", action="store_true", help="also evaluate the models that checkpoints were trained from")
    add("--keep-journal", action="store_true", help="keep the episodes, so that later calls do not play them again")
    add("--replace", dest="replaces", action="store_true", help="overwrite another evaluation of the same file name")
    add("--dry-run", action="store_true", help="print what would be played and stop")
    add = made.add_argument_group("models behind an OpenAI-compatible server").add_argument
    add("--api-base", metavar="URL", help="such as http://127.0.0.1:8000/v1")
    add("--api-model", action="append", default=[], metavar="NAME", help="one or several")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key")
    add("--concurrency", type=int, default=16, metavar="N", help="requests at a time (default 16)")
    add(
        "--patience", dest="patience_s", type=float, default=600.0, metavar="S", help="seconds of retries (default 600)"
    )
    add("--timeout", dest="timeout_s", type=float, default=600.0, metavar="S", help="seconds of one request (600)")
    add("--max-requests", type=int, metavar="N", help="budget of requests")
    add("--max-tokens", type=int, metavar="N", help="budget of tokens, prompts and replies")
    add("--no-prefill", dest="prefill", action="store_false", help="do not send the forced opening of replies")
    return made


def command(arguments: Sequence[str], caller: str = "") -> int:
    """Run `ragen eval …` and return its exit status. Relative paths are relative to the directory `caller`."""
    options = parser().parse_intermixed_args(list(arguments))
    options.arguments = [_from_caller(argument, caller) for argument in options.arguments]
    for name in ("config_dir", "output"):
        if getattr(options, name) is not None:
            setattr(options, name, from_caller(getattr(options, name), caller))
    wanted, overrides = read(options)
    found = settings(wanted, overrides)
    if options.dry_run:
        print("\n".join(describe(wanted, found, options)))
        return 0
    if options.api_base is not None:
        require("api")
    return _run(wanted, found, options, how_to_resume(arguments))


def _from_caller(argument: str, caller: str) -> str:
    """The path of a directory or summary log; overrides and other names of models stay as they are."""
    path = from_caller(argument, caller)
    is_meant = os.path.exists(path) or (is_path(argument) and not os.path.exists(argument))
    return path if caller and not _is_override(argument) and is_meant else argument


def _is_override(argument: str) -> bool:
    """`key=value` or `~key`; a path with `=` in it is a path."""
    key, equals, _ = argument.partition("=")
    return "/" not in key and bool(equals or key.startswith("~"))


def read(options: argparse.Namespace) -> tuple[Wanted, list[str]]:
    """The options, and the overrides."""
    names = [argument for argument in options.arguments if not _is_override(argument)]
    overrides = [argument for argument in options.arguments if _is_override(argument)]
    if (options.api_base is None) != (not options.api_model):
        raise ConfigError("--api-base URL and --api-model NAME belong together")
    local = [model for name in names for model in _local_models(name, options.dry_run)]
    players: list[Model] = [*models.with_bases(local)] if options.with_base else [*local]
    players += [ServerModel(options.api_base.rstrip("/"), name, options.api_key_env) for name in options.api_model]
    if not players:
        raise ConfigError("name a model: pocket, a directory, a checkpoint, or --api-base URL --api-model NAME")
    _check_numbers(options)
    if options.output is not None:
        if any(override.startswith("output.dir=") for override in overrides):
            raise ConfigError("--output and output.dir set the same value: keep one of them")
        overrides = [f"output.dir={quoted(options.output)}", *overrides]
    environments = [name for item in options.env for name in item.split(",")]
    try:
        max_turns = [int(part) for part in options.max_turns.split(",")] if options.max_turns else []
    except ValueError:
        raise ConfigError(f"--max-turns {options.max_turns}: give numbers, such as 5 or 5,25") from None
    distinct = models.with_distinct_labels(players)
    return _filled(Wanted, options, models=distinct, environments=environments, max_turns=max_turns), overrides


def _filled(kind: type, options: argparse.Namespace, **values: Any) -> Any:
    """A dataclass whose fields, but for `values`, are the options of the same names."""
    names = [spec.name for spec in fields(kind) if spec.name not in values]
    return kind(**{name: getattr(options, name) for name in names}, **values)


def _local_models(name: str, dry_run: bool) -> list[LocalModel]:
    if not re.search(r"\.log(\.\d+)?$", name):
        return [models.local_model(name)]
    if dry_run and not Path(name).exists():
        return [LocalModel(name, f"every run of {name}, which does not exist yet")]
    return models.models_of_experiment(Path(name), lambda text: print(f"note: {text}", file=sys.stderr))


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("concurrency", "max_requests", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name, seconds in (("patience", options.patience_s), ("timeout", options.timeout_s)):
        if not seconds > 0:
            raise ConfigError(f"--{name} {seconds:g}: must be above 0")
    if options.timeout_s > LONGEST_TIMEOUT:
        raise ConfigError(f"--timeout {options.timeout_s:g}: must be at most {LONGEST_TIMEOUT} seconds")
    temperature = options.temperature
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(f"--temperature {temperature}: must be 0 (greedy) or more")


def describe(wanted: Wanted, found: Sequence[Setting], options: argparse.Namespace) -> list[str]:
    """What would be done, line by line."""
    from ragen.evaluate.output import check_keys, notes_on, output_path

    config = found[0].config
    check_keys(config.output)
    envs, rollout = config.es_manager.val, config.actor_rollout_ref.rollout
    sampling, shares = rollout.val_kwargs, zip(envs.env_configs.tags, envs.env_configs.n_groups, strict=True)
    is_greedy = not sampling.do_sample or sampling.temperature == 0
    num = sum(envs.env_configs.n_groups) * envs.group_size
    path = output_path(config.output, datetime.now())
    if_taken = "any other evaluation there is replaced" if options.replaces else "numbered if another evaluation has it"
    lines = [
        f"models: {', '.join(model.label for model in wanted.models)}",
        f"setting: {found[0].start}",
        f"levels: {', '.join(f'{levels} x {tag}' for tag, levels in shares)}, {wanted.split} seeds from "
        f"{config.seed.val}, {envs.group_size} episodes of each",
        f"turns: {', '.join(str(setting.max_turn) for setting in found)}; at most "
        f"{config.agent_proxy.max_actions_per_turn} actions in a turn",
        f"sampling: {'greedy' if is_greedy else f'temperature {sampling.temperature:g}, top_p {sampling.top_p:g}'}, "
        f"at most {rollout.response_length} tokens in a reply",
        f"episodes: {num} for each model and limit of turns, {num * len(wanted.models) * len(found)} in all",
        f"output: {path}{f'; {if_taken}' if path.exists() else ''}",
    ]
    if options.api_base is not None:
        budget = {"requests": options.max_requests, "tokens": options.max_tokens}
        limits = "".join(f", {limit} {name} in all" for name, limit in budget.items() if limit)
        limits = f"{options.concurrency} requests at a time{limits}"
        lines.append(f"server: {options.api_base}, key from {options.api_key_env}, {limits}")
    notes = [*notes_on(config.output), *(note for setting in found for note in setting.notes)]
    return lines + [f"note: {note}" for note in notes]


def _run(wanted: Wanted, found: Sequence[Setting], options: argparse.Namespace, resume: str) -> int:
    from ragen.evaluate.report import print_table
    from ragen.evaluate.run import EvaluationPlan, ServerOptions, evaluate
    from ragen.terminal import Screen

    server = _filled(ServerOptions, options)
    try:
        result = evaluate(_filled(EvaluationPlan, options, wanted=wanted, settings=found, server=server))
    except KeyboardInterrupt:
        print(resume, file=sys.stderr)
        raise
    except RunFailed as error:
        raise RunFailed(f"{error}\n{resume}") from error
    print_table(result.rows, Screen())
    print(f"episodes: {result.path}")
    if result.report is not None:
        print(f"report: {result.report}")
    if result.status != "finished":
        print(resume, file=sys.stderr)
    return STATUSES[result.status]


def how_to_resume(arguments: Sequence[str]) -> str:
    """Without `--fresh`, which would discard what has been finished."""
    kept = [argument for argument in arguments if argument != FRESH]
    command = "the same command" if len(kept) == len(arguments) else f"the same command without {FRESH}"
    return f"finished episodes are kept; run {command} to resume: {hint('eval', *kept)}"
