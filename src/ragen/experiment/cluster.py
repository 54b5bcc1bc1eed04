"""Ray: it starts runs on nodes, watches and stops them, and notices what is lost.

    with connected(address=None, num_devices=2) as cluster:      # this machine, without any set-up
        node = cluster.nodes()[0]
        handle = cluster.start(job, (Device(node.id, 0, "cpu"),))
        for handle in cluster.wait([handle], seconds=1.0):
            cluster.result(handle)                       # what `run_process.run_child` returned, or None: it was lost

Which devices a run gets is decided in `devices.py`. On an existing cluster a device is also a share of its node, which
a run reserves: two experiments do not take more of a node than it has. All nodes must see the directory of the
experiment under the same path.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ragen.errors import ConfigError, RunFailed
from ragen.experiment import run_process

HERE = {"num_gpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20}  # bytes: nothing large travels
MARK = "RAGEN_SWEEP"  # an environment variable that all processes of our own Ray share
MOST_STARTS = 3
QUIET = {"logging_level": logging.CRITICAL, "log_to_driver": False}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would end watchers, not what they watch
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class Node(NamedTuple):
    id: str
    host: str
    address: str
    num_gpus: int


class Device(NamedTuple):
    node: str
    number: int  # its position in the list of its node
    name: str  # number or UUID of a GPU, or cpu


Slot = tuple[Device, ...]


class Cluster:
    def __init__(self, ray: Any, num_devices: int, is_own: bool):
        self._ray, self._num_devices = ray, num_devices
        self.is_own = is_own  # started by this process, for this experiment
        self._known: dict[str, Node] = {}
        ray.cloudpickle.register_pickle_by_value(run_process)  # a node needs no ragen to watch a run
        # Ray must not run one again by itself: it could not know where.
        self._run = ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(run_process.run_child)
        self._look = ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(run_process.gpu_names)

    def is_gone(self) -> bool:
        """Whether Ray was stopped on this machine from outside. It would end this process too, a minute later."""
        dead = self._ray._private.worker._global_node.dead_processes() if self.is_own else ()
        return any(kind in ("gcs_server", "raylet") for kind, _ in dead)

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        alive = []
        for node in self._ray.nodes():
            if node["Alive"]:
                num_gpus = int(node["Resources"].get("GPU", 0))
                alive.append(Node(node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], num_gpus))
        self._known |= {node.id: node for node in alive}
        return alive

    def start(self, job: run_process.Job, slot: Slot) -> Any:
        return self._on(self._run, slot[0].node, self._reserved(slot)).remote(job)

    def gpu_names(self, node: Node, python: str, devices: Sequence[str]) -> list[str]:
        """What torch on a node calls its devices."""
        try:
            return self._ray.get(self._on(self._look, node.id, {}).remote(python, list(devices)))
        except self._ray.exceptions.RayError as error:
            raise ConfigError(f"torch does not answer on {node.host}: {_reason(error)}") from None

    def wait(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        """The runs that have ended, at the latest after `seconds`."""
        return self._ray.wait(list(handles), num_returns=1, timeout=seconds)[0] if handles else []

    def result(self, handle: Any) -> dict[str, Any] | None:
        """How a run ended; None if its watcher was lost, with its node or without."""
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.RayTaskError as error:
            return {"error": _reason(error)}
        except self._ray.exceptions.RayError:
            return None

    def stop(self, handles: Sequence[Any], at_once: bool = False) -> None:
        """Ask runs to end; they return their results. `at_once`: kill them, and they are lost."""
        for handle in handles:
            self._ray.cancel(handle, force=at_once)

    def _on(self, task: Any, node: str, resources: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return task.options(resources=resources, scheduling_strategy=strategy)

    def _reserved(self, slot: Slot) -> dict[str, float]:
        if self.is_own:
            return {}
        node = self._known[slot[0].node]
        share = len(slot) / max(node.num_gpus, self._num_devices)
        return {f"node:{node.address}": int(share * 10_000) / 10_000}


@contextmanager
def connected(address: str | None, num_devices: int) -> Iterator[Cluster]:
    """Ray on this machine, with `num_devices`; or the cluster at an address (`auto`, `host:6379`)."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    import ray

    with _cleaned_up() if address is None else nullcontext():
        with _own_sigterm():
            _start_here(ray, num_devices) if address is None else _join(ray, address)
        try:
            yield Cluster(ray, num_devices, is_own=address is None)
        finally:
            ray.shutdown()


@contextmanager
def _cleaned_up() -> Iterator[None]:
    """Nothing that is started within outlives this process, even if it is killed: see `ray_cleanup.py`."""
    mark = uuid.uuid4().hex
    script = str(Path(__file__).resolve().with_name("ray_cleanup.py"))
    command = [sys.executable, "-I", script, f"{MARK}={mark}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its exit closes stdin and waits
        os.environ[MARK] = mark
        try:
            yield
        finally:
            del os.environ[MARK]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's handler of SIGTERM ends a process with status 15, and would replace ours."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise SystemExit(128 + signal.SIGTERM if error.code == signal.SIGTERM else error.code) from None
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray sets none
            signal.signal(signal.SIGTERM, before)


def _start_here(ray: Any, num_devices: int) -> None:
    for attempt in range(MOST_STARTS):
        try:
            ray.init("local", num_cpus=num_devices, **HERE, **QUIET)
            return
        except Exception as error:  # a plain one: on a busy machine Ray gives up on itself after half a minute
            ray.shutdown()
            if attempt == MOST_STARTS - 1:
                raise RunFailed(f"Ray could not start on this machine: {_reason(error)}") from error


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster answers there ({_reason(error)}); without an address, and "
            "without RAY_ADDRESS, the runs stay on this machine"
        ) from None


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
