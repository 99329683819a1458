"""A real Ray cluster on this machine: a head without devices, and a raylet for every node of a plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from frameworks.harness import ENVIRONMENT, TESTS

#: The resource that stands for an accelerator.
DEVICE = "device"
_STORE_BYTES = 80 << 20


class RayCluster:
    """``nodes``: raylets, in the order in which they were added."""

    def __init__(self, num_devices: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray, self._num_devices = ray, num_devices
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False},
        )
        self.nodes: list[Any] = []

    def add(self, count: int = 1) -> None:
        """Machines that join."""
        for _ in range(count):
            resources = {DEVICE: self._num_devices}
            self.nodes.append(
                self._cluster.add_node(num_cpus=0, resources=resources, object_store_memory=_STORE_BYTES, wait=False)
            )
        self._cluster.wait_for_nodes(timeout=120)

    def connect(self) -> None:
        self._ray.init(address=self._cluster.address, log_to_driver=True, logging_level="error")

    def kill_raylet(self, pid: int) -> None:
        """As the end of a machine: its raylet dies without a word, and its workers with it."""
        node = next(n for n in self.nodes if pid in [p.process.pid for p in n.all_processes["raylet"]])
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, ray_id: str, within_s: int) -> None:
        """As a cloud's notice that a machine will be taken away."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self._cluster.address]
        command += ["--node-id", ray_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        subprocess.run([*command, "--deadline-remaining-seconds", str(within_s)], check=True, timeout=120)

    def close(self) -> None:
        with suppress(Exception):
            self._ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def ray_cluster(num_nodes: int, num_devices: int) -> Iterator[RayCluster]:
    """Connected, with ``num_nodes`` nodes of ``num_devices``; none of its processes is left at the end."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Raylets hand their environment to the workers.
    changes = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    before = {name: os.environ.get(name) for name in changes}
    there = _children()
    os.environ.update(changes)
    cluster = None
    try:
        cluster = RayCluster(num_devices)
        cluster.add(num_nodes)
        cluster.connect()
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        for pid in _children() - there:  # workers of a killed raylet may not have noticed yet
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _children() -> set[int]:
    """Ray's processes on this machine that are ours, by their names."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.joinpath("cmdline").read_bytes().startswith(b"ray::"):
                found.add(int(path.name))
    return found


def until(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(0.05)


if sys.platform != "linux":
    raise ImportError("tests that end raylets read /proc")
