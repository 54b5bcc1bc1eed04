"""What the name of a model means, before anything of it is loaded.

folder_of("models/mine")                                     # the folder, or None for `pocket` and for a hub name
model_inside("checkpoints/RAGEN/pocket-sokoban")             # a run: its newest checkpoint
"""

import json
import os
from pathlib import Path

from ragen.config.pocket_defaults import PACKAGED
from ragen.store import lineage


def folder_of(name: str) -> Path | None:
    """The folder that the name of a model means, if it means one."""
    path = os.path.expanduser(name)  # unlike those of `Path`, these take any text
    return Path(path) if name not in PACKAGED and os.path.isdir(path) else None


def is_decoder(name: str) -> bool:
    """Whether a model is known, before it is loaded, to be a Llama or Qwen2, whose layers have the same names."""
    folder = folder_of(name)
    if folder is None:
        return name in PACKAGED
    try:
        return json.loads((folder / "config.json").read_bytes())["model_type"] in ("llama", "qwen2")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # loading it tells what is wrong


def model_inside(name: str) -> Path | None:
    """The model that is meant by the folder of a run, or by the output folder of fine-tuning."""
    folder = folder_of(name)
    return None if folder is None else lineage.model_inside(folder)
