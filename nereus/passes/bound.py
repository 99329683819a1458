"""Lower bounds for the chosen placement: bytes, node intake and transfer time that no routing can beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.passes.diff import Diff
from nereus.passes.links import Links

FloatArray = npt.NDArray[np.float64]


#: Ports of devices, of NICs, and the copying inside a node's host memory.
PORT_KINDS = GPU_IN, GPU_OUT, NIC_IN, NIC_OUT, HOST_COPY = "gpu-in", "gpu-out", "nic-in", "nic-out", "host-copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    moved_bytes: int
    node_in_bytes: tuple[int, ...]  # per node
    transfer_s: float
    limited_by: str  # the port that decides ``transfer_s``
    #: What proves ``transfer_s`` (weak duality, see ``flow_prices``): (kind of port, its number, weight) of every port
    #: that counts. Kinds: ``PORT_KINDS``.
    prices: tuple[tuple[str, int, int], ...] = ()


def bounds(diff: Diff, links: Links) -> Bounds:
    """Every wanter that lacks bytes takes them in once; every node whose places all lack them takes them in once;
    what only one place, or one node, holds leaves it at least once."""
    nodes = diff.topology.nodes
    gpu_in = np.zeros(links.num_devices)
    gpu_out = np.zeros(links.num_devices)
    nic_in = np.zeros(len(nodes), dtype=np.int64)
    nic_out = np.zeros(len(nodes), dtype=np.int64)
    host_copies = np.zeros(len(nodes), dtype=np.int64)  # inside a node's host memory
    moved = 0
    holder_nodes: dict[tuple[int, int], frozenset[int]] = {}
    #: Leaving bytes of a class are one copy for all demands: the largest demand, not the sum.
    leaving: dict[tuple[int, int], int] = {}
    for demand in diff.demands:
        key = (demand.table, demand.cls)
        holders = diff.holders[demand.table][demand.cls]
        if key not in holder_nodes:
            holder_nodes[key] = frozenset(links.node(p) for p in holders)
        inside = demand.node in holder_nodes[key]
        near = [p for p in holders if links.node(p) == demand.node] if inside else []
        # Host memory is one space for all processes of the node: bytes arrive there once, through any of their links.
        hosts = [p for p in demand.wanters if p >= links.num_devices]
        held_there = any(p >= links.num_devices for p in near)
        host_copies[demand.node] += demand.num_bytes * max(0, len(hosts) - (0 if held_there else 1))
        if held_there:
            hosts = []
        moved += demand.num_bytes if hosts else 0
        alone = hosts if len(hosts) == 1 else []
        for wanter in (*(p for p in demand.wanters if p < links.num_devices), *alone):
            moved += demand.num_bytes if wanter < links.num_devices else 0
            # The cheapest way in: from the own node where it has or takes in a copy, else the slower of port and NIC.
            rate = links.intra[demand.node] if wanter < links.num_devices else links.pcie[demand.node]
            gpu_in[wanter % links.num_devices] += demand.num_bytes * min(rate, links.pcie[demand.node])
        if not inside:
            nic_in[demand.node] += demand.num_bytes
            leaving[key] = max(leaving.get(key, 0), demand.num_bytes)
    for key, num_bytes in leaving.items():
        holders = diff.holders[key[0]][key[1]]
        if len(holder_nodes[key]) == 1:
            nic_out[next(iter(holder_nodes[key]))] += num_bytes
            if len(holders) == 1:
                source = holders[0]
                gpu_out[source % links.num_devices] += num_bytes * links.pcie[links.node(source)]
    nic = np.array([node.nic_bytes_per_s for node in nodes])
    candidates: list[tuple[str, str, FloatArray, Callable[[int], str]]] = [
        (GPU_IN, "GPU intake", gpu_in, lambda i: str(diff.topology.devices[i])),
        (GPU_OUT, "GPU output", gpu_out, lambda i: str(diff.topology.devices[i])),
        (NIC_IN, "NIC intake", nic_in / nic, lambda i: nodes[i].name),
        (NIC_OUT, "NIC output", nic_out / nic, lambda i: nodes[i].name),
        (HOST_COPY, "copying inside host memory", host_copies / HOST_COPY_BYTES_PER_S, lambda i: nodes[i].name),
    ]
    best, limited = 0.0, "nothing moves"
    prices: tuple[tuple[str, int, int], ...] = ()
    for kind, what, seconds, name in candidates:
        at = int(np.argmax(seconds))
        if seconds[at] > best:
            best, limited = float(seconds[at]), f"{what} of {name(at)}"
            prices = ((kind, at, 1),)
    # The transfer's bound is for what is demanded; bytes are counted as if all that can be derived were.
    node_in = (nic_in - diff.foregone.node_in_bytes).tolist()
    moved -= diff.foregone.moved_bytes
    return Bounds(moved_bytes=moved, node_in_bytes=tuple(node_in), transfer_s=best, limited_by=limited, prices=prices)
