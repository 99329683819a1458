"""Rates and link classes between places: what a byte costs at every port it passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.transition import HOST, INTER, INTRA, LINK_NUMBER, LOCAL

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of pairs of places: link class (position in ``LINKS``), and seconds per byte on the ports of both devices and of
    both rails."""

    link: IntArray
    gpu_out: FloatArray
    gpu_in: FloatArray
    nic_out: FloatArray
    nic_in: FloatArray


class Links:
    """Rates and link classes between places, looked up once per node."""

    def __init__(self, topology: Topology) -> None:
        self.num_devices = topology.num_devices
        self.node_of: list[int] = topology.node_of.tolist()
        gpus = [node.gpu for node in topology.nodes]
        self.intra = [1.0 / min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s) for gpu in gpus]
        self.pcie = [1.0 / gpu.pcie_bytes_per_s for gpu in gpus]
        #: Of a node, all rails together.
        self.nic = [1.0 / node.nic_bytes_per_s for node in topology.nodes]
        #: Of every rail, node by node, and which one serves each device.
        self.rail, self.rail_of, self.first_rail = rails_of(topology)
        #: The same as columns.
        self.nodes, self.rails = np.array(self.node_of, dtype=np.int64), np.array(self.rail_of, dtype=np.int64)
        self._seconds = np.array(self.intra), np.array(self.pcie), np.array(self.rail)

    def node(self, place: int) -> int:
        return self.node_of[place % self.num_devices]

    def rail_number(self, place: int) -> int:
        return self.rail_of[place % self.num_devices]

    def link(self, src: int, dst: int) -> str:
        if src == dst:
            return LOCAL
        same_node = self.node(src) == self.node(dst)
        src_host, dst_host = src >= self.num_devices, dst >= self.num_devices
        if same_node and src_host and dst_host:
            return LOCAL
        if src % self.num_devices == dst % self.num_devices:
            return HOST
        return INTRA if same_node else INTER

    def rail_s(self, place: int) -> float:
        """Seconds per byte of the rail that serves a place."""
        return self.rail[self.rail_of[place % self.num_devices]]

    def rates(self, src: int, dst: int) -> tuple[str, float, float, float]:
        """Link class, and seconds per byte on the three ports: source device, destination device, and the
        source's rail (``rail_s`` has the destination's)."""
        num_devices, node_of = self.num_devices, self.node_of
        src_node, dst_node = node_of[src % num_devices], node_of[dst % num_devices]
        if src_node != dst_node:
            return INTER, self.pcie[src_node], self.pcie[dst_node], self.rail[self.rail_of[src % num_devices]]
        kind = self.link(src, dst)
        if kind == LOCAL:
            return kind, 0.0, 0.0, 0.0
        through_host = src >= num_devices or dst >= num_devices
        rate = self.pcie[src_node] if through_host else self.intra[src_node]
        return kind, rate, rate, 0.0

    def rates_of(self, src: IntArray, dst: IntArray) -> Rates:
        """``rates`` of many pairs."""
        count, node_of, rail_of = self.num_devices, self.nodes, self.rails
        intra, pcie, rail = self._seconds
        at, to = src % count, dst % count
        near, inter = node_of[at], node_of[at] != node_of[to]
        host = (src >= count) | (dst >= count)
        local = (src == dst) | (~inter & (src >= count) & (dst >= count))
        inside = np.where(local, 0.0, np.where(host, pcie[near], intra[near]))
        kinds = [LINK_NUMBER[kind] for kind in (INTER, LOCAL, HOST)]
        return Rates(
            link=np.select((inter, local, at == to), kinds, LINK_NUMBER[INTRA]),
            gpu_out=np.where(inter, pcie[near], inside),
            gpu_in=np.where(inter, pcie[node_of[to]], inside),
            nic_out=np.where(inter, rail[rail_of[at]], 0.0),
            nic_in=np.where(inter, rail[rail_of[to]], 0.0),
        )


def rails_of(topology: Topology) -> tuple[list[float], list[int], list[int]]:
    """(seconds per byte of every rail, rail of every device, first rail of every node)."""
    seconds: list[float] = []
    first: list[int] = []
    for node in topology.nodes:
        first.append(len(seconds))
        seconds += [1.0 / node.rail_bytes_per_s] * node.rails
    nodes = topology.nodes
    of_device = [
        first[number] + nodes[number].rail(device.index)
        for device, number in zip(topology.devices, topology.node_of.tolist(), strict=True)
    ]
    return seconds, of_device, first


def rail_names(topology: Topology) -> list[str]:
    """``n0`` where a node's GPUs share all NICs, else ``n0.nic3``."""
    return [
        node.name if node.rails == 1 else f"{node.name}.nic{number}"
        for node in topology.nodes
        for number in range(node.rails)
    ]
