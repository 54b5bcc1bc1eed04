"""Notes on a run that begins from the model of an earlier one: what that one played, and what may become of it.

    notes("model_path", "checkpoints/RAGEN/pocket-sokoban/global_step_20", leaves(config), typed=["seed.val"])

Nothing is taken over: the rules of a run are those of its own command. A model plays best in the words that it has
learnt, so the note has what to type for them.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ragen.config.model_name import folder_of
from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.store import lineage, manifest
from ragen.store.run_folder import RunFolder

RULES = (
    *(f"agent_proxy.{name}" for name in ("prompt_style", "enable_think", "max_turn", "max_actions_per_turn")),
    *(f"agent_proxy.{name}" for name in ("action_sep", "context_window_mode", "max_context_window")),
    "actor_rollout_ref.rollout.response_length",
)
NUM_KEPT = "trainer.max_actor_ckpt_to_keep"


def notes(key: str, name: str, tree: Mapping[str, Any], typed: Collection[str]) -> Iterator[str]:
    """On the model that a key names; `tree` is flat, and what was typed is meant as it is."""
    folder = folder_of(name)
    run = None if folder is None else lineage.run_of(folder)
    if run is None:
        return
    before = _played(run)
    words = [_word(key, value) for key, value in _other_rules(before, tree, typed).items()]
    if words:
        yield f"{key}={name} was trained by other rules than these; for those that it has learnt add: {' '.join(words)}"
    num_kept = before[NUM_KEPT]
    if num_kept is not None and before["rl_or_sft"] != "sft" and _may_be_deleted(lineage.checkpoint_of(folder)):
        yield (
            f"{key}={name}: if its run goes on, that may delete this checkpoint ({NUM_KEPT}={num_kept}), and what is "
            f"trained here can then neither be continued nor, as an adapter, be used; begin from a copy of it, or, of "
            f"an adapter, from what `./ragen merge` makes"
        )


def _played(run: Path) -> dict[str, Any]:
    """A run's flat config; of one from another version, with the defaults of this one. Fine-tuning demonstrates what it
    validates."""
    tree = leaves(Config()) | leaves(RunFolder(run).read_config())
    if tree["rl_or_sft"] == "sft":
        tree |= {key.replace(".val.", ".train."): value for key, value in tree.items() if ".val." in key}
    return tree


def _other_rules(before: dict[str, Any], now: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """What the earlier run says of prompts and boards, where it is otherwise now and was not typed so."""
    wanted, boards = list(RULES), set()
    for split in ("train", "val"):
        tags, *sizes = (
            f"es_manager.{split}.{name}" for name in ("env_configs.tags", "env_configs.n_groups", "env_groups")
        )
        is_other = tags not in typed and before[tags] != now[tags]
        wanted += [tags, *(sizes if is_other and len(before[tags]) > 1 else [])]
        boards |= set(before[tags]) if is_other else set(before[tags]) & set(now[tags])
    wanted += [key for key in before if key.startswith(tuple(f"custom_envs.{tag}." for tag in sorted(boards)))]
    return {key: before[key] for key in wanted if key not in typed and before[key] != now.get(key)}


def _may_be_deleted(checkpoint: Path) -> bool:
    try:
        return not manifest.read_manifest(checkpoint).keep
    except manifest.CheckpointError:
        return False


def _word(key: str, value: Any) -> str:
    """As it can be pasted into a shell."""
    return shlex.quote(f"{key}={_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][\w.-]*", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "null" if value is None else str(value)
