"""The nodes that runs are placed on, and the devices of each.

    fleet = Fleet(plan, cluster, devices=("0", "1"))       # these of every node; () for all that a node has
    slot = fleet.take(cell, now=time.monotonic())          # neighbours on one node, or None
    fleet.label(slot)                                      # 2xH100
    fleet.pool.give_back(slot)

Nodes may go and come while an experiment runs. Torch is asked about the GPUs of each before anything starts there.
"""

import sys
import time
from collections.abc import Mapping, Sequence

from ragen.errors import ConfigError
from ragen.experiment import slots
from ragen.experiment.cell import CPU, Cell, Plan
from ragen.experiment.cluster import Cluster, Node
from ragen.experiment.device_pool import Device, Pool, Slot, check_devices, check_sizes, label, num_devices
from ragen.machine import cores

LOOK_AT_NODES = 5.0  # seconds


class Fleet:
    """The nodes of a cluster and their devices."""

    def __init__(self, plan: Plan, cluster: Cluster, devices: Sequence[str], gpu_names: Mapping[str, str]):
        self.plan, self.cluster, self._devices = plan, cluster, tuple(devices)
        self.pool = Pool()
        self.nodes: dict[str, Node] = {}
        self._names: dict[str, dict[str, str]] = {}  # node -> device -> what it is called
        for node in cluster.nodes():
            self._add(node, gpu_names if cluster.is_own else None)
        if not self.pool.nodes():
            raise ConfigError("no node of the Ray cluster has a GPU; take --gpus cpu for runs without one")
        self._looked = time.monotonic()

    def words(self) -> str:
        """For the head of the summary log."""
        places = [f"{node.host}: {','.join(self._of(node))}" for node in self._used()]
        return f"devices: {' | '.join(places)} | per run: {self.gpu}"

    @property
    def gpu(self) -> str:
        """What a run of the usual size gets."""
        node = self._used()[0]
        return label(self._of(node)[: self.plan.options.gpus_per_exp or 1], self._names[node.id])

    def take(self, cell: Cell, now: float) -> Slot | None:
        return self.pool.take(num_devices(cell, self._devices), now)

    def label(self, slot: Slot) -> str:
        """The `gpu` field of a run: the documented lines of the smoke test hold numbers, all others models."""
        names = [device.name for device in slot]
        return ",".join(names) if self.plan.name.startswith("smoke") else label(names, self._names[slot[0].node])

    def threads(self, cell: Cell) -> int:
        """What a run without a GPU may use of its node's cores."""
        return max(1, int(cores() / len(self._devices) / cell.num_gpus))

    def look(self) -> list[str]:
        """Notice nodes that have gone and nodes that have come; returns what there is to say."""
        if self.cluster.is_own or time.monotonic() - self._looked < LOOK_AT_NODES:
            return []
        self._looked = time.monotonic()
        return self.update()

    def update(self) -> list[str]:
        alive = {node.id: node for node in self.cluster.nodes()}
        notes = []
        for gone in self.pool.nodes() - alive.keys():
            self.pool.remove_node(gone)
            notes.append(f"node {self.nodes[gone].host} is lost")
        for node in alive.values():
            if node.id not in self.nodes:
                try:
                    self._add(node, None)
                except ConfigError as error:
                    notes.append(f"node {node.host} is not used: {error}")
        return notes

    def _used(self) -> list[Node]:
        """Those that have devices, or had some before they were lost."""
        return [node for node in self.nodes.values() if CPU in self._devices or self._names[node.id]]

    def _of(self, node: Node) -> tuple[str, ...]:
        return self._devices or tuple(str(number) for number in range(node.num_gpus))

    def _add(self, node: Node, gpu_names: Mapping[str, str] | None) -> None:
        self.nodes[node.id] = node
        self._names[node.id] = {}
        devices = self._of(node)
        if CPU not in devices:
            if gpu_names is None:
                if not node.num_gpus:
                    return
                names = self.cluster.gpu_names(node, sys.executable, devices)
                check_devices(devices, names, f" on {node.host}")
                slots.cut(devices, self.plan.options.gpus_per_exp or 1)
                check_sizes(self.plan.cells, devices)
                gpu_names = dict(zip(devices, names, strict=True))
            self._names[node.id] = dict(gpu_names)
        for place, name in enumerate(devices):
            self.pool.add(Device(node.id, place, name))
