"""The devices that runs are placed on: what `--gpus` lists, which are free, and the nodes that have them.

    read("0,1,2,3")                                     # ("0", "1", "2", "3"); cpu,cpu: two runs at once, without a GPU
    chosen(("0", "1"), "2,3")                           # ("2", "3"): places in CUDA_VISIBLE_DEVICES
    check(("0", "1", "2"), 2)                           # ConfigError: 3 GPUs cannot be cut into slots of 2
    pool = Pool(Device("here", number, name) for number, name in enumerate(("0", "1", "2", "3")))
    slot = pool.take(2, now=0.0)                        # the first two neighbours that are free, or None
    pool.give_back(slot, free_at=30.0)                  # after a pause
    nodes = Nodes(plan, cluster, ("0", "1"), {})        # these devices of every node; () for all that a node has

Where CUDA_VISIBLE_DEVICES is set, a number of `--gpus` is a place in it, and the default is all that it lists. It is
about this machine, so an existing cluster (`--ray-address`) ignores it.

Ray starts and watches runs, but their devices are chosen here: a run gets consecutive devices of one node, beginning at
a multiple of its size, and the first ones that are free, as documented. Nothing here needs torch: `--dry-run` works on
any machine.
"""

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from ragen.command_hint import hint
from ragen.config.devices import VARIABLE, normal_list
from ragen.errors import ConfigError
from ragen.experiment.cluster import Cluster, Device, Node, Slot
from ragen.experiment.plan import CPU, Plan
from ragen.machine import cores, num_gpus
from ragen.store.sweep_results import Cell

FALLBACK = tuple(str(number) for number in range(8))
LOOK_AT_NODES = 5.0  # seconds


# --- the list -----------------------------------------------------------------------------------------------------


def read(text: str) -> tuple[str, ...]:
    """The devices of `--gpus`, as they were typed."""
    devices = tuple(part.strip() for part in text.split(",") if part.strip())
    if devices and set(devices) == {CPU}:
        return devices
    if CPU in devices:
        raise ConfigError(f"--gpus {text}: GPUs and cpu in one list; choose one kind")
    listed = normal_list(list(devices), "--gpus")
    if not listed:
        raise ConfigError(f"--gpus {text!r}: no device; write numbers (0,1), or cpu for a run without a GPU")
    return tuple(listed.split(","))


def chosen(typed: tuple[str, ...] | None, visible: str | None) -> tuple[str, ...] | None:
    """The devices of this machine that were typed; all where none were. None: those that the driver lists.

    `visible` is CUDA_VISIBLE_DEVICES, None where it is not set.
    """
    if visible is None or CPU in (typed or ()):
        return typed
    listed = tuple(device for device in normal_list(visible, f"variable {VARIABLE}").split(",") if device)
    if not listed:
        raise ConfigError(f"{VARIABLE}={visible!r} hides every GPU: unset it, or use --gpus cpu")
    if typed is None:
        return listed
    found = tuple(_place(device, listed, typed) for device in typed)
    if len(set(found)) < len(found):
        raise ConfigError(f"--gpus {','.join(typed)}: a device of {VARIABLE}={','.join(listed)} is listed twice")
    return found


def _place(device: str, listed: Sequence[str], typed: Sequence[str]) -> str:
    """A number is a place in the list; a name, or its beginning, is in the list."""
    if device.isdecimal():
        named = [listed[int(device)]] if int(device) < len(listed) else []
    else:
        named = [other for other in listed if other.startswith(device)]
    if len(named) == 1:
        return named[0]
    places = "0" if len(listed) == 1 else f"0 to {len(listed) - 1}"
    what = f"place {device}" if device.isdecimal() else f"device {device}"
    raise ConfigError(
        f"--gpus {','.join(typed)}: {VARIABLE}={','.join(listed)} has no {what}; --gpus counts its entries, {places}"
    )


def as_typed(devices: Sequence[str], visible: str | None) -> str:
    """What `--gpus` has to be for these devices: the opposite of `chosen`."""
    listed = normal_list(visible, f"variable {VARIABLE}").split(",")
    return ",".join(str(listed.index(device)) if device in listed else device for device in devices)


def discover() -> tuple[str, ...]:
    """One device for each line of `nvidia-smi -L`; 0 to 7 where it lists none."""
    count = num_gpus()
    if count:
        return tuple(str(number) for number in range(count))
    print("nvidia-smi lists no GPU: using 0 to 7; set --gpus LIST, or --gpus cpu", file=sys.stderr)
    return FALLBACK


def check(devices: Sequence[str], gpus_per_exp: int, cells: Sequence[Cell] = ()) -> None:
    """Slots of one size divide the list evenly; runs of different sizes only have to fit."""
    if CPU in devices:
        if gpus_per_exp != 1:
            raise ConfigError(f"--gpus-per-exp {gpus_per_exp}: a run without a GPU takes one cpu slot; remove it")
        return
    listed = ",".join(devices)
    size, *other_sizes = {cell.num_gpus: None for cell in cells} or [gpus_per_exp]
    if other_sizes:
        for cell in cells:
            if cell.num_gpus > len(devices):
                raise ConfigError(
                    f"{cell.name} needs {cell.num_gpus} GPUs, and --gpus {listed} lists {len(devices)}: list more, or "
                    "skip it with --only"
                )
    elif size > len(devices):
        raise ConfigError(f"--gpus-per-exp {size}: there are only {len(devices)} GPUs ({listed})")
    elif len(devices) % size:
        raise ConfigError(
            f"--gpus-per-exp {size}: {len(devices)} GPUs ({listed}) cannot be cut into slots of {size}; list a "
            f"multiple of {size}"
        )


def named(devices: Sequence[str], names: Sequence[str], where: str = "") -> dict[str, str]:
    """Device -> its name. Torch must find all of them, or nothing is started."""
    if len(names) < len(devices):
        raise ConfigError(
            f"--gpus {','.join(devices)}: torch finds {len(names) or 'none'} of these {len(devices)} GPUs{where}; list "
            f"existing ones ({hint('doctor')} shows them), or use --gpus cpu"
        )
    return dict(zip(devices, names, strict=True))


# --- what is free -------------------------------------------------------------------------------------------------


class Pool:
    """The devices of all nodes, each free or not."""

    def __init__(self, devices: Iterable[Device] = ()):
        self._free_at = dict.fromkeys(devices, -inf)  # inf: taken

    def add(self, device: Device) -> None:
        self._free_at.setdefault(device, -inf)

    def remove_node(self, node: str) -> None:
        self._free_at = {device: free_at for device, free_at in self._free_at.items() if device.node != node}

    def nodes(self) -> set[str]:
        return {device.node for device in self._free_at}

    def take(self, size: int, now: float) -> Slot | None:
        """Neighbours that are free now."""
        for slot in self._slots(size):
            if all(self._free_at[device] <= now for device in slot):
                self._free_at |= dict.fromkeys(slot, inf)
                return slot
        return None

    def give_back(self, slot: Slot, free_at: float = -inf) -> None:
        """Others may have them from `free_at` on. Devices of a node that is gone are dropped."""
        self._free_at |= {device: free_at for device in slot if device in self._free_at}

    def _slots(self, size: int) -> Iterable[Slot]:
        for node in dict.fromkeys(device.node for device in self._free_at):
            devices = sorted(device for device in self._free_at if device.node == node)
            for start in range(0, len(devices) - size + 1, size):
                yield tuple(devices[start : start + size])


# --- names --------------------------------------------------------------------------------------------------------

_FAMILIES = re.compile(r"\b(NVIDIA|Tesla|GeForce|Quadro|RTX)\b")
_MODEL = re.compile(r"\b([BHAL]\d{2,3}|V100|T4|P100|K80)\b")


def short_name(gpu: str) -> str:
    """`H100` for `NVIDIA H100 80GB HBM3`; the first part where the model is not a known one."""
    rest = _FAMILIES.sub(" ", gpu)
    known = _MODEL.search(rest)
    return known[1] if known else (rest.split() or [gpu])[0]


def label(devices: Sequence[str], gpu_names: Mapping[str, str]) -> str:
    """`4xH100` for the devices of a slot, `2xmixed` where they differ, `cpu` without a GPU."""
    if CPU in devices:
        return CPU
    models = {short_name(gpu_names[name]) if name in gpu_names else f"GPU{name}" for name in devices}
    return f"{len(devices)}x{models.pop() if len(models) == 1 else 'mixed'}"


# --- nodes --------------------------------------------------------------------------------------------------------


class Nodes:
    """The nodes of a cluster and their devices. Nodes may leave and join while an experiment runs."""

    def __init__(self, plan: Plan, cluster: Cluster, devices: Sequence[str], gpu_names: Mapping[str, str]):
        self.plan, self.cluster, self._devices = plan, cluster, tuple(devices)
        self.pool = Pool()
        self.by_id: dict[str, Node] = {}
        self._names: dict[str, Mapping[str, str]] = {}  # node -> device -> its name
        for node in cluster.nodes():
            self._add(node, gpu_names if cluster.is_own else None)
        if not self.pool.nodes():
            raise ConfigError("no node of the Ray cluster has a GPU; use --gpus cpu for runs without one")
        self._looked = time.monotonic()

    def description(self) -> str:
        """For the head of the summary log."""
        parts = [f"{node.host}: {','.join(self._of(node))}" for node in self._used()]
        return f"devices: {' | '.join(parts)} | per run: {self.gpu}"

    @property
    def gpu(self) -> str:
        """The devices of a run of the usual size."""
        node = self._used()[0]
        return label(self._of(node)[: self.plan.options.gpus_per_exp], self._names[node.id])

    def label(self, slot: Slot) -> str:
        """The `gpu` field of a run: the documented lines of the smoke test hold numbers, all others models."""
        names = [device.name for device in slot]
        return ",".join(names) if self.plan.name.startswith("smoke") else label(names, self._names[slot[0].node])

    def threads(self) -> int:
        """The share of its node's cores that a run without a GPU may use."""
        return max(1, int(cores() / len(self._devices)))

    def look(self) -> list[str]:
        """Look for nodes that left or joined, every few seconds; returns notes for the user."""
        if self.cluster.is_own or time.monotonic() - self._looked < LOOK_AT_NODES:
            return []
        self._looked = time.monotonic()
        return self.update()

    def update(self) -> list[str]:
        alive = {node.id: node for node in self.cluster.nodes()}
        notes = []
        for gone in self.pool.nodes() - alive.keys():
            self.pool.remove_node(gone)
            notes.append(f"node {self.by_id[gone].host} is lost")
        for node in alive.values():
            if node.id not in self.by_id:
                try:
                    self._add(node, None)
                except ConfigError as error:
                    notes.append(f"node {node.host} is not used: {error}")
        return notes

    def _used(self) -> list[Node]:
        """Those that have devices, or had some before they were lost."""
        return [node for node in self.by_id.values() if CPU in self._devices or self._names[node.id]]

    def _of(self, node: Node) -> tuple[str, ...]:
        return self._devices or tuple(str(number) for number in range(node.num_gpus))

    def _add(self, node: Node, gpu_names: Mapping[str, str] | None) -> None:
        """Torch on the node is asked about its GPUs unless their names are known."""
        self.by_id[node.id] = node
        self._names[node.id] = {}
        devices = self._of(node)
        if CPU not in devices:
            if gpu_names is None:
                if not node.num_gpus:
                    return
                found = self.cluster.gpu_names(node, sys.executable, devices)
                gpu_names = named(devices, found, f" on {node.host}")
                check(devices, self.plan.options.gpus_per_exp, self.plan.cells)
            self._names[node.id] = gpu_names
        for number, name in enumerate(devices):
            self.pool.add(Device(node.id, number, name))
