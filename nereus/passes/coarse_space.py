"""coarse: the devices and nodes of two plans under common numbers, and the rates of their ports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.coarse_grid import FloatArray
from nereus.passes.coarse_side import Side, Where


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Nodes of the new cluster, as listed. What the old plan has elsewhere is lost: number -1."""

    num_devices: int
    names: tuple[str, ...]
    node_of: IntArray  # per device
    first: IntArray  # first device of every node
    gpus: IntArray
    old_node: IntArray  # number here of every node of the old plan
    capacity: IntArray  # per device
    #: Seconds per byte: into a GPU by the best link, by its host link; through a node's NICs.
    gpu_s: FloatArray  # per device
    pcie_s: FloatArray  # per device
    nic_s: FloatArray  # per node
    _devices: dict[int, IntArray] = field(default_factory=dict)

    def nodes(self, side: Side, where: Where) -> IntArray:
        return self.old_node[where.node] if side.node_names != self.names else where.node

    def devices(self, side: Side, where: Where) -> IntArray:
        """Device of every rank, -1 where it is lost."""
        known = self._devices.get(id(where))
        if known is not None:
            return known
        if side.node_names != self.names:
            found = self._devices[id(where)] = self._find(side, where)
            return found
        # The same for all plans that this one is compared with on one cluster: ``first`` is the new plan's own array.
        first, found = where.memo.get("devices", (None, None))
        if first is not self.first:
            found = self._find(side, where)
            where.memo["devices"] = self.first, found
        self._devices[id(where)] = found
        return found

    def _find(self, side: Side, where: Where) -> IntArray:
        node = self.nodes(side, where)
        found: IntArray = self.first[node] + where.gpu
        lost = (node < 0) | (where.gpu >= self.gpus[node])
        return np.where(lost, -1, found)

    def all_devices(self, side: Side) -> IntArray:
        """Number here of every device of ``side``."""
        node = np.repeat(np.arange(len(side.node_gpus)), side.node_gpus)
        gpu = np.arange(len(node)) - np.repeat(np.cumsum(side.node_gpus) - side.node_gpus, side.node_gpus)
        return self._find(side, Where(node, gpu))


def space_of(old: Side, new: Side) -> Space:
    ports = new.ports
    if old.node_names == new.node_names:
        old_node = np.arange(len(new.node_names))
    else:
        number = {name: i for i, name in enumerate(new.node_names)}
        old_node = np.array([number.get(name, -1) for name in old.node_names], dtype=np.int64)
    return Space(
        num_devices=len(ports.node_of),
        names=new.node_names,
        node_of=ports.node_of,
        first=new.first_device,
        gpus=new.node_gpus,
        old_node=old_node,
        capacity=ports.capacity,
        gpu_s=ports.gpu_s,
        pcie_s=ports.pcie_s,
        nic_s=ports.nic_s,
    )
