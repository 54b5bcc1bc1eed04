"""The model of `train.sh ENV` when none is named: a small Qwen with a GPU and weights or a hub, else the embedded one.

name, why = choose(os.environ)
"""

from collections.abc import Mapping

from ragen.config import v1
from ragen.machine import cached_models, num_gpus

QWEN: str = v1.KEYS["model.base_model"].default


def choose(environ: Mapping[str, str]) -> tuple[str, str]:
    """The model and why. Uses neither the network nor torch."""
    if not has_gpu():
        return "pocket", "no model named and no GPU here"
    if QWEN in cached_models(environ):
        return QWEN, "no model named, a GPU here and the weights in the cache"
    if environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "pocket", f"no model named, and {QWEN} is not in the cache while the hub is switched off"
    return QWEN, "no model named and a GPU here; the weights come from the hub"


def has_gpu() -> bool:
    return num_gpus() > 0
