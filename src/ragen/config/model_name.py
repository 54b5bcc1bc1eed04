"""What the name of a model means, before anything of it is loaded.

folder_of("models/mine")        # the directory, or None for `pocket` and for a hub name
is_decoder("pocket")            # True: its layers have the names of Llama and Qwen2
"""

import json
import os
from pathlib import Path

from ragen.config.pocket_defaults import PACKAGED


def folder_of(name: str) -> Path | None:
    """The directory that the name of a model means, if it means one."""
    path = os.path.expanduser(name)  # unlike those of `Path`, these take any text
    return Path(path) if name not in PACKAGED and os.path.isdir(path) else None


def is_decoder(name: str) -> bool:
    """Whether a model is known, before it is loaded, to be a Llama or Qwen2, which name their layers alike."""
    folder = folder_of(name)
    if folder is None:
        return name in PACKAGED
    try:
        return json.loads((folder / "config.json").read_bytes())["model_type"] in ("llama", "qwen2")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # loading it reports what is wrong
