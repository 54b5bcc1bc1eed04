"""What the name of a model means before anything of it is loaded, and which model is taken if none is named.

folder_of("models/mine")        # the directory, or None for `pocket` and for a hub name
is_decoder("pocket")            # True: its layers have the names of Llama's
name, why = choose(os.environ)  # a small Qwen with a GPU and weights or a hub, else `pocket`
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ragen.config import v1
from ragen.config.pocket_defaults import PACKAGED
from ragen.machine import cached_models, num_gpus

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # Hugging Face `model_type`s of `model.decoder`
RANDOM = "random:"  # and the name of a shape: random weights
QWEN: str = v1.KEYS["model.base_model"].default


def folder_of(name: str) -> Path | None:
    """The directory that the name of a model means, if it means one."""
    path = os.path.expanduser(name)  # unlike those of `Path`, these take any text
    return Path(path) if name not in PACKAGED and os.path.isdir(path) else None


def is_decoder(name: str) -> bool:
    """Whether a model is known, before it is loaded, to be of a family that `model.decoder` implements: all name their
    layers alike.
    """
    folder = folder_of(name)
    if folder is None:
        return name in PACKAGED or name.startswith(RANDOM)
    try:
        return json.loads((folder / "config.json").read_bytes())["model_type"] in FAMILIES
    except (OSError, ValueError, KeyError, TypeError):
        return False  # loading it reports what is wrong


def choose(environ: Mapping[str, str], model: str = QWEN) -> tuple[str, str]:
    """The model and why: `model` where it can run, else `pocket`. Uses neither the network nor torch."""
    if num_gpus() == 0:
        return "pocket", "no model named and no GPU here"
    if model in cached_models(environ):
        return model, "no model named, a GPU here and the weights in the cache"
    if environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "pocket", f"no model named, and {model} is not in the cache while the hub is switched off"
    return model, "no model named and a GPU here; the weights come from the hub"
