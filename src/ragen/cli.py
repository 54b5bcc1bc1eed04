"""The command line: one verb per task. Heavy imports happen inside the verb that needs them.

ragen train --config-name _2_sokoban trainer.test_freq=5 --dry-run
ragen play sokoban
"""

import argparse
import sys
from collections.abc import Sequence

from ragen import __version__

TRAIN_EXAMPLES = """examples:
  ragen train sokoban --dry-run
  ragen train --config-name _2_sokoban es_manager.train.group_size=8 --dry-run
  ragen train frozenlake training.n_rollout=8 training.ppo_batch_size=64 optimization.adv_estimator=brpo --dry-run

values (Hydra's forms):
  key=value   key=[8]   key="'0,1'"   key=null   key=   +key=value   ~key   key='${other.key}'
"""

PLAY_EXAMPLES = """examples:
  ragen play sokoban
  ragen play CoordFrozenLake --seed 7 --split val
  ragen play sokoban --agent optimal
  ragen play bandit --agent random --prompt
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0] == "train":
        # Options and key=value words may come in any order, which sub-parsers cannot do.
        options = _train_parser().parse_intermixed_args(arguments[1:])
        verb = _train
    else:
        options = parser.parse_args(arguments)
        verb = options.verb
    try:
        return verb(options)
    except ValueError as error:
        print(f"ragen {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away (`ragen envs | head`): nothing to report
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ragen", description="Multi-turn reinforcement learning for language-model agents."
    )
    parser.add_argument("--version", action="version", version=f"ragen {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    verbs.add_parser("train", help="resolve a training run and show its plan (--dry-run)", add_help=False)
    play = verbs.add_parser(
        "play",
        help="play an environment in the terminal, or watch a solver play",
        description="Play a level by hand, or watch random or optimal play.",
        epilog=PLAY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    play.add_argument("environment", metavar="ENV", help="sokoban, frozenlake, bandit, or a tag (see ragen envs)")
    play.add_argument("--seed", type=int, default=0, help="which level (default 0)")
    play.add_argument("--split", default="val", help="train, val, test or sft (default val)")
    play.add_argument("--agent", default="human", help="human, random or optimal (default human)")
    play.add_argument("--prompt", action="store_true", help="show the prompt that a model would see")
    play.set_defaults(verb=_play)
    envs = verbs.add_parser("envs", help="list the environments, with random and optimal success")
    envs.add_argument("--levels", type=int, default=64, help="validation levels to average over (default 64)")
    envs.set_defaults(verb=_envs)
    return parser


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ragen train",
        usage="ragen train [ENV | --config-name RECIPE] [key=value ...] [--dry-run]",
        description="Resolve a run from an environment name (sokoban, frozenlake, two_armed_bandit) or a recipe.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="ENV key=value", help="environment name and overrides")
    parser.add_argument("--config-name", "-cn", metavar="RECIPE", help="base, _1_bandit, _2_sokoban, _3_frozen_lake")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with recipes of your own")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return parser


def _train(options: argparse.Namespace) -> int:
    from ragen.config.compose import resolve
    from ragen.config.explain import explain

    if options.multirun:
        raise ValueError(
            "--multirun: one call is one run; `ragen sweep` will take several values, this version has none yet"
        )
    resolved = resolve(options.words, options.config_name, options.config_dir)
    if options.dry_run:
        print(explain(resolved), end="")
        return 0
    for key, reason in resolved.no_effect.items():
        print(f"no effect: {key}: {reason}", file=sys.stderr)
    raise ValueError("the configuration is valid, but this version cannot train yet; --dry-run shows the resolved plan")


def _play(options: argparse.Namespace) -> int:
    from ragen.play import play

    return play(options.environment, options.seed, options.split, options.agent, options.prompt)


def _envs(options: argparse.Namespace) -> int:
    from ragen.play import list_environments

    return list_environments(options.levels)
