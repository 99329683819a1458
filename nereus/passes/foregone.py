"""Small derivations are not worth their messages: who could make a sliver of its weights fetches them whole.

With ZeRO over dp ranks each rank could derive 1/dp of its bf16 weights from its fp32 master. Then no two ranks lack the
same, and dp x dp different needs cost more in messages than they save: less than ``MIN_DERIVED_SHARE`` of the weights.
What that costs against the bounds is counted here, so that the bounds stay true.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.passes.atoms import AtomTable

#: A place that derives less than this share of what it wants of a model's weights fetches them whole.
MIN_DERIVED_SHARE = 1 / 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Foregone:
    """Bytes that move, and that enter each node, and could have been derived."""

    moved_bytes: int
    node_in_bytes: IntArray

    @classmethod
    def nothing(cls, num_nodes: int) -> Foregone:
        return cls(moved_bytes=0, node_in_bytes=np.zeros(num_nodes, dtype=np.int64))

    def __add__(self, other: Foregone) -> Foregone:
        return Foregone(
            moved_bytes=self.moved_bytes + other.moved_bytes, node_in_bytes=self.node_in_bytes + other.node_in_bytes
        )


def without_small_shares(
    table: AtomTable, holders: tuple[tuple[int, ...], ...], wanters: tuple[tuple[int, ...], ...], topology: Topology
) -> tuple[AtomTable, Foregone]:
    """``table`` without what is hardly worth deriving. ``holders``, ``wanters``: places per class, ascending."""
    found = Foregone.nothing(len(topology.nodes))
    if not table.derived:
        return table, found
    sizes = table.num_bytes
    wanted = _wanted_bytes(table, sizes)
    small = {
        place: own
        for place, own in table.derived.items()
        if int(sizes[own].sum()) < MIN_DERIVED_SHARE * wanted.get(place, 0.0)
    }
    if not small:
        return table, found
    kept = {place: own for place, own in table.derived.items() if place not in small}
    return replace(table, derived=kept), _cost(table, small, sizes, holders, wanters, topology)


def _wanted_bytes(table: AtomTable, sizes: IntArray) -> dict[int, float]:
    """Bytes that each place wants."""
    class_bytes = np.bincount(table.cls, weights=sizes, minlength=table.num_classes)
    of_group = np.zeros(len(table.new_groups))
    for cls, members in enumerate(table.class_wanters):
        of_group[list(members)] += class_bytes[cls]
    wanted: dict[int, float] = {}
    for group, num_bytes in zip(table.new_groups, of_group.tolist(), strict=True):
        for place in group.places:
            wanted[place] = wanted.get(place, 0.0) + num_bytes
    return wanted


def _cost(
    table: AtomTable,
    small: dict[int, IntArray],
    sizes: IntArray,
    holders: tuple[tuple[int, ...], ...],
    wanters: tuple[tuple[int, ...], ...],
    topology: Topology,
) -> Foregone:
    """GPUs lack bytes one by one, a node's host memory once, a node once: each is spared where all who lack could
    make them."""
    node_in = np.zeros(len(topology.nodes), dtype=np.int64)
    moved = 0
    num_devices, node_of = topology.num_devices, [*topology.node_of.tolist()] * 2  # GPU places, then host places
    near: dict[int, dict[int, tuple[set[int], set[int]]]] = {}
    makers: dict[tuple[int, int], set[int]] = {}  # (row, node): places that could make it
    for place, own in small.items():
        node = node_of[place]
        for row in own.tolist():
            makers.setdefault((row, node), set()).add(place)
    for (row, node), able in makers.items():
        cls, size = int(table.cls[row]), int(sizes[row])
        if cls not in near:
            near[cls] = _by_node(wanters[cls], holders[cls], node_of)
        lack, held = near[cls][node]
        on_gpus = {p for p in lack if p < num_devices}
        in_host = lack - on_gpus
        moved += size * len(on_gpus & able)
        if in_host and in_host <= able and not any(p >= num_devices for p in held):
            moved += size
        if lack and lack <= able and not held:
            node_in[node] += size
    return Foregone(moved_bytes=moved, node_in_bytes=node_in)


def _by_node(
    wanters: tuple[int, ...], holders: tuple[int, ...], node_of: list[int]
) -> dict[int, tuple[set[int], set[int]]]:
    """Node -> (places that want and lack, places that hold) of one class."""
    result: dict[int, tuple[set[int], set[int]]] = {}
    for place in holders:
        result.setdefault(node_of[place], (set(), set()))[1].add(place)
    for place in wanters:
        lack, held = result.setdefault(node_of[place], (set(), set()))
        if place not in held:
            lack.add(place)
    return result
