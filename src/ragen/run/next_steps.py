"""The last lines of a run: commands to copy, which open its report, play its model and compare it with its start.

next_steps(config, folder)
# ["./ragen report checkpoints/RAGEN/pocket-sokoban --open",
#  "./ragen play sokoban --agent checkpoints/RAGEN/pocket-sokoban",
#  "./ragen eval checkpoints/RAGEN/pocket-sokoban --with-base"]
"""

from pathlib import Path

from ragen.command_hint import hint
from ragen.config.derive import MERGED
from ragen.config.schema import Config
from ragen.env.registry import SHORT_NAMES, catalogue
from ragen.store import lineage


def last_lines(config: Config, folder: Path, report: Path) -> list[str]:
    """Where the report is, and the commands, each on a line that works as printed."""
    lines, commands = [f"report: {report}"], next_steps(config, folder)
    trainer = config.trainer
    if len(commands) > 1:
        lines.append("open the report, watch the agent play, evaluate it against its start:")
    elif not (trainer.gradient_analysis_only or trainer.val_only):
        lines.append(
            f"no weights were kept (trainer.save_freq={trainer.save_freq}): to play or evaluate the agent, train it "
            "with trainer.save_freq=N, which saves every N steps and at the end. Open the report:"
        )
    return [*lines, *commands]


def next_steps(config: Config, folder: Path) -> list[str]:
    """The command for the report; where weights were kept also those to play and to evaluate them."""
    commands = [hint("report", folder, "--open")]
    if _has_weights(folder):
        game = _game(config, config.es_manager.val.env_configs.tags[0])
        commands += [hint("play", game, "--agent", folder), hint("eval", folder, "--with-base")]
    return commands


def _has_weights(folder: Path) -> bool:
    """A checkpoint of the run, or the merged model beside it."""
    is_merged = lineage.is_tuning(folder) and lineage.holds_model(folder.resolve().parent / MERGED)
    return is_merged or lineage.newest_checkpoint(folder) is not None


def _game(config: Config, tag: str) -> str:
    """The short name of the game that a tag plays, or the tag."""
    tags, env_type = catalogue(), config.custom_envs[tag].env_type
    return next((name for name, other in SHORT_NAMES.items() if tags[other].env_type == env_type), tag)
