"""List every tag: how many turns and actions an agent has, and how often random and optimal play succeed.

examples:
  ragen envs
  ragen envs --levels 512
"""

import argparse
import contextlib
from collections.abc import Sequence

from rich.text import Text

from ragen.cli import CommandParser
from ragen.config import derive
from ragen.config.compose import training_config
from ragen.env.registry import catalogue, make
from ragen.env.solve import baselines
from ragen.errors import ConfigError
from ragen.terminal import Screen, table


def parser() -> argparse.ArgumentParser:
    made = CommandParser("envs", __doc__)
    made.add_argument("--levels", type=int, default=64, metavar="N", help="validation levels to average (default 64)")
    return made


def run(arguments: Sequence[str]) -> int:
    num_levels = parser().parse_args(arguments).levels
    if num_levels < 1:
        raise ConfigError(f"--levels {num_levels}: must be at least 1")
    rows, names, progress = [], list(catalogue()), Screen(stderr=True)
    with progress.status("") if progress.is_terminal else contextlib.nullcontext() as status:
        for number, name in enumerate(names, start=1):
            if status is not None:
                status.update(f"{name}, {number} of {len(names)} tags, {num_levels} levels")
            rows.append(_row(name, num_levels))
    screen = Screen()
    screen.print(f"Success on {num_levels} validation level{'s' if num_levels > 1 else ''}", style="bold")
    for line in lines(rows, screen.width):
        screen.print(line, soft_wrap=True)
    return 0


def _row(tag: str, num_levels: int) -> dict[str, str]:
    """Played with the config that the tag is trained with."""
    config = training_config(tag)
    budget, seeds = derive.budget(config, tag), range(config.seed.val, config.seed.val + num_levels)
    reached = baselines(make(config.custom_envs[tag]), seeds, "val", budget)
    numbers = {"turns": str(budget.turns), "actions": str(budget.total)}
    return {"tag": tag, **numbers, "random": _share(reached.random), "optimal": _share(reached.optimal)}


def _share(success: float | str) -> str:
    return "unknown" if isinstance(success, str) else f"{success:.1%}"


def lines(rows: Sequence[dict[str, str]], width: int) -> list[Text]:
    return table(rows, {name: name for name in rows[0]}, width, right=list(rows[0])[1:], dropped=("turns", "actions"))
