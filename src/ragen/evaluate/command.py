"""`ragen eval`: the command line of evaluation.

ragen eval pocket --env sokoban --episodes 64 --samples 4
ragen eval checkpoints/RAGEN/pocket-sokoban pocket --max-turns 5,25
ragen eval --api-base http://127.0.0.1:8000/v1 --api-model pocket --env sokoban
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ragen.errors import ConfigError, RunFailed
from ragen.evaluate import models as named
from ragen.evaluate.setting import Setting, Wanted, quoted, settings
from ragen.invocation_dir import from_caller

FRESH = "--fresh"
STATUSES = {"finished": 0, "failed": 1, "stopped": 3}
LONGEST_TIMEOUT = 1_000_000  # seconds; sockets take no endless one
EXAMPLES = """a model is
  a Hugging Face folder or hub name, pocket, a checkpoint (.../global_step_200),
  a run folder (its newest checkpoint; of fine-tuning what it has merged), or the
  summary log of an experiment (the same of each of its runs)

examples:
  ragen eval pocket
  ragen eval pocket --env frozenlake --episodes 128 --samples 8
  ragen eval checkpoints/RAGEN/mine/global_step_150 pocket --max-turns 5,25
  ragen eval --api-base http://127.0.0.1:8000/v1 --api-model mine --env sokoban
  ragen eval pocket --output results/mine --token-ids output.format=jsonl

An interrupted evaluation goes on with the same command. Exit status: 0 done,
1 some episodes failed, 2 wrong usage, 3 the budget was spent, 130 interrupted.
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
    made.add_argument("words", nargs="*", metavar="MODEL key=value", help="models, and overrides as for training")
    made.add_argument("--env", action="append", default=[], metavar="TAG", help="environments: a, or a,b (ragen envs)")
    made.add_argument("--config-name", "-cn", metavar="RECIPE", help="setting of a recipe, such as eval or _2_sokoban")
    made.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with recipes of your own")
    made.add_argument("--episodes", type=int, metavar="N", help="levels (default 32; a checkpoint: those of its run)")
    made.add_argument("--samples", type=int, metavar="K", help="episodes of each level (default 16; likewise)")
    made.add_argument("--max-turns", default="", metavar="N[,N]", help="replies in an episode, one table for all")
    made.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0 is greedy (default 0.5)")
    made.add_argument("--split", default="val", metavar="{train,val,test,sft}", help="which levels (default val)")
    made.add_argument("--output", metavar="DIR", help="where results go (output.dir, default results/eval)")
    made.add_argument("--token-ids", action="store_true", help="token ids and log-probs in the JSON lines too")
    made.add_argument("--no-report", action="store_true", help="write no page and no Markdown table")
    made.add_argument(FRESH, action="store_true", help="forget what an interrupted evaluation has finished")
    made.add_argument(
        "--with-base", action="store_true", help="also the models that the runs of checkpoints began from"
    )
    made.add_argument(
        "--keep-journal", action="store_true", help="do not play again in a later call, of more models say"
    )
    made.add_argument("--replace", action="store_true", help="write over another evaluation of the same file name")
    made.add_argument("--dry-run", action="store_true", help="say what would be done and stop")
    server = made.add_argument_group("models behind an OpenAI-compatible server")
    server.add_argument("--api-base", metavar="URL", help="such as http://127.0.0.1:8000/v1")
    server.add_argument("--api-model", action="append", default=[], metavar="NAME", help="one or several")
    server.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key")
    server.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests at a time (default 16)")
    server.add_argument("--patience", type=float, default=600.0, metavar="S", help="seconds of retries (default 600)")
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds of one request (600)")
    server.add_argument("--max-requests", type=int, metavar="N", help="budget of requests")
    server.add_argument("--max-tokens", type=int, metavar="N", help="budget of tokens, prompts and replies")
    server.add_argument("--no-prefill", action="store_true", help="do not send the forced opening of replies")
    return made


def command(arguments: Sequence[str], caller: str = "") -> int:
    """Run `ragen eval …` and return its exit status. `caller` is the folder that relative ones are meant from."""
    options = parser().parse_intermixed_args(list(arguments))
    options.words = [_meant(word, caller) for word in options.words]
    for name in ("config_dir", "output"):
        folder = getattr(options, name)
        setattr(options, name, None if folder is None else from_caller(folder, caller))
    wanted, words = read(options)
    found = settings(wanted, words)
    if options.dry_run:
        print("\n".join(describe(wanted, found, options)))
        return 0
    return _run(wanted, found, options, arguments)


def _meant(word: str, caller: str) -> str:
    """A folder or a summary log of the user's; overrides and other names of models stay as they are."""
    there = from_caller(word, caller)
    is_there = os.path.exists(there) or (named.is_path(word) and not os.path.exists(word))
    return there if caller and not _is_override(word) and is_there else word


def read(options: argparse.Namespace) -> tuple[Wanted, list[str]]:
    """The options as they are meant, and the overrides."""
    names = [word for word in options.words if not _is_override(word)]
    words = [word for word in options.words if _is_override(word)]
    local = [model for name in names for model in _local_models(name, options.dry_run)]
    models: list[named.Model] = [*(named.with_bases(local) if options.with_base else local), *_server_models(options)]
    if not models:
        raise ConfigError("name a model: pocket, a folder, a checkpoint, or --api-base URL --api-model NAME")
    _check_numbers(options)
    if options.output is not None:
        if any(word.startswith("output.dir=") for word in words):
            raise ConfigError("--output and output.dir say the same thing: keep one of them")
        words = [f"output.dir={quoted(options.output)}", *words]
    wanted = Wanted(
        models=named.with_distinct_labels(models),
        environments=[name for item in options.env for name in item.split(",")],
        config_name=options.config_name,
        config_dir=options.config_dir,
        episodes=options.episodes,
        samples=options.samples,
        max_turns=_turns(options.max_turns),
        temperature=options.temperature,
        split=options.split,
    )
    return wanted, words


def _local_models(name: str, dry_run: bool) -> list[named.LocalModel]:
    if not name.endswith(".log"):
        return [named.local_model(name)]
    if dry_run and not Path(name).exists():
        return [named.LocalModel(name, f"every run of {name}, which is not there yet")]
    return list(named.models_of_experiment(Path(name), lambda text: print(f"note: {text}", file=sys.stderr)))


def _is_override(word: str) -> bool:
    """`key=value` or `~key`; a path with `=` in it is a path."""
    return (word.startswith("~") and "/" not in word) or ("=" in word and "/" not in word.partition("=")[0])


def _server_models(options: argparse.Namespace) -> list[named.Model]:
    if (options.api_base is None) != (not options.api_model):
        raise ConfigError("--api-base URL and --api-model NAME belong together")
    if options.api_base is None:
        return []
    return [named.ServerModel(options.api_base.rstrip("/"), name, options.api_key_env) for name in options.api_model]


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("concurrency", "max_requests", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("patience", "timeout"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name} {getattr(options, name):g}: must be above 0")
    if options.timeout > LONGEST_TIMEOUT:
        raise ConfigError(f"--timeout {options.timeout:g}: must be at most {LONGEST_TIMEOUT} seconds")
    temperature = options.temperature
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(f"--temperature {temperature}: must be 0 (greedy) or more")


def _turns(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--max-turns {text}: give numbers, such as 5 or 5,25") from None


def describe(wanted: Wanted, found: Sequence[Setting], options: argparse.Namespace) -> list[str]:
    """What would be done, line by line."""
    from ragen.evaluate.output import check_keys, notes_on, output_path

    config = found[0].config
    check_keys(config.output)
    envs, chosen = config.es_manager.val, config.actor_rollout_ref.rollout.val_kwargs
    shares = ", ".join(f"{n} x {tag}" for tag, n in zip(envs.env_configs.tags, envs.env_configs.n_groups, strict=True))
    is_greedy = not chosen.do_sample or chosen.temperature == 0
    num = sum(envs.env_configs.n_groups) * envs.group_size
    turns = ", ".join(str(setting.max_turn) for setting in found)
    path = output_path(config.output, datetime.now())
    if_taken = "whatever it holds is replaced" if options.replace else "with a number, if that is another evaluation's"
    taken = f"; {if_taken}" if path.exists() else ""
    lines = [
        f"models: {', '.join(model.label for model in wanted.models)}",
        f"setting: {found[0].start}",
        f"levels: {shares}, {wanted.split} seeds from {config.seed.val} on, {envs.group_size} episodes of each",
        f"turns: {turns}; {config.agent_proxy.max_actions_per_turn} actions in a turn at most",
        f"sampling: {'greedy' if is_greedy else f'temperature {chosen.temperature:g}, top_p {chosen.top_p:g}'}, "
        f"{config.actor_rollout_ref.rollout.response_length} tokens in a reply at most",
        f"episodes: {num} for each model and limit of turns, {num * len(wanted.models) * len(found)} in all",
        f"output: {path}{taken}",
    ]
    if options.api_base is not None:
        limits = [f"{options.concurrency} requests at a time"]
        limits += [f"{options.max_requests} requests in all"] if options.max_requests else []
        limits += [f"{options.max_tokens} tokens in all"] if options.max_tokens else []
        lines.append(f"server: {options.api_base}, key from {options.api_key_env}, {', '.join(limits)}")
    notes = [*notes_on(config.output), *(note for setting in found for note in setting.notes)]
    return lines + [f"note: {note}" for note in notes]


def _run(wanted: Wanted, found: Sequence[Setting], options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from rich.console import Console

    from ragen.evaluate.run import EvaluationPlan, ServerOptions, evaluate
    from ragen.evaluate.table import print_table

    server = ServerOptions(
        options.concurrency,
        options.patience,
        options.timeout,
        options.max_requests,
        options.max_tokens,
        not options.no_prefill,
    )
    plan = EvaluationPlan(
        wanted,
        found,
        server,
        token_ids=options.token_ids,
        fresh=options.fresh,
        page=not options.no_report,
        keep_journal=options.keep_journal,
        replaces=options.replace,
    )
    again = how_to_go_on(arguments)
    try:
        result = evaluate(plan)
    except KeyboardInterrupt:
        print(again, file=sys.stderr)
        raise
    except RunFailed as error:
        raise RunFailed(f"{error}\n{again}") from error
    print_table(result.rows, Console())
    print(f"episodes: {result.path}")
    if result.report is not None:
        print(f"report: {result.report}")
    if result.status != "finished":
        print(again, file=sys.stderr)
    return STATUSES[result.status]


def how_to_go_on(arguments: Sequence[str]) -> str:
    """What was asked to begin anew has begun: asked so again, it would forget what it has finished."""
    words, is_fresh = [word for word in arguments if word != FRESH], FRESH in arguments
    command = f"the same command{f' without {FRESH}' if is_fresh else ''}"
    return f"what was finished is kept; {command} goes on: ./ragen eval {shlex.join(words)}"
