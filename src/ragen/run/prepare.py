"""Resolve what a user typed, and look up on disk the models that it names.

    resolved = prepare(["sokoban", "model_path=checkpoints/RAGEN/pocket-sokoban/global_step_20"])
    resolved.notes          # also: what that run played, and whether it may delete its checkpoint

`config.compose.resolve` knows no run directories. Commands use this function. Nothing is taken over from an earlier
run: a model plays best by the rules it was trained with, so a note lists the overrides that restore them.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragen.command_hint import hint
from ragen.config import compose
from ragen.config.compose import Resolved
from ragen.config.model_name import folder_of
from ragen.config.quoting import override
from ragen.config.schema import Config
from ragen.config.tree import leaves, value_at
from ragen.errors import raise_any, refused
from ragen.store import lineage, manifest
from ragen.store.run_folder import RunFolder

RULES = (
    *(f"agent_proxy.{name}" for name in ("prompt_style", "enable_think", "max_turn", "max_actions_per_turn")),
    *(f"agent_proxy.{name}" for name in ("action_sep", "context_window_mode", "max_context_window")),
    "actor_rollout_ref.rollout.response_length",
)
NUM_KEPT = "trainer.max_actor_ckpt_to_keep"
ACTOR = "actor_rollout_ref.model.path"


def prepare(
    arguments: Iterable[str],
    config_name: str | None = None,
    config_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a command. Raises `ConfigError`, also for a model path that is a run directory and not a model."""
    resolved = compose.resolve(arguments, config_name, config_dir=config_dir, environ=environ)
    problems = []
    for key, typed_as in resolved.models.items():
        name = value_at(resolved.config, key)
        folder = folder_of(name)
        if folder is not None and (inside := lineage.model_inside(folder)) is not None:
            why = f"this directory is not a model, but holds one: name {inside}"
            problems.append(refused(typed_as, name, why, code="not-a-model"))
    raise_any(problems)
    return replace(resolved, notes=[*resolved.notes, *_model_notes(resolved)])


def _model_notes(resolved: Resolved) -> Iterator[str]:
    """On the run that made the model: its rules, and whether it may delete its checkpoint."""
    key = ACTOR if ACTOR in resolved.models else compose.BASE_MODEL
    name = value_at(resolved.config, key)
    folder = folder_of(name)
    run = None if folder is None else lineage.run_of(folder)
    if folder is None or run is None:
        return
    before, model = _played(run), f"{resolved.models[key]}={name}"
    missing = _different_rules(before, resolved)
    if missing:
        overrides = shlex.join(override(key, value) for key, value in missing.items())
        yield f"{model} was trained with different rules; to use those, add: {overrides}"
    num_kept = before[NUM_KEPT]
    if num_kept is not None and before["rl_or_sft"] != "sft" and _may_be_deleted(lineage.checkpoint_of(folder)):
        yield (
            f"{model}: if its run resumes, it may delete this checkpoint ({NUM_KEPT}={num_kept}); what is trained here "
            f"could then not be resumed nor, as an adapter, be used. Start from a copy or, for an adapter, from the "
            f"output of `{hint('merge')}`"
        )


def _played(run: Path) -> dict[str, Any]:
    """A run's flat config, new keys at today's defaults. Fine-tuning demonstrates what it validates."""
    tree = leaves(Config()) | leaves(RunFolder(run).read_config())
    if tree["rl_or_sft"] == "sft":
        tree |= {key.replace(".val.", ".train."): value for key, value in tree.items() if ".val." in key}
    return tree


def _different_rules(before: dict[str, Any], resolved: Resolved) -> dict[str, Any]:
    """The earlier run's prompts and boards, where they differ now and were not typed."""
    now, typed = leaves(resolved.config), resolved.typed
    wanted, boards = list(RULES), set()
    for split in ("train", "val"):
        where = f"es_manager.{split}"
        tags = f"{where}.env_configs.tags"
        differs = tags not in typed and before[tags] != now[tags]
        wanted.append(tags)
        if differs and len(before[tags]) > 1:
            wanted += [f"{where}.env_configs.n_groups", f"{where}.env_groups"]
        boards |= set(before[tags]) if differs else set(before[tags]) & set(now[tags])
    wanted += [key for key in before if key.startswith(tuple(f"custom_envs.{tag}." for tag in sorted(boards)))]
    return {key: before[key] for key in wanted if key not in typed and before[key] != now.get(key)}


def _may_be_deleted(checkpoint: Path) -> bool:
    try:
        return not manifest.read_manifest(checkpoint).keep
    except manifest.CheckpointError:
        return False
