"""Device lists: normalise their spellings, choose one for a run, and make only those devices visible.

normal_list(" 0 , 1 "), normal_list([0, 1]), normal_list("'0,1'")    # "0,1" each
normal_list(None), normal_list("-1")                                 # "": no device
with visible(config.system.CUDA_VISIBLE_DEVICES):                    # these and no others
    train()
"""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from ragen.errors import refused, shown

KEY = "system.CUDA_VISIBLE_DEVICES"
V1_KEY = "system.cuda_visible_devices"
VARIABLE = "CUDA_VISIBLE_DEVICES"
NONE = ("", "-1", "null", "none", "nodevfiles")  # the last is what some schedulers export on a node without GPUs


def normal_list(value: Any, name: str = KEY) -> str:
    """`0,1` for a device list in any of its spellings: bare, quoted, or as a list; empty for no device."""
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
    if text.strip(" '\"[]").lower() in NONE:
        return ""
    devices = [device for part in text.split(",") if (device := part.strip(" '\"[]"))]
    for device in devices:
        if not (device.isdecimal() and device.isascii()) and not device.startswith(("GPU-", "MIG-")):
            why = f"{shown(device)!r} is not a device; write numbers or GPU-… and MIG-… names"
            raise refused(name, value, why, code="device")
    if len(set(devices)) < len(devices):
        raise refused(name, value, "a device is listed twice", code="device")
    return ",".join(devices)


def count(devices: str) -> int:
    return len(devices.split(",")) if devices else 0


def choose(devices: str, num_gpus: int, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The device list of a run whose user gave none, and its origin; None where it can stay as it is.

    `CUDA_VISIBLE_DEVICES` of the process wins; without it, the first `num_gpus` are taken.
    """
    visible = environ.get(VARIABLE)
    if visible is None:
        if num_gpus == 1 or count(devices) == num_gpus:
            return None
        return ",".join(map(str, range(num_gpus))), "derived from trainer.n_gpus_per_node"
    listed = normal_list(visible, f"variable {VARIABLE}")
    if 0 < count(listed) < num_gpus:
        why = f"{VARIABLE}={listed} in the environment lists {count(listed)}: ask for {count(listed)}, or unset it"
        raise refused("trainer.n_gpus_per_node", num_gpus, why, code="device-count")
    return ",".join(listed.split(",")[:num_gpus]), f"environment {VARIABLE}"


@contextmanager
def visible(devices: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Show this process, and those that it starts, these devices only. Enter it before the first use of CUDA."""
    before = environ.get(VARIABLE)
    environ[VARIABLE] = devices
    try:
        yield
    finally:
        if before is None:
            environ.pop(VARIABLE, None)
        else:
            environ[VARIABLE] = before
