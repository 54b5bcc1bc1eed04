"""Where the runs of an experiment go: the list of GPUs, cut into slots.

    cut(("0", "1", "2", "3"), 2)    # (("0", "1"), ("2", "3"))
    cut(("cpu", "cpu"), 1)          # (("cpu",), ("cpu",)): two at once, without a GPU
    discover()                      # what nvidia-smi lists, else 0 to 7

Neither asks torch: `--dry-run` answers on any machine.
"""

import subprocess
import sys

from ragen.errors import ConfigError
from ragen.experiment.cell import CPU

FALLBACK = tuple(str(number) for number in range(8))
Slot = tuple[str, ...]


def read(text: str) -> tuple[str, ...]:
    """The devices of `--gpus`."""
    from ragen.config.devices import normal_list

    devices = tuple(part.strip() for part in text.split(",") if part.strip())
    if not devices:
        raise ConfigError(f"--gpus {text!r}: no device; write numbers (0,1), or cpu for a run without a GPU")
    if set(devices) == {CPU}:
        return devices
    if CPU in devices:
        raise ConfigError(f"--gpus {text}: GPUs and cpu in one list; choose one kind")
    return tuple(normal_list(list(devices), "--gpus").split(","))


def discover() -> tuple[str, ...]:
    """One device for each line of `nvidia-smi -L`; 0 to 7 where that says nothing."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count:
        return tuple(str(number) for number in range(count))
    print("nvidia-smi lists no GPU: taking 0 to 7; say --gpus LIST, or --gpus cpu", file=sys.stderr)
    return FALLBACK


def cut(devices: tuple[str, ...], size: int) -> tuple[Slot, ...]:
    """Consecutive slots of `size` devices; a CPU slot is one entry."""
    if CPU in devices:
        if size != 1:
            raise ConfigError(f"--gpus-per-exp {size}: a run without a GPU takes one cpu slot; leave it out")
        return tuple((device,) for device in devices)
    if size < 1:
        raise ConfigError(f"--gpus-per-exp {size}: must be at least 1")
    if size > len(devices):
        raise ConfigError(f"--gpus-per-exp {size}: there are only {len(devices)} GPUs ({','.join(devices)})")
    if len(devices) % size:
        raise ConfigError(
            f"--gpus-per-exp {size}: {len(devices)} GPUs ({','.join(devices)}) cannot be cut into slots of {size}; "
            f"list a multiple of {size}"
        )
    return tuple(devices[start : start + size] for start in range(0, len(devices), size))
