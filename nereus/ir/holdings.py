"""Holdings: which memory holds which state, before and after.

A *place* is the memory that one rank owns: its GPU, or its process's part of the node's host memory. Places of one
node's host memory are one memory space: a copy between them crosses no link and is not counted as moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nereus.ir.cluster import Cluster, Device, Node
from nereus.ir.described import DescribedLayout
from nereus.ir.layout import BoolArray, BoundLayout, IntArray
from nereus.ir.offload import in_host
from nereus.ir.plan import Slot
from nereus.ir.tensor import LogicalTensor


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Every device of the old and the new cluster, numbered: device d has GPU place ``d`` and host place ``D + d``."""

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    node_of: IntArray  # device -> node number
    alive: tuple[bool, ...]  # per node: False = lost, nothing on it is a source

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def index(self) -> dict[Device, int]:
        return self._index

    @cached_property
    def _index(self) -> dict[Device, int]:
        return {device: i for i, device in enumerate(self.devices)}

    def numbers_of(self, devices: tuple[Device, ...]) -> IntArray:
        """Numbers of devices. The ranks of a stage are asked for again and again, so answers are kept."""
        known = self._numbers.get(id(devices))
        if known is None:
            index = self._index
            numbers = np.array([index[device] for device in devices], dtype=np.int64)
            known = self._numbers[id(devices)] = (devices, numbers)  # while the tuple is kept, no other has its id
        return known[1]

    @cached_property
    def _numbers(self) -> dict[int, tuple[tuple[Device, ...], IntArray]]:
        return {}

    def node_of_place(self, place: int) -> int:
        return int(self.node_of[place % self.num_devices])

    def is_host(self, place: int) -> bool:
        return place >= self.num_devices

    def space_of_place(self, place: int) -> int:
        """Memory space: device number, or D + node number for host memory."""
        if place < self.num_devices:
            return place
        return self.num_devices + self.node_of_place(place)

    def place_name(self, place: int) -> str:
        device = self.devices[place % self.num_devices]
        return f"{device.node}.host" if self.is_host(place) else str(device)


def join_clusters(old: Cluster, new: Cluster) -> Topology:
    """Old and new devices together. A node that the new cluster lacks is lost, whether or not ``remove`` names it;
    GPUs that a node has no more are too, as a node of their own."""
    counts = {node.name: node.num_gpus for node in new.nodes}
    found = [(node, node.devices, True) for node in new.nodes]
    for node in old.nodes:
        gone = node.devices[counts.get(node.name, 0) :]
        if gone:
            found.append((replace(node, num_gpus=len(gone), rails=1), gone, False))
    order = {node.name: i for i, node in enumerate(old.nodes)}
    found.sort(key=lambda entry: order.get(entry[0].name, len(order)))
    return Topology(
        devices=tuple(device for _, devices, _ in found for device in devices),
        nodes=tuple(node for node, _, _ in found),
        node_of=np.array([i for i, entry in enumerate(found) for _ in entry[1]], dtype=np.int64),
        alive=tuple(alive for _, _, alive in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSet:
    """One copy of a model's state at a boundary: the tensors of one stage's processes (and of the stages ``with``
    it)."""

    stage: str
    owner: str  # stage whose processes hold it
    model: str
    tensors: tuple[LogicalTensor, ...]
    bound: BoundLayout
    slots: tuple[Slot, ...]  # Slot.host already says where each lies at a boundary
    #: (slot, numbers of the tensors that do not have it), for slots that not all tensors have.
    absent: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def slot(self, name: str) -> Slot | None:
        return next((s for s in self.slots if s.name == name), None)

    def absent_mask(self, slot: str) -> BoolArray | None:
        """Which tensors lack ``slot``; None if all have it."""
        numbers = dict(self.absent).get(slot)
        if not numbers:
            return None
        mask = np.zeros(len(self.tensors), dtype=bool)
        mask[list(numbers)] = True
        return mask

    def memory_of(self, slot: str) -> bool | None:
        """Whether all of ``slot`` lies in host memory; None where a part may."""
        kind = self.slot(slot)
        if kind is None or kind.is_split or isinstance(self.bound.layout, DescribedLayout):
            return None
        return kind.host

    def host_mask(self, slot: str, coord: int, numel: IntArray) -> BoolArray:
        """``[shares, tensors]``: which of the parts of ``slot`` that the ranks of a coordinate hold (``numel`` elements
        each) lie in host memory. A part lies whole in one memory."""
        layout, one = self.bound.layout, self.memory_of(slot)
        if one is not None:
            return np.broadcast_to(np.bool_(one), numel.shape)
        if isinstance(layout, DescribedLayout):
            return np.broadcast_to(layout.host[slot][coord], numel.shape)
        kind = self.slot(slot)
        assert kind is not None
        return in_host(numel, kind.host_share, self._apart() if layout.splits_experts else None)

    def _apart(self) -> BoolArray:
        return np.array([tensor.expert is not None for tensor in self.tensors], dtype=bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The state sets of a plan. ``caches`` are copies that are older than their trainer at the boundary: dropped,
    and filled by the next weight sync."""

    sets: tuple[StateSet, ...]
    caches: tuple[str, ...] = ()

    def find(self, stage: str) -> StateSet | None:
        return next((s for s in self.sets if s.stage == stage), None)

    def of_model(self, model: str) -> tuple[StateSet, ...]:
        return tuple(s for s in self.sets if s.model == model)


def model_names(*holdings: Holdings) -> tuple[str, ...]:
    """Models in order of first appearance."""
    names: Iterable[str] = (s.model for h in holdings for s in h.sets)
    return tuple(dict.fromkeys(names))
