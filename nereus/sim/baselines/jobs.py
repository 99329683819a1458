"""Answers of baselines as jobs of the simulator.

Per step and device there is a begin (fixed seconds, memory acquired), an end (memory released) and between them one
operation per pair of places: all that one place sends another in a step is one message, which flatters systems that
send tensor by tensor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nereus.ir.transition import LOCAL
from nereus.models.priors import MESSAGE_S
from nereus.sim.baselines.answer import STORAGE, Answer
from nereus.sim.builder import NOWHERE, JobBuilder
from nereus.sim.job import PORTS_PER_OP, IntArray, Job
from nereus.sim.network import Network


def job_of(answer: Answer) -> Job:
    """Raises ValueError for an answer without steps because the system cannot do the change."""
    if answer.cannot is not None:
        raise ValueError(f"{answer.baseline} cannot: {answer.cannot}")
    problem = answer.problem
    rows = JobBuilder()
    links, devices = problem.links, problem.num_devices
    ends: list[dict[int, int]] = []
    for step in answer.steps:
        begin: dict[int, int] = {}
        takes, gives = set(step.takes), set(step.gives)
        hosts = _devices_of_hosts(answer, step.devices)
        joined: tuple[int, ...] = ()
        if step.barrier:
            joined = (rows.op(f"{step.name} barrier", after=tuple(op for n in step.after for op in ends[n].values())),)
        for device in step.devices:
            after = joined or tuple(ends[number][device] for number in step.after if device in ends[number])
            at = rows.op(
                f"{step.name} begin {device}",
                after=after,
                fixed_s=step.fixed_s,
                space=device,
                acquired=step.acquired.get(device, 0),
                takes=device if device in takes else -1,
            )
            for host in hosts.get(device, ()):
                at = rows.op(
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
            number = rows.op(
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
            at = rows.op(
                f"{step.name} end {device}",
                after=tuple(done[device]),
                space=device,
                released=step.released.get(device, 0),
                gives=device if device in gives else -1,
            )
            for host in hosts.get(device, ()):
                at = rows.op(
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


def _job(answer: Answer, rows: JobBuilder) -> Job:
    problem = answer.problem
    network = Network(problem.topology)
    src, dst = rows.ends()
    # Storage hangs on the network: a device reaches it through its node's NIC.
    outside = (src == STORAGE) | (dst == STORAGE)
    ports, weights = rows.ports(network, np.flatnonzero((src != NOWHERE) & ~outside))
    for row in np.flatnonzero(outside).tolist():
        ports[row], weights[row] = _storage_ports(answer, network, int(src[row]), int(dst[row]))
    resources = network.resources(answer.base_bytes, problem.capacity, answer.owned)
    if answer.storage_bytes_per_s:
        rates = np.append(resources.port_bytes_per_s, answer.storage_bytes_per_s)
        resources = replace(resources, port_bytes_per_s=rates)
    return rows.job(resources, ports, weights, blocking=answer.blocking)


def _storage_ports(answer: Answer, network: Network, src: int, dst: int) -> tuple[IntArray, np.ndarray]:
    """Device over PCIe, its node's NIC, and the storage's one port."""
    place = dst if src == STORAGE else src
    device = place % network.num_devices
    node = answer.problem.links.node(device)
    reading = src == STORAGE
    nic = 2 * network.num_devices + (network.num_rails if reading else 0) + int(network.rail_of[device])
    port = network.num_devices + device if reading else device
    found = np.array([port, nic, network.num_ports, -1], dtype=np.int64)
    weights = np.ones(PORTS_PER_OP)
    gpu = answer.problem.topology.nodes[node].gpu
    fastest = max(min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s), gpu.pcie_bytes_per_s)
    weights[0] = fastest / gpu.pcie_bytes_per_s
    return found, weights
