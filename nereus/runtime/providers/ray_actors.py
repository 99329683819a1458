"""A job's processes as Ray actors, placed so that ranks follow the plan's order of devices.

    ray.init(...)
    with RayActors("my_job:worker", cluster=plan.cluster, bundle={"GPU": 1, "CPU": 4}, args=...) as provider:
        job = nereus.attach(plan, provider=provider, replan=replan)

Each node of the plan is a placement group of its own on one machine, with a bundle for every device. So a machine that
is lost takes no other's places with it, one that joins is one more group, and one that is to go is given back whole.
A node's first actors start together and are ordered by the accelerator that Ray gave each bundle: device 0 has the
lowest. Whatever runs in a bundle later gets the same one. Where a device has several processes (``parts``), each has an
equal share of the bundle.

Ray sees the end of an actor within milliseconds and says so in the future of its call; that is written to the record at
once, where every survivor's watching thread waits (``session/watch.py``) and ends the communicators. An actor that Ray
calls unavailable counts as lost too: if it still runs, it finds out from the record that it may serve no more.
"""

from __future__ import annotations

import ipaddress
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed

from nereus.ir.cluster import Cluster, Device
from nereus.runtime.adapters.base import FrameworkMissing
from nereus.runtime.codec import encode
from nereus.runtime.faults import CANNOT_START, Fault, first_line
from nereus.runtime.providers.base import Machine
from nereus.runtime.providers.ray_host import Host, Identity
from nereus.runtime.session.members import report_loss
from nereus.runtime.session.record import Record

#: Untyped in part.
dist: Any = torch.distributed

#: Ray's own name of a machine, on which a bundle can insist.
_NODE_LABEL = "ray.io/node-id"


@dataclass(slots=True)
class _Node:
    """A node of the plan on a machine of Ray's. ``bundles``: of each device, empty until the first actors have started;
    ``hosts``: actors with who they are, by device and part; ``runs``: those that have been given their work. ``lock``:
    held while actors start."""

    name: str
    ray_id: str
    group: Any
    size: int
    bundles: list[int] = field(default_factory=list)
    hosts: dict[tuple[int, str], tuple[Any, Identity]] = field(default_factory=dict)
    runs: set[tuple[int, str]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class RayActors:
    """``target``: ``module:function``, which the workers can import; see ``ProcessProvider`` for its arguments.
    ``args``: plain values. ``cluster``: names the nodes, in order; a machine that joins becomes the first node without
    one. ``bundle``: resources of one device; ``parts``: its processes share them. ``env``: added to their environment.
    ``start_s``: for Ray to start a node's actors.
    """

    def __init__(
        self,
        target: str,
        *,
        cluster: Cluster,
        bundle: Mapping[str, float],
        parts: Sequence[str] = ("",),
        args: Mapping[str, Any] | None = None,
        name: str = "nereus",
        env: Mapping[str, str] | None = None,
        start_s: float = 120.0,
    ) -> None:
        self._ray = _ray()
        if not any(amount for key, amount in bundle.items() if key != "CPU"):
            raise ValueError(f"a bundle of {dict(bundle)} has no accelerator, by which machines are known")
        self.name = name
        self._address = str(self._ray.util.get_node_ip_address())
        #: The server is a thread of its own, which no Python of this process holds up.
        self.store: Any = dist.TCPStore(
            self._address, 0, None, True, timedelta(seconds=start_s), wait_for_workers=False
        )
        self.record = Record(self.store, name, 0)
        self._target, self._args, self._cluster, self._bundle = target, encode(dict(args or {})), cluster, dict(bundle)
        self._env, self._start_s, self._parts = dict(env or {}), start_s, tuple(parts)
        self._lock = threading.RLock()
        self._names: dict[str, str] = {}  # Ray's id of a machine -> node
        self._nodes: dict[str, _Node] = {}  # by name
        self._doubted: set[str] = set()  # machines whose actors Ray lost sight of
        self._closing = False

    # -- ProcessProvider -----------------------------------------------------------------------------------------------

    def inventory(self) -> tuple[Machine, ...]:
        leaving = _leaving()
        with self._lock:
            machines = self._machines()
            found = []
            for node in self._cluster.nodes:
                ray_id = next((i for i, name in self._names.items() if name == node.name), None)
                if ray_id is not None:
                    seconds = leaving.get(ray_id)
                    address = machines[ray_id]["NodeManagerAddress"]
                    found.append(Machine(name=node.name, address=address, devices=node.devices, leaves_in_s=seconds))
            return tuple(found)

    def spawn(self, device: Device, part: str = "") -> tuple[str, int]:
        """Its host and pid. With a node's first process, actors for all its devices start."""
        if part not in self._parts or device not in self._cluster.devices:
            text = f"no process was started for {device}: no node here has it, or its part is none of {self._parts}"
            raise Fault(CANNOT_START, text)
        node, key = self._node(device.node), (device.index, part)
        try:
            with node.lock:
                self._start(node, device.index, part)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            if not node.runs:
                self._give_back(node)
            raise Fault(CANNOT_START, f"Ray started no process for {device}: {first_line(error)}") from None
        with self._lock:
            if self._nodes.get(node.name) is not node:
                self._give_back(node)  # gone while the actors started
                raise Fault(CANNOT_START, f"no process was started for {device}: its machine is gone")
            if key not in node.hosts or key in node.runs:
                raise Fault(CANNOT_START, f"no process was started for {device}: it has one, or that one just ended")
            actor, (name, pid, _) = node.hosts[key]
            job = {
                "address": self._address,
                "port": self.store.port,
                "name": self.name,
                "device": str(device),
                "start_s": self._start_s,
                **({"part": part} if part else {}),
            }
            node.runs.add(key)
            future: Future[None] = actor.run.remote(self._target, job, self._args).future()
        future.add_done_callback(partial(self._ended, node, key, (name, pid)))
        return name, pid

    def retire(self, device: Device) -> None:
        """Where no other device of the node has a process, the machine goes back to Ray."""
        with self._lock:
            node = self._nodes.get(device.node)
            if node is None:
                return
            for key in [key for key in node.hosts if key[0] == device.index]:
                self._end(node, key)
            if not node.runs:
                self._give_back(node)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for node in list(self._nodes.values()):
                self._give_back(node)

    def __enter__(self) -> RayActors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- machines ------------------------------------------------------------------------------------------------------

    def _machines(self) -> dict[str, Any]:
        """Ray's live machines that can be nodes, by Ray's id, each with a name where one is free."""
        alive = {
            machine["NodeID"]: machine
            for machine in self._ray.nodes()
            if machine["Alive"] and machine["NodeID"] not in self._doubted
        }
        for ray_id in [i for i in self._names if i not in alive]:
            name = self._names.pop(ray_id)
            if (node := self._nodes.get(name)) is not None:
                self._give_back(node)
        for ray_id, machine in sorted(alive.items(), key=_order):
            if ray_id not in self._names:
                size = int(min(machine["Resources"].get(key, 0) // amount for key, amount in self._bundle.items()))
                free = [n for n in self._cluster.nodes if n.name not in self._names.values() and n.num_gpus <= size]
                if free:
                    self._names[ray_id] = free[0].name
        return alive

    def _node(self, name: str) -> _Node:
        """The node with its placement group. Raises Fault where no machine is it."""
        with self._lock:
            self._machines()
            if (found := self._nodes.get(name)) is not None:
                return found
            ray_id = next((i for i, known in self._names.items() if known == name), None)
            if ray_id is None:
                raise Fault(CANNOT_START, f"Ray has no machine for node {name}")
            size = self._cluster.node(name).num_gpus
            group = self._ray.util.placement_group(
                [self._bundle] * size, strategy="STRICT_PACK", bundle_label_selector=[{_NODE_LABEL: ray_id}] * size
            )
            node = self._nodes[name] = _Node(name=name, ray_id=ray_id, group=group, size=size)
            return node

    def _start(self, node: _Node, index: int, part: str) -> None:
        """The actor of ``part`` on a device; the first time those on all devices, which tells the devices' order."""
        if (index, part) in node.hosts:
            return
        if not node.bundles and not node.group.wait(self._start_s):
            raise TimeoutError(f"its machine has no room for {node.size} x {self._bundle}")
        bundles = [node.bundles[index]] if node.bundles else list(range(node.size))
        actors = [self._actor(node, bundle) for bundle in bundles]
        try:
            identities = self._ray.get([actor.identity.remote() for actor in actors], timeout=self._start_s)
        except BaseException:
            for actor in actors:
                self._ray.kill(actor)
            raise
        if node.bundles:
            node.hosts[index, part] = actors[0], identities[0]
            return
        # Ray's ids are numbers where a machine's accelerators are counted; else the bundle is the device.
        node.bundles = sorted(bundles, key=lambda bundle: (len(identities[bundle][2]), identities[bundle][2]))
        for number, bundle in enumerate(node.bundles):
            node.hosts[number, part] = actors[bundle], identities[bundle]

    def _actor(self, node: _Node, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {key: amount / len(self._parts) for key, amount in self._bundle.items()}
        more = {key: amount for key, amount in share.items() if key not in ("CPU", "GPU")}
        return (
            self._ray.remote(Host)
            .options(
                num_cpus=share.get("CPU", 0),
                num_gpus=share.get("GPU", 0),
                resources=more,
                max_restarts=0,
                runtime_env={"env_vars": self._env} if self._env else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(node.group, placement_group_bundle_index=bundle),
            )
            .remote()
        )

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _ended(self, node: _Node, key: tuple[int, str], who: tuple[str, int], future: Future[None]) -> None:
        """In a thread of Ray's, which must not wait for Ray."""
        error = future.exception()
        with suppress(Fault):
            report_loss(self.record, who)
        if self._closing or key not in node.hosts:  # we ended it
            return
        if error is not None:
            text = str(error) if isinstance(error, self._ray.exceptions.RayTaskError) else first_line(error)
            print(f"{node.name}.gpu{key[0]}: {text}", file=sys.stderr, flush=True)
        threading.Thread(target=self._clear, args=(node, key, error), daemon=True).start()

    def _clear(self, node: _Node, key: tuple[int, str], error: BaseException | None) -> None:
        with self._lock:
            if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                self._doubted.add(node.ray_id)
            self._end(node, key)

    def _end(self, node: _Node, key: tuple[int, str]) -> None:
        node.runs.discard(key)
        if (host := node.hosts.pop(key, None)) is not None:
            self._ray.kill(host[0])

    def _give_back(self, node: _Node) -> None:
        with self._lock:
            if self._nodes.get(node.name) is node:
                del self._nodes[node.name]
            for key in list(node.hosts):
                self._end(node, key)
            self._ray.util.remove_placement_group(node.group)


def _ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError:
        raise FrameworkMissing("Ray is not installed: pip install 'nereus[ray]'") from None
    if not ray.is_initialized():
        raise Fault(CANNOT_START, "this process is in no Ray cluster: call ray.init() first")
    return ray


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    """By address, then by Ray's id: the same at every look."""
    ray_id, machine = item
    return int(ipaddress.ip_address(machine["NodeManagerAddress"])), ray_id


def _leaving() -> dict[str, float]:
    """Seconds until machines that Ray drains are gone, by Ray's id; empty where this Ray does not tell."""
    from ray._private import state

    ask = getattr(state.state, "get_draining_nodes", None)
    now_s = time.time()
    found = ask() if ask is not None else {}
    return {ray_id: max(0.0, at_ms / 1e3 - now_s) if at_ms else math.inf for ray_id, at_ms in found.items()}
