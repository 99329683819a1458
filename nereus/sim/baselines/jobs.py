"""Answers of baselines as jobs of the simulator.

Per step and device there is a begin (fixed seconds, memory acquired), an end (memory released) and between them one
operation per pair of places: all that one place sends another in a step is one message, which flatters systems that
send tensor by tensor.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.transition import LOCAL
from nereus.passes.links import MESSAGE_S
from nereus.sim.baselines.answer import STORAGE, Answer
from nereus.sim.job import PORTS_PER_OP, IntArray, Job
from nereus.sim.network import NO_PORTS, Network


class _Rows:
    """Columns of a job under construction."""

    def __init__(self) -> None:
        self.name: list[str] = []
        self.fixed_s: list[float] = []
        self.num_bytes: list[int] = []
        self.src: list[int] = []  # places; -2: moves nothing
        self.dst: list[int] = []
        self.space: list[int] = []
        self.acquired: list[int] = []
        self.released: list[int] = []
        self.takes: list[int] = []
        self.gives: list[int] = []
        self.edges: list[tuple[int, int]] = []

    def add(
        self,
        name: str,
        *,
        after: tuple[int, ...] = (),
        fixed_s: float = 0.0,
        num_bytes: int = 0,
        src: int = -2,
        dst: int = -2,
        space: int = -1,
        acquired: int = 0,
        released: int = 0,
        takes: int = -1,
        gives: int = -1,
    ) -> int:
        number = len(self.name)
        self.name.append(name)
        self.fixed_s.append(fixed_s)
        self.num_bytes.append(num_bytes)
        self.src.append(src)
        self.dst.append(dst)
        self.space.append(space)
        self.acquired.append(acquired)
        self.released.append(released)
        self.takes.append(takes)
        self.gives.append(gives)
        self.edges += [(before, number) for before in after]
        return number


def job_of(answer: Answer) -> Job:
    """Raises ValueError for an answer without steps because the system cannot do the change."""
    if answer.cannot is not None:
        raise ValueError(f"{answer.baseline} cannot: {answer.cannot}")
    problem = answer.problem
    rows = _Rows()
    links, devices = problem.links, problem.num_devices
    ends: list[dict[int, int]] = []
    for step in answer.steps:
        begin: dict[int, int] = {}
        takes, gives = set(step.takes), set(step.gives)
        hosts = _devices_of_hosts(answer, step.devices)
        joined: tuple[int, ...] = ()
        if step.barrier:
            joined = (rows.add(f"{step.name} barrier", after=tuple(op for n in step.after for op in ends[n].values())),)
        for device in step.devices:
            after = joined or tuple(ends[number][device] for number in step.after if device in ends[number])
            at = rows.add(
                f"{step.name} begin {device}",
                after=after,
                fixed_s=step.fixed_s,
                space=device,
                acquired=step.acquired.get(device, 0),
                takes=device if device in takes else -1,
            )
            for host in hosts.get(device, ()):
                at = rows.add(
                    f"{step.name} begin host {host}", after=(at,), space=host, acquired=step.acquired.get(host, 0)
                )
            begin[device] = at
        totals: dict[tuple[int, int], int] = {}
        for t in step.transfers:
            if STORAGE in (t.src, t.dst) or t.src != t.dst:
                totals[t.src, t.dst] = totals.get((t.src, t.dst), 0) + t.num_bytes
        done: dict[int, list[int]] = {device: [begin[device]] for device in step.devices}
        for (src, dst), num_bytes in totals.items():
            sides = {place % devices for place in (src, dst) if place != STORAGE}
            stays = STORAGE not in (src, dst) and links.link(src, dst) == LOCAL
            number = rows.add(
                f"{step.name} {src} -> {dst}",
                after=tuple(begin[device] for device in sides),
                fixed_s=0.0 if stays else MESSAGE_S,
                num_bytes=num_bytes,
                src=src,
                dst=dst,
            )
            for device in sides:
                done[device].append(number)
        last: dict[int, int] = {}
        for device in step.devices:
            at = rows.add(
                f"{step.name} end {device}",
                after=tuple(done[device]),
                space=device,
                released=step.released.get(device, 0),
                gives=device if device in gives else -1,
            )
            for host in hosts.get(device, ()):
                at = rows.add(
                    f"{step.name} end host {host}", after=(at,), space=host, released=step.released.get(host, 0)
                )
            last[device] = at
        ends.append(last)
    return _job(answer, rows)


def _devices_of_hosts(answer: Answer, devices: tuple[int, ...]) -> dict[int, list[int]]:
    """Device -> host memory spaces that it allocates for: the first device of each node in the step."""
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for device in devices:
        node = answer.problem.links.node(device)
        if node not in seen:
            seen.add(node)
            found[device] = [answer.problem.num_devices + node]
    return found


def _job(answer: Answer, rows: _Rows) -> Job:
    problem = answer.problem
    network = Network(problem.topology)
    src, dst = np.array(rows.src, dtype=np.int64), np.array(rows.dst, dtype=np.int64)
    ports = np.tile(np.array(NO_PORTS, dtype=np.int64), (len(src), 1))
    weights = np.ones(ports.shape)
    moving = np.flatnonzero(src > -2)
    if len(moving):
        # Storage hangs on the network: a device reaches it through its node's NIC.
        outside = (src[moving] == STORAGE) | (dst[moving] == STORAGE)
        inside = moving[~outside]
        ports[inside], weights[inside] = network.ports(src[inside], dst[inside])
        for row in moving[outside].tolist():
            ports[row], weights[row] = _storage_ports(answer, network, rows.src[row], rows.dst[row])
    resources = network.resources(answer.base_bytes, problem.capacity, answer.owned)
    if answer.storage_bytes_per_s:
        rates = np.append(resources.port_bytes_per_s, answer.storage_bytes_per_s)
        resources = type(resources)(
            port_bytes_per_s=rates,
            space_base_bytes=resources.space_base_bytes,
            space_capacity_bytes=resources.space_capacity_bytes,
            num_devices=resources.num_devices,
            owned=resources.owned,
        )
    return Job(
        resources=resources,
        name=tuple(rows.name),
        fixed_s=np.array(rows.fixed_s),
        num_bytes=np.array(rows.num_bytes, dtype=np.int64),
        ports=ports,
        weights=weights,
        space=np.array(rows.space, dtype=np.int64),
        acquired=np.array(rows.acquired, dtype=np.int64),
        released=np.array(rows.released, dtype=np.int64),
        takes=np.array(rows.takes, dtype=np.int64),
        gives=np.array(rows.gives, dtype=np.int64),
        edges=np.array(rows.edges, dtype=np.int64).reshape(-1, 2),
        blocking=answer.blocking,
    )


def _storage_ports(answer: Answer, network: Network, src: int, dst: int) -> tuple[IntArray, np.ndarray]:
    """Device over PCIe, its node's NIC, and the storage's one port."""
    place = dst if src == STORAGE else src
    device = place % network.num_devices
    node = answer.problem.links.node(device)
    reading = src == STORAGE
    nic = 2 * network.num_devices + (network.num_nodes if reading else 0) + node
    port = network.num_devices + device if reading else device
    found = np.array([port, nic, network.num_ports, -1], dtype=np.int64)
    weights = np.ones(PORTS_PER_OP)
    gpu = answer.problem.topology.nodes[node].gpu
    fastest = max(min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s), gpu.pcie_bytes_per_s)
    weights[0] = fastest / gpu.pcie_bytes_per_s
    return found, weights
