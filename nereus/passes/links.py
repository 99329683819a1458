"""Rates and link classes between places: what a byte costs at every port it passes."""

from __future__ import annotations

from nereus.ir.holdings import Topology
from nereus.ir.transition import HOST, INTER, INTRA, LOCAL


class Links:
    """Rates and link classes between places, looked up once per node."""

    def __init__(self, topology: Topology) -> None:
        self.num_devices = topology.num_devices
        self.node_of: list[int] = topology.node_of.tolist()
        gpus = [node.gpu for node in topology.nodes]
        self.intra = [1.0 / min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s) for gpu in gpus]
        self.pcie = [1.0 / gpu.pcie_bytes_per_s for gpu in gpus]
        self.nic = [1.0 / node.nic_bytes_per_s for node in topology.nodes]

    def node(self, place: int) -> int:
        return self.node_of[place % self.num_devices]

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

    def port_seconds(self, src: int, dst: int, num_bytes: int) -> tuple[float, float, float]:
        """(source device port, destination device port, both NIC ports) for ``num_bytes`` from ``src`` to ``dst``."""
        out_rate, in_rate, nic_rate = self.rates(src, dst)[1:]
        return num_bytes * out_rate, num_bytes * in_rate, num_bytes * nic_rate

    def rates(self, src: int, dst: int) -> tuple[str, float, float, float]:
        """Link class, and seconds per byte on the three ports: source device, destination device, both NICs."""
        num_devices, node_of = self.num_devices, self.node_of
        src_node, dst_node = node_of[src % num_devices], node_of[dst % num_devices]
        if src_node != dst_node:
            nic = self.nic
            slower = nic[src_node] if nic[src_node] > nic[dst_node] else nic[dst_node]
            return INTER, self.pcie[src_node], self.pcie[dst_node], slower
        kind = self.link(src, dst)
        if kind == LOCAL:
            return kind, 0.0, 0.0, 0.0
        through_host = src >= num_devices or dst >= num_devices
        rate = self.pcie[src_node] if through_host else self.intra[src_node]
        return kind, rate, rate, 0.0
