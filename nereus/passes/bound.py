"""Lower bounds for the chosen placement: bytes, node intake and transfer time that no routing can beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.passes.diff import Diff, holders_by_class
from nereus.passes.links import Links
from nereus.passes.lists import Lists, contains

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
    demands, num_devices = diff.demands, links.num_devices
    node_of = np.array([*links.node_of] * 2, dtype=np.int64)  # of GPUs, then of host memories
    pcie = np.array(links.pcie)
    into = np.minimum(links.intra, pcie)
    gpu_in, gpu_out = np.zeros(num_devices), np.zeros(num_devices)
    # Bytes; copies are those inside a node's host memory.
    nic_in, nic_out, host_copies = (np.zeros(len(nodes), dtype=np.int64) for _ in range(3))
    holders = holders_by_class(diff)
    at, in_host = holders.owner, holders.item >= num_devices
    holding_nodes = Lists.of_pairs(at, node_of[holders.item], len(holders))
    host_nodes = Lists.of_pairs(at[in_host], node_of[holders.item[in_host]], len(holders))
    cls, node, num_bytes = demands.classes.owner, demands.node, demands.num_bytes
    # A GPU's cheapest way in: from the own node where it has or takes in a copy, else the slower of port and NIC.
    owner, place = demands.wanters.owner, demands.wanters.item
    gpu = place < num_devices
    moved = int(num_bytes[owner[gpu]].sum())
    np.add.at(gpu_in, place[gpu], num_bytes[owner[gpu]] * into[node[owner[gpu]]])
    # Host memory is one space for all processes of the node: bytes arrive there once, through any of their links.
    hosts = np.bincount(owner[~gpu], minlength=len(demands))
    arriving = (hosts > 0) & ~contains(host_nodes, cls, node)
    np.add.at(host_copies, node, num_bytes * (hosts - arriving))
    moved += int(num_bytes[arriving].sum())
    alone = ~gpu & (arriving & (hosts == 1))[owner]
    np.add.at(gpu_in, place[alone] % num_devices, num_bytes[owner[alone]] * pcie[node[owner[alone]]])
    inside = contains(holding_nodes, cls, node)
    np.add.at(nic_in, node[~inside], num_bytes[~inside])
    #: Leaving bytes of a class are one copy for all demands: the largest demand, not the sum.
    leaving = np.zeros(len(holders), dtype=np.int64)
    np.maximum.at(leaving, cls[~inside], num_bytes[~inside])
    near = np.bincount(cls[inside], minlength=len(holders)) > 0  # another place of a holder's node may send it on
    single = np.flatnonzero((holding_nodes.counts == 1) & (leaving > 0))
    np.add.at(nic_out, holding_nodes.item[holding_nodes.first[single]], leaving[single])
    single = single[holders.counts[single] == 1]
    source = holders.item[holders.first[single]]
    home = node_of[source]
    np.add.at(gpu_out, source % num_devices, leaving[single] * np.where(near[single], into[home], pcie[home]))
    nic = np.array([node.nic_bytes_per_s for node in nodes])
    candidates: list[tuple[str, str, FloatArray, Callable[[int], str]]] = [
        (GPU_IN, "GPU intake", gpu_in, lambda i: str(diff.topology.devices[i])),
        (GPU_OUT, "GPU output", gpu_out, lambda i: str(diff.topology.devices[i])),
        (NIC_IN, "NIC intake", nic_in / nic, lambda i: nodes[i].name),
        (NIC_OUT, "NIC output", nic_out / nic, lambda i: nodes[i].name),
        (
            HOST_COPY,
            "copying inside host memory",
            host_copies / HOST_COPY_BYTES_PER_S,
            lambda i: nodes[i].name,
        ),
    ]
    best, limited = 0.0, "nothing moves"
    prices: tuple[tuple[str, int, int], ...] = ()
    for kind, what, seconds, name in candidates:
        most = int(np.argmax(seconds))
        if seconds[most] > best:
            best, limited = float(seconds[most]), f"{what} of {name(most)}"
            ports = range(most, most + 1)
            if "NIC" in what:
                ports = range(links.first_rail[most], links.first_rail[most] + nodes[most].rails)
            prices = tuple((kind, number, 1) for number in ports)
    # The transfer's bound is for what is demanded; bytes are counted as if all that can be derived were.
    node_in = (nic_in - diff.foregone.node_in_bytes).tolist()
    moved -= diff.foregone.moved_bytes
    return Bounds(moved_bytes=moved, node_in_bytes=tuple(node_in), transfer_s=best, limited_by=limited, prices=prices)
