"""Notes on a run that starts from the model of an earlier one: what that run played, and whether it may delete it.

    check_models(resolved)          # ConfigError for a run directory in the place of a model, naming its checkpoint
    list(notes(resolved))

Nothing is taken over: the rules of a run are those of its own command. A model plays best by the rules it was trained
with, so the note lists the overrides that restore them.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ragen.config.compose import Resolved
from ragen.config.model_name import folder_of
from ragen.config.quoting import override, shell
from ragen.config.schema import Config
from ragen.config.tree import leaves, value_at
from ragen.errors import one_error, refused
from ragen.store import lineage, manifest
from ragen.store.run_folder import RunFolder

RULES = (
    *(f"agent_proxy.{name}" for name in ("prompt_style", "enable_think", "max_turn", "max_actions_per_turn")),
    *(f"agent_proxy.{name}" for name in ("action_sep", "context_window_mode", "max_context_window")),
    "actor_rollout_ref.rollout.response_length",
)
NUM_KEPT = "trainer.max_actor_ckpt_to_keep"
ACTOR, BASE_MODEL = "actor_rollout_ref.model.path", "sft.training.base_model"


def check_models(resolved: Resolved) -> None:
    """Refuse a directory that holds models and is none: of a run, of fine-tuning."""
    problems = []
    for key, typed_as in resolved.models.items():
        name = value_at(resolved.config, key)
        folder = folder_of(name)
        inside = None if folder is None else lineage.model_inside(folder)
        if inside is not None:
            why = f"this directory is not a model, but holds one: name {inside}"
            problems.append(refused(typed_as, name, why, code="not-a-model"))
    if problems:
        raise one_error(problems)


def notes(resolved: Resolved) -> Iterator[str]:
    """On the model that is trained. What was typed is left as it is."""
    key = ACTOR if ACTOR in resolved.models else BASE_MODEL
    name = value_at(resolved.config, key)
    folder = folder_of(name)
    run = None if folder is None else lineage.run_of(folder)
    if folder is None or run is None:
        return
    before, model = _played(run), f"{resolved.models[key]}={name}"
    missing = _different_rules(before, leaves(resolved.config), resolved.typed)
    if missing:
        overrides = shell(*(override(key, value) for key, value in missing.items()))
        yield f"{model} was trained with different rules; to use those, add: {overrides}"
    num_kept = before[NUM_KEPT]
    if num_kept is not None and before["rl_or_sft"] != "sft" and _may_be_deleted(lineage.checkpoint_of(folder)):
        yield (
            f"{model}: if its run resumes, it may delete this checkpoint ({NUM_KEPT}={num_kept}); what is trained here "
            f"could then not be resumed nor, as an adapter, be used. Start from a copy or, for an adapter, from the "
            f"output of `./ragen merge`"
        )


def _played(run: Path) -> dict[str, Any]:
    """A run's flat config; keys that its version did not have get today's defaults. Fine-tuning demonstrates what it
    validates."""
    tree = leaves(Config()) | leaves(RunFolder(run).read_config())
    if tree["rl_or_sft"] == "sft":
        tree |= {key.replace(".val.", ".train."): value for key, value in tree.items() if ".val." in key}
    return tree


def _different_rules(before: dict[str, Any], now: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The earlier run's prompts and boards, where they differ now and were not typed."""
    wanted, boards = list(RULES), set()
    for split in ("train", "val"):
        tags, *sizes = (
            f"es_manager.{split}.{name}" for name in ("env_configs.tags", "env_configs.n_groups", "env_groups")
        )
        differs = tags not in typed and before[tags] != now[tags]
        wanted += [tags, *(sizes if differs and len(before[tags]) > 1 else [])]
        boards |= set(before[tags]) if differs else set(before[tags]) & set(now[tags])
    wanted += [key for key in before if key.startswith(tuple(f"custom_envs.{tag}." for tag in sorted(boards)))]
    return {key: before[key] for key in wanted if key not in typed and before[key] != now.get(key)}


def _may_be_deleted(checkpoint: Path) -> bool:
    try:
        return not manifest.read_manifest(checkpoint).keep
    except manifest.CheckpointError:
        return False
