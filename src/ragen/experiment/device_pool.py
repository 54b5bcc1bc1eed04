"""Which devices are free, and what they are called.

    pool = Pool([Device("node", place, name) for place, name in enumerate(("0", "1", "2", "3"))])
    slot = pool.take(2, now=0.0)             # the first two neighbours that are free, or None
    pool.give_back(slot, free_at=30.0)       # after a pause

A run gets as many consecutive devices of one node as it needs, beginning at a multiple of that number: with runs of one
size these are the documented slots. A run without a GPU takes one CPU entry.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ragen.errors import ConfigError
from ragen.experiment.cell import CPU, Cell


class Device(NamedTuple):
    node: str
    place: int  # in the list of its node
    name: str  # number or UUID of a GPU, or cpu


Slot = tuple[Device, ...]


class Pool:
    """The devices of all nodes, each free or not."""

    def __init__(self, devices: Iterable[Device] = ()):
        self._free_at: dict[Device, float | None] = {}  # None: taken
        for device in devices:
            self.add(device)

    def add(self, device: Device) -> None:
        self._free_at.setdefault(device, float("-inf"))

    def remove_node(self, node: str) -> None:
        self._free_at = {device: free_at for device, free_at in self._free_at.items() if device.node != node}

    def nodes(self) -> set[str]:
        return {device.node for device in self._free_at}

    def take(self, num: int, now: float) -> Slot | None:
        """`num` neighbours that are free now."""
        for slot in self._slots(num):
            if all(self._is_free(device, now) for device in slot):
                self._free_at |= dict.fromkeys(slot, None)
                return slot
        return None

    def give_back(self, slot: Slot, free_at: float = float("-inf")) -> None:
        """From `free_at` on others may have them. Devices of a node that has gone stay away."""
        self._free_at |= {device: free_at for device in slot if device in self._free_at}

    def largest(self) -> int:
        """The most devices that a run could ever get."""
        sizes = [len(self._of(node)) for node in self.nodes()]
        return max(sizes, default=0)

    def _is_free(self, device: Device, now: float) -> bool:
        free_at = self._free_at[device]
        return free_at is not None and free_at <= now

    def _slots(self, num: int) -> Iterable[Slot]:
        for node in dict.fromkeys(device.node for device in self._free_at):
            devices = self._of(node)
            for start in range(0, len(devices) - num + 1, num):
                yield tuple(devices[start : start + num])

    def _of(self, node: str) -> list[Device]:
        return sorted(device for device in self._free_at if device.node == node)


def num_devices(cell: Cell, devices: Sequence[str]) -> int:
    return 1 if CPU in devices else cell.num_gpus


def check_sizes(cells: Iterable[Cell], devices: Sequence[str]) -> None:
    """A cell that no slot can hold would wait for ever."""
    for cell in cells:
        if num_devices(cell, devices) > len(devices):
            raise ConfigError(
                f"{cell.name} needs {cell.num_gpus} GPUs, and --gpus {','.join(devices)} lists {len(devices)}: "
                "list more, or leave it out with --only"
            )


def check_devices(devices: Sequence[str], names: Sequence[str], where: str = "") -> None:
    """Torch must know all of them, or nothing is started."""
    if len(names) < len(devices):
        raise ConfigError(
            f"--gpus {','.join(devices)}: torch finds {len(names) or 'none'} of these {len(devices)} GPUs{where}; list "
            "those that are there (./ragen doctor shows them), or take --gpus cpu"
        )


# --- names --------------------------------------------------------------------------------------------------------

_FAMILIES = re.compile(r"\b(NVIDIA|Tesla|GeForce|Quadro|RTX)\b")
_MODEL = re.compile(r"\b([BHAL]\d{2,3}|V100|T4|P100|K80)\b")


def short_name(gpu: str) -> str:
    """`H100` for `NVIDIA H100 80GB HBM3`; the first word where the model is not a known one."""
    words = _FAMILIES.sub(" ", gpu)
    known = _MODEL.search(words)
    return known[1] if known else (words.split() or [gpu])[0]


def label(names: Sequence[str], gpu_names: Mapping[str, str]) -> str:
    """`4xH100` for the devices of a slot, `2xmixed` where they differ, `cpu` without a GPU."""
    if CPU in names:
        return CPU
    models = {short_name(gpu_names[name]) if name in gpu_names else f"GPU{name}" for name in names}
    return f"{len(names)}x{models.pop() if len(models) == 1 else 'mixed'}"
