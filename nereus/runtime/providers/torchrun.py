"""Processes that torchrun started: how they find their job, and how its controller asks for them.

    torchrun --nnodes 1:4 --nproc-per-node 8 job.py

Two ways for ``job.py``. It may be the worker itself: ``nereus.attach(plan, **torchrun.join(plan.cluster))``. Then
torchrun ends all processes when one ends, and starts all anew as often as ``--max-restarts`` allows; the script goes on
from its checkpoint. Or each process that torchrun knows keeps the worker of its device as a child, and stays when that
one is lost (``keeper.py``): the survivors go on, and torchrun starts all anew only where a machine is gone.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from nereus.ir.cluster import Cluster, Device
from nereus.runtime.faults import CANNOT_START, DEADLINE, Fault, first_line
from nereus.runtime.providers.base import Machine
from nereus.runtime.session.members import ENDED
from nereus.runtime.session.record import Record, never, own_address

#: Untyped in part.
dist: Any = torch.distributed

_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What torchrun says to one of its processes. ``node``: number of its machine; ``shared``: torchrun keeps the
    store, else rank 0 does."""

    rank: int
    size: int
    node: int
    local: int
    address: str
    port: int
    shared: bool

    @classmethod
    def of_environment(cls) -> Place:
        """Raises Fault (CANNOT_START) in a process that torchrun did not start."""
        try:
            place = cls(
                rank=int(os.environ["RANK"]),
                size=int(os.environ["WORLD_SIZE"]),
                node=int(os.environ["GROUP_RANK"]),
                local=int(os.environ["LOCAL_RANK"]),
                address=os.environ["MASTER_ADDR"],
                port=int(os.environ["MASTER_PORT"]),
                shared=os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True",
            )
        except (KeyError, ValueError) as error:
            raise Fault(CANNOT_START, f"this process was not started by torchrun: no {first_line(error)}") from None
        if not (0 <= place.rank < place.size and place.node >= 0 and place.local >= 0 and 0 < place.port < 1 << 16):
            raise Fault(CANNOT_START, f"torchrun's environment does not fit together: {place}")
        return place

    def device(self, cluster: Cluster | None) -> Device:
        """Machines are the plan's nodes in torchrun's order. Raises Fault where the plan has no such device."""
        if cluster is None:
            return Device(f"n{self.node}", self.local)
        nodes = cluster.nodes
        if self.node >= len(nodes) or self.local >= nodes[self.node].num_gpus:
            text = f"rank {self.rank} is process {self.local} on machine {self.node}: the plan has no such device"
            raise Fault(CANNOT_START, text)
        return nodes[self.node].devices[self.local]

    def connect(self, start_s: float, *, serve: bool = True) -> Any:
        """A connection to the store, which this process keeps where no agent does (``serve`` and rank 0)."""
        keeps = serve and not self.shared and self.rank == 0
        try:
            return dist.TCPStore(
                self.address, self.port, None, keeps, timedelta(seconds=start_s), wait_for_workers=False
            )
        except RuntimeError as error:
            text = f"torchrun's store at {self.address}:{self.port} does not answer: {first_line(error)}"
            raise Fault(CANNOT_START, text) from None


def join(cluster: Cluster | None = None, *, start_s: float = 300.0) -> dict[str, Any]:
    """``store`` and ``device`` for ``attach``, in a worker that torchrun itself started. ``cluster``: of the plan;
    ``start_s``: for all of torchrun's processes to be there. Raises Fault."""
    place = Place.of_environment()
    store = place.connect(start_s)
    return {"store": dist.PrefixStore(agreed(place, store, start_s), store), "device": place.device(cluster)}


def agreed(place: Place, store: Any, start_s: float) -> str:
    """A name that this start of all processes has and no other one. torchrun's own count of restarts is not that: it
    stands still where a machine comes or goes, and the store is the same one.

    Rank 0 makes the name; a start counts once rank 0 has seen everyone in it. Whoever finds an earlier one's name
    either has been there, or its rank 0, which is gone, never says so. Raises Fault."""
    record = Record(store, "nereus/torchrun", place.rank)
    name = uuid.uuid4().hex
    end = time.monotonic() + start_s
    if place.rank == 0:
        record.put("start", (name, place.size))
        while record.counted(f"{name}/here") < place.size - 1:
            _not_after(end, place, record)
        record.put(f"{name}/go", True)
        return name
    seen: dict[str, bool] = {}
    while True:
        found, size = record.get("start") or ("", 0)
        if found and found not in seen:
            seen[found] = size == place.size and record.count(f"{found}/here/{place.rank}") == 1
            if seen[found]:
                record.count(f"{found}/here")
        if seen.get(found) and record.has(f"{found}/go"):
            return str(found)
        _not_after(end, place, record)


def _not_after(end: float, place: Place, record: Record) -> None:
    if time.monotonic() > end:
        raise Fault(DEADLINE, f"not all {place.size} processes of torchrun came", where=f"rank {place.rank}")
    time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A keeper, as it announces itself."""

    device: Device
    host: str
    address: str

    @classmethod
    def here(cls, device: Device, store: Any) -> Kept:
        return cls(device=device, host=socket.gethostname(), address=own_address(store))


class TorchrunProcesses:
    """The ``ProcessProvider`` of a job whose devices all have a keeper: what it asks for, the device's keeper does.
    ``store``: of this start. ``start_s``: for a process to be there."""

    def __init__(self, store: Any, devices: Sequence[Device], *, name: str, start_s: float = 60.0) -> None:
        self.store, self.name = store, name
        self._record = Record(store, name, 0)
        self._devices, self._start_s = tuple(devices), start_s

    def inventory(self) -> tuple[Machine, ...]:
        found: dict[str, list[Kept]] = {}
        for device in self._devices:
            kept: Kept | None = self._record.get(f"keeper/{device}")
            if kept is not None:
                found.setdefault(device.node, []).append(kept)
        return tuple(
            Machine(name=node, address=kept[0].address, devices=tuple(k.device for k in kept))
            for node, kept in found.items()
        )

    def spawn(self, device: Device, part: str = "") -> int:
        """The new process's number. Raises Fault."""
        key = order(self._record, device, "spawn", part)
        said = self._record.wait(f"{key}/done", self._start_s, of=f"the keeper of {device}", stop=never)
        if isinstance(said, str):
            raise Fault.decode(said)
        return int(said)

    def retire(self, device: Device) -> None:
        key = order(self._record, device, "retire")
        self._record.wait(f"{key}/done", self._start_s, of=f"the keeper of {device}", stop=never)

    def close(self) -> None:
        """All keepers end their processes, and themselves."""
        self._record.first(ENDED, ())


def order(record: Record, device: Device, *words: str) -> str:
    """To the keeper of a device; the key under which it answers. Raises Fault where the device has none."""
    if not record.has(f"keeper/{device}"):
        raise Fault(CANNOT_START, f"no process was started for {device}: torchrun has none there")
    key = f"order/{device}/{record.count(f'orders/{device}')}"
    record.put(key, words)
    return key


def asking(record: Record) -> Callable[[Device, str], None]:
    """For ``attach(spawn=...)`` in a process that a keeper started."""

    def ask(device: Device, part: str) -> None:
        order(record, device, "spawn", part)

    return ask
