"""What this machine has, found without torch and without a network.

cores()                       # 2.0; a container may allow part of a core
ram_bytes()                   # (total, free)
num_gpus()                    # 0
cached_models(os.environ)     # ("Qwen/Qwen2.5-0.5B-Instruct",)
gpu_memory()                  # bytes of the smallest GPU, or None
read_size("80GB")             # 80000000000
check_platform()              # raises on Windows
prefer_growing_segments()     # before torch is loaded
"""

import contextlib
import glob
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ragen.errors import ConfigError

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads either
NO_WINDOWS = (
    "ragen does not run on Windows itself. Use WSL, a Linux inside Windows: run `wsl --install` in PowerShell, then "
    "install ragen there"
)


def check_platform() -> None:
    """Linux and macOS are supported: locks, signals and process groups are those of Unix."""
    if sys.platform in ("win32", "cygwin"):
        raise ConfigError(NO_WINDOWS, code="platform")


def prefer_growing_segments() -> None:
    """Let torch's CUDA allocator grow its blocks, unless the user has set it up. To be called before torch is loaded.

    Sampling and training allocate blocks of very different sizes in turn: with fixed ones a step of a 3B model that has
    11 GB to spare runs out of memory.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def cores() -> float:
    """Cores that this process may use."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, int(quota) / int(period))
    return count


def ram_bytes() -> tuple[int, int]:
    """Main memory that this process may use, total and free."""
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024
    except (OSError, KeyError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(path).read_text())
            total, free = min(total, limit), min(free, limit)
    return total, free


def num_gpus() -> int:
    """GPUs that the driver lists; 0 without a driver that answers."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def cached_models(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the models whose weights are in the local Hugging Face cache."""
    folders = _hub_cache(environ).glob("models--*")
    names = [path.name for path in folders if any(path.glob("snapshots/*/*.safetensors"))]
    return tuple(sorted(name.removeprefix("models--").replace("--", "/") for name in names))


def cached_folder(name: str, environ: Mapping[str, str]) -> Path | None:
    """Where the local Hugging Face cache holds a model's `config.json`, if it does."""
    found = _hub_cache(environ).glob(f"models--{glob.escape(name.replace('/', '--'))}/snapshots/*/config.json")
    return next((path.parent for path in sorted(found)), None)


def _hub_cache(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("HF_HOME") or Path(os.path.expanduser("~")) / ".cache" / "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or home / "hub")


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU that the driver lists; None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return min(int(line) * 2**20 for line in listed.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def read_size(text: str) -> int:
    """Bytes that a user names: 80GB, 79.6GiB; a number alone means GB."""
    match = re.fullmatch(r"\s*([\d.]+)\s*(GB|GiB|MB|MiB|G|)\s*", text, re.IGNORECASE)
    units = {"": 10**9, "g": 10**9, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}
    try:
        size = int(float(match[1]) * units[match[2].lower()]) if match else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not an amount of memory: write it as 80GB or 79.6GiB")
    return size
