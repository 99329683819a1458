"""Small derivations are not worth their messages: who could make a sliver of its weights fetches them whole.

With ZeRO over dp ranks each rank could derive 1/dp of its bf16 weights from its fp32 master. Then no two ranks lack the
same, and dp x dp different needs cost more in messages than they save: less than ``MIN_DERIVED_SHARE`` of the weights.
What that costs against the bounds is counted here, so that the bounds stay true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.passes.atoms import AtomTable
from nereus.passes.demands import Lacking
from nereus.passes.lists import Lists, contains

FloatArray = npt.NDArray[np.float64]

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
    table: AtomTable, holders: Sequence[Sequence[int]], lack: Lacking, topology: Topology
) -> tuple[AtomTable, Foregone]:
    """``table`` without what is hardly worth deriving. ``holders``: places per class, ascending."""
    if not table.derived:
        return table, Foregone.nothing(len(topology.nodes))
    sizes = table.num_bytes
    place = np.fromiter(table.derived, dtype=np.int64)
    rows = Lists.of_arrays([*table.derived.values()])
    wanted = _wanted_bytes(table, sizes, 2 * topology.num_devices)
    small = rows.sums(sizes) < MIN_DERIVED_SHARE * wanted[place]
    if not small.any():
        return table, Foregone.nothing(len(topology.nodes))
    kept = {at: own for (at, own), gone in zip(table.derived.items(), small.tolist(), strict=True) if not gone}
    at, row = rows.of(np.flatnonzero(small))
    return replace(table, derived=kept), _cost(table, row, place[small][at], holders, lack, topology)


def _wanted_bytes(table: AtomTable, sizes: IntArray, num_places: int) -> FloatArray:
    """Bytes that each place wants."""
    class_bytes = np.bincount(table.cls, weights=sizes, minlength=table.num_classes)
    wanters = Lists.of_tuples(table.class_wanters)
    of_group = np.bincount(wanters.item, weights=class_bytes[wanters.owner], minlength=len(table.new_groups))
    places = Lists.of_tuples([group.places for group in table.new_groups])
    return np.bincount(places.item, weights=of_group[places.owner], minlength=num_places).astype(np.float64)


def _cost(
    table: AtomTable,
    row: IntArray,
    place: IntArray,
    holders: Sequence[Sequence[int]],
    lack: Lacking,
    topology: Topology,
) -> Foregone:
    """``place[i]`` could make interval ``row[i]``. GPUs lack bytes one by one, a node's host memory once, a node once:
    each is spared where all who lack could make them."""
    num_nodes, num_devices, sizes = len(topology.nodes), topology.num_devices, table.num_bytes
    node_of = np.tile(topology.node_of, 2)  # of GPUs, then of host memories
    hit = contains(lack.lists, table.cls[row], place)
    row, place = row[hit], place[hit]
    moved = int(sizes[row[place < num_devices]].sum())
    node_in = np.zeros(num_nodes, dtype=np.int64)
    held = Lists.of_tuples(holders)
    for host_only in (True, False):
        mine = place >= num_devices if host_only else np.ones(len(place), dtype=bool)
        short = lack.place >= num_devices if host_only else np.ones(len(lack.place), dtype=bool)
        there = held.item >= num_devices if host_only else np.ones(len(held.item), dtype=bool)
        able, makers = np.unique(row[mine] * num_nodes + node_of[place[mine]], return_counts=True)
        cls, node = table.cls[able // num_nodes], able % num_nodes
        known, lacking = np.unique(lack.cls[short] * num_nodes + node_of[lack.place[short]], return_counts=True)
        all_could = makers == lacking[np.searchsorted(known, cls * num_nodes + node)]
        nodes = Lists.of_pairs(held.owner[there], node_of[held.item[there]], len(held))
        spared = np.flatnonzero(all_could & ~contains(nodes, cls, node))
        size = sizes[able[spared] // num_nodes]
        if host_only:
            moved += int(size.sum())
        else:
            np.add.at(node_in, node[spared], size)
    return Foregone(moved_bytes=moved, node_in_bytes=node_in)
