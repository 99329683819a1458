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
    num_devices, node_of, intra, pcie = links.num_devices, [*links.node_of] * 2, links.intra, links.pcie
    into = [min(rate, port) for rate, port in zip(intra, pcie, strict=True)]
    gpu_in, gpu_out = [0.0] * num_devices, [0.0] * num_devices
    nic_in, nic_out = [0] * len(nodes), [0] * len(nodes)
    host_copies = [0] * len(nodes)  # inside a node's host memory
    moved = 0
    #: Per class: nodes with a holder, and with one in host memory.
    holder_nodes: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    #: Leaving bytes of a class are one copy for all demands: the largest demand, not the sum.
    leaving: dict[tuple[int, int], int] = {}
    near: set[tuple[int, int]] = set()  # classes that another place of a holder's node wants: it may send them on
    for demand in diff.demands:
        key, node, num_bytes = (demand.table, demand.cls), demand.node, demand.num_bytes
        found = holder_nodes.get(key)
        if found is None:
            holders = diff.holders[demand.table][demand.cls]
            in_host = {node_of[p] for p in holders if p >= num_devices}
            found = holder_nodes[key] = {node_of[p] for p in holders}, in_host
        for wanter in demand.wanters:
            if wanter < num_devices:
                # The cheapest way in: from the own node where it has or takes in a copy, else the slower of port and
                # NIC.
                moved += num_bytes
                gpu_in[wanter] += num_bytes * into[node]
        # Host memory is one space for all processes of the node: bytes arrive there once, through any of their links.
        hosts = [p for p in demand.wanters if p >= num_devices]
        if hosts:
            held_there = node in found[1]
            host_copies[node] += num_bytes * (len(hosts) - (0 if held_there else 1))
            if not held_there:
                moved += num_bytes
                if len(hosts) == 1:
                    gpu_in[hosts[0] % num_devices] += num_bytes * pcie[node]
        if node in found[0]:
            near.add(key)
        else:
            nic_in[node] += num_bytes
            leaving[key] = max(leaving.get(key, 0), num_bytes)
    for key, num_bytes in leaving.items():
        holders = diff.holders[key[0]][key[1]]
        if len(holder_nodes[key][0]) == 1:
            (home,) = holder_nodes[key][0]
            nic_out[home] += num_bytes
            if len(holders) == 1:
                gpu_out[holders[0] % num_devices] += num_bytes * (into[home] if key in near else pcie[home])
    nic = np.array([node.nic_bytes_per_s for node in nodes])
    candidates: list[tuple[str, str, FloatArray, Callable[[int], str]]] = [
        (GPU_IN, "GPU intake", np.array(gpu_in), lambda i: str(diff.topology.devices[i])),
        (GPU_OUT, "GPU output", np.array(gpu_out), lambda i: str(diff.topology.devices[i])),
        (NIC_IN, "NIC intake", np.array(nic_in) / nic, lambda i: nodes[i].name),
        (NIC_OUT, "NIC output", np.array(nic_out) / nic, lambda i: nodes[i].name),
        (
            HOST_COPY,
            "copying inside host memory",
            np.array(host_copies) / HOST_COPY_BYTES_PER_S,
            lambda i: nodes[i].name,
        ),
    ]
    best, limited = 0.0, "nothing moves"
    prices: tuple[tuple[str, int, int], ...] = ()
    for kind, what, seconds, name in candidates:
        at = int(np.argmax(seconds))
        if seconds[at] > best:
            best, limited = float(seconds[at]), f"{what} of {name(at)}"
            rails = range(links.first_rail[at], links.first_rail[at] + nodes[at].rails) if "NIC" in what else (at,)
            prices = tuple((kind, number, 1) for number in rails)
    # The transfer's bound is for what is demanded; bytes are counted as if all that can be derived were.
    node_in = (np.array(nic_in) - diff.foregone.node_in_bytes).tolist()
    moved -= diff.foregone.moved_bytes
    return Bounds(moved_bytes=moved, node_in_bytes=tuple(node_in), transfer_s=best, limited_by=limited, prices=prices)
