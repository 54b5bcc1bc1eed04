"""Play a level by hand, or watch random play, optimal play or a model.

keys:
  arrows or w a s d, or the number or name of an action
  u undo   h hint   p the prompt of a model   r restart   n next level   q quit
  Without a terminal, one answer is read per line. Where any text is an action,
  type it and press Enter; the commands are then :u :h :p :r :n :q.

examples:
  ragen play sokoban
  ragen play CoordFrozenLake --seed 7 --split val
  ragen play sokoban --agent optimal
  ragen play bandit --agent random --prompt
  ragen play sokoban --agent pocket --temperature 0.5
  ragen play sokoban --agent pocket-sokoban           # a run: its best weights
  PYTHONPATH=$PWD ragen play my_module:MyEnvironment
"""

import argparse
from collections.abc import Sequence

from ragen.cli import CommandParser
from ragen.errors import ConfigError
from ragen.invocation_dir import caller_folder, model_from


def parser() -> argparse.ArgumentParser:
    made = CommandParser("play", __doc__)
    environment = "sokoban, frozenlake, bandit, a tag (see ragen envs), or your own as module:Class"
    made.add_argument("environment", metavar="ENV", help=environment)
    made.add_argument("--seed", type=int, default=0, help="which level (default 0)")
    splits = "{train,val,test,sft}"
    made.add_argument("--split", metavar=splits, default="val", help="which set of levels (default val)")
    agent = "who plays (default human); a model: pocket, a run, a checkpoint or a directory"
    made.add_argument("--agent", metavar="{human,random,optimal}|MODEL", default="human", help=agent)
    made.add_argument("--temperature", type=float, default=0.0, help="of a model's sampling (default 0: greedy)")
    made.add_argument("--prompt", action="store_true", help="show the prompt that a model would see")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from ragen.env.base import split_index
    from ragen.env.failure import call
    from ragen.env.solve import NoExactAnswer
    from ragen.play.game import PLAYERS, find_game

    split_index(options.split)  # rejects an unknown split
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: must not be negative")
    agent, level = model_from(options.agent, caller_folder()), (options.seed, options.split)
    if agent not in PLAYERS:
        from ragen.play import model

        return model.play(options.environment, *level, agent, options.prompt, options.temperature)
    game = find_game(options.environment)
    where = f"{options.environment}, {options.split} levels from {options.seed}"  # a part of it may know better
    ours = (ConfigError, NoExactAnswer, OSError, EOFError)
    if agent == "human":
        from ragen.play import person

        return call(lambda: person.play(game, *level, options.prompt), where, passes=ours)
    from ragen.play import solver

    return call(lambda: solver.play(game, *level, agent, options.prompt), where, passes=ours)
