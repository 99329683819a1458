"""Ports of a topology for the simulator, as the compiler's cost model sees them.

Device d: port d out, port D + d in; rail r (a node's NICs, or those of a run of its GPUs): out 2D + r, in 2D + R + r;
copies inside the host memory of node n: 2D + 2R + n. A device port's rate is that of its fastest links; a byte that
passes it over PCIe (to host memory or to the NIC) weighs as much more as PCIe is slower. So a device port is one
resource, as in the bounds that schedules are compared with.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.holdings import Topology
from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.passes.links import rails_of
from nereus.sim.job import PORTS_PER_OP, FloatArray, IntArray, Resources

#: What an operation that moves nothing has as ports.
NO_PORTS = (-1,) * PORTS_PER_OP


class Network:
    """Rates of every port, and which ports a transfer between two places passes."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.num_devices, self.num_nodes = topology.num_devices, len(topology.nodes)
        gpus = [node.gpu for node in topology.nodes]
        self._intra = np.array([min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s) for gpu in gpus])
        self._pcie = np.array([gpu.pcie_bytes_per_s for gpu in gpus])
        self._fastest = np.maximum(self._intra, self._pcie)
        seconds, of_device, _ = rails_of(topology)
        self._rail = 1.0 / np.array(seconds)
        self.rail_of = np.array(of_device, dtype=np.int64)
        self.num_rails = len(seconds)
        self._node_of = np.asarray(topology.node_of, dtype=np.int64)

    @property
    def num_ports(self) -> int:
        return 2 * self.num_devices + 2 * self.num_rails + self.num_nodes

    def port_bytes_per_s(self) -> FloatArray:
        device = self._fastest[self._node_of]
        copies = np.full(self.num_nodes, HOST_COPY_BYTES_PER_S)
        return np.concatenate((device, device, self._rail, self._rail, copies))

    def resources(self, base_bytes: IntArray, capacity_bytes: IntArray, owned: tuple[int, ...] = ()) -> Resources:
        """Spaces as in the compiler: devices, then host memory of nodes."""
        return Resources(
            port_bytes_per_s=self.port_bytes_per_s(),
            space_base_bytes=np.asarray(base_bytes, dtype=np.int64),
            space_capacity_bytes=np.asarray(capacity_bytes, dtype=np.int64),
            num_devices=self.num_devices,
            owned=owned,
        )

    def ports(self, src: IntArray, dst: IntArray) -> tuple[IntArray, FloatArray]:
        """(ports, weights), both ``[n, PORTS_PER_OP]``, of transfers from places ``src`` to places ``dst``."""
        src, dst = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        devices, rails = self.num_devices, self.num_rails
        src_device, dst_device = src % devices, dst % devices
        src_node, dst_node = self._node_of[src_device], self._node_of[dst_device]
        src_host, dst_host = src >= devices, dst >= devices
        inter = src_node != dst_node
        copied = ~inter & src_host & dst_host & (src != dst)
        stays = (src == dst) | (~inter & src_host & dst_host)
        pcie = inter | src_host | dst_host
        out = np.where(stays, -1, src_device)
        into = np.where(stays, -1, devices + dst_device)
        copying = np.where(copied, 2 * devices + 2 * rails + src_node, -1)
        first = np.where(inter, 2 * devices + self.rail_of[src_device], copying)
        second = np.where(inter, 2 * devices + rails + self.rail_of[dst_device], -1)
        ports = np.stack((out, into, first, second), axis=1)
        weights = np.ones(ports.shape)
        weights[:, 0] = np.where(pcie, self._fastest[src_node] / self._pcie[src_node], self._weight_inside(src_node))
        weights[:, 1] = np.where(pcie, self._fastest[dst_node] / self._pcie[dst_node], self._weight_inside(dst_node))
        return ports, weights

    def _weight_inside(self, node: IntArray) -> FloatArray:
        weight: FloatArray = self._fastest[node] / self._intra[node]
        return weight
