"""Resolve what a user typed, and look up on disk the models that it names.

    resolved = prepare(["sokoban", "model_path=checkpoints/RAGEN/pocket-sokoban/global_step_20"])
    resolved.notes          # also: what that run played, and whether it may delete its checkpoint

`config.compose.resolve` knows no run directories. Commands use this function.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ragen.config import compose
from ragen.config.compose import Resolved
from ragen.run import model_notes


def prepare(
    arguments: Iterable[str],
    config_name: str | None = None,
    config_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a command. Raises `ConfigError`, also for a model path that is a run directory and not a model."""
    resolved = compose.resolve(arguments, config_name, config_dir=config_dir, environ=environ)
    model_notes.check_models(resolved)
    return replace(resolved, notes=[*resolved.notes, *model_notes.notes(resolved)])
