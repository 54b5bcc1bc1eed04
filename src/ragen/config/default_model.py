"""The model of `train.sh ENV` when none is named: a small Qwen with a GPU and weights or a hub, else the embedded one.

name, why = choose(os.environ)
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ragen.config import v1

QWEN: str = v1.KEYS["model.base_model"].default


def choose(environ: Mapping[str, str]) -> tuple[str, str]:
    """The model and why. Uses neither the network nor torch."""
    if not has_gpu():
        return "pocket", "no model named and no GPU here"
    if is_cached(QWEN, environ):
        return QWEN, "no model named, a GPU here and the weights in the cache"
    if environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "pocket", f"no model named, and {QWEN} is not in the cache while the hub is switched off"
    return QWEN, "no model named and a GPU here; the weights come from the hub"


def has_gpu() -> bool:
    """Whether the driver lists one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def is_cached(name: str, environ: Mapping[str, str]) -> bool:
    """Whether weights of this name are in the local Hugging Face cache."""
    home = Path(environ.get("HF_HOME") or Path(os.path.expanduser("~")) / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    return any((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/*.safetensors"))
