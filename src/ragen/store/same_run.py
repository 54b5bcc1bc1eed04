"""What makes two runs the same: equal in every key that changes what a run computes.

    stored = stored_config(folder)                 # flat; empty where there is none
    different_keys(config, stored)                 # [] for the same run
    describe_difference(config, stored)            # "holds a run with seed.train=1, not 2", or ""

Which keys count is metadata in the schema (`config.identity`). A model that the run's own fine-tuning wrote is the same
model wherever it was moved or copied to.
"""

import filecmp
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ragen.config import derive, identity_keys
from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.errors import shown
from ragen.store.reading import Unreadable
from ragen.store.run_folder import RunFolder

BUDGET = "trainer.total_training_steps"


def stored_config(folder: RunFolder) -> dict[str, Any]:
    """Flat; empty where none can be read."""
    try:
        return leaves(folder.read_config())
    except Unreadable:
        return {}


def different_keys(config: Config, stored: Mapping[str, Any]) -> list[str]:
    """The keys that tell a config from a stored one, a longer budget aside."""
    here, kind = leaves(config), "sft" if config.rl_or_sft == "sft" else "rl"
    output = str(here["sft.output_dir"])
    return [
        key
        for key in identity_keys.different_keys(here, stored, kind)
        if key not in derive.MODELS or not _is_same_model(str(stored.get(key)), str(here.get(key)), output)
    ]


def describe_difference(config: Config, stored: Mapping[str, Any]) -> str:
    """How the stored run differs in what it computes; empty if it does not."""
    if not isinstance(stored.get(BUDGET), int):
        return "holds a run without a readable config"
    here = leaves(config)
    if different := different_keys(config, stored):
        first, more = different[0], len(different) - 1
        there, now = (shown(tree[first]) if first in tree else "nothing" for tree in (stored, here))
        return f"holds a run with {first}={there}, not {now}" + (f", and {more} more differences" if more else "")
    if stored[BUDGET] > here[BUDGET]:
        return f"holds a run with the longer budget {BUDGET}={stored[BUDGET]}, not {here[BUDGET]}"
    return ""


def _is_same_model(one: str, other: str, output_dir: str) -> bool:
    """Whether two paths name one model below `sft.output_dir`, which may have been moved or copied since."""
    below = re.compile(rf"(?:.*/)?({re.escape(str(PurePath(output_dir)))}(?:-\d+)?/.+)")
    found = [below.fullmatch(path) for path in (one, other)]
    if found[0] is None or found[1] is None or found[0][1] != found[1][1]:
        return False
    return not (Path(one).exists() and Path(other).exists()) or _are_equal_models(Path(one), Path(other))


def _are_equal_models(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights; files of one age and size are not read."""
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name) for name in names[0])
