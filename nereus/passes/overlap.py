"""What each device of a stage already holds of each rank's share: the matrix that placement decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.layout import BoolArray, IntArray
from nereus.passes.atoms import AtomTable, build_atoms, model_geometry
from nereus.passes.diff import derivable, slot_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Bytes that rank r of a new state set finds on device d (held or derived), and what it wants in all.

    ``wanted[r] - saved[d, r]`` arrive in d's memory when r is put on d; state in host memory is not part of them: all
    processes of a node share it, so it counts per node, by ``tables``. ``partly_derived[r]``: bytes that r derives of
    classes which it otherwise must fetch (ZeRO-1: its own share of the weights).
    """

    devices: tuple[int, ...]  # device number of each row
    saved: IntArray
    wanted: IntArray
    partly_derived: IntArray
    tables: tuple[TableOverlap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOverlap:
    """Per class of one atom table: bytes, which nodes hold it (living), which ranks want it in this memory."""

    class_bytes: IntArray
    demanded_bytes: IntArray  # 0 where every wanter derives the whole class
    in_host: bool
    node_holds: BoolArray  # [class, node]
    wanted_by: tuple[IntArray, ...]  # class -> ranks

    def entering(self, node_of_rank: IntArray) -> IntArray:
        """Per node: demanded bytes that some rank there wants and no device there holds, each once."""
        num_nodes = self.node_holds.shape[1]
        counts = np.array([len(ranks) for ranks in self.wanted_by], dtype=np.int64)
        cls = np.repeat(np.arange(len(counts)), counts)
        ranks = np.concatenate(self.wanted_by) if len(cls) else cls
        pairs = np.unique(cls * num_nodes + node_of_rank[ranks])
        cls, node = pairs // num_nodes, pairs % num_nodes
        missing = np.where(self.node_holds[cls, node], 0, self.demanded_bytes[cls])
        total: IntArray = np.bincount(node, weights=missing, minlength=num_nodes).astype(np.int64)
        return total


def overlap(old: Holdings, new_set: StateSet, topology: Topology) -> Overlap | None:
    """None where no old state set has the model: then every placement costs the same bytes."""
    old_sets = old.of_model(new_set.model)
    if not old_sets:
        return None
    geometry = model_geometry(old_sets, (new_set,))
    index = topology.index()
    rank_device = [index[d] for d in new_set.bound.ranks]
    devices = tuple(sorted(rank_device))
    row_of = {device: row for row, device in enumerate(devices)}
    rank_of_device = {device: rank for rank, device in enumerate(rank_device)}
    saved = np.zeros((len(devices), len(rank_device)), dtype=np.int64)
    wanted = np.zeros(len(rank_device), dtype=np.int64)
    partly_derived = np.zeros(len(rank_device), dtype=np.int64)
    tables: list[TableOverlap] = []
    for group in slot_groups(old_sets, (new_set,)):
        table = build_atoms(geometry, topology, new_set.model, group, derive=derivable(group, old_sets))
        memories = sorted({topology.is_host(p) for g in table.new_groups for p in g.places})
        for in_host in memories:
            tables.append(_add_table(table, topology, in_host, row_of, rank_of_device, saved, wanted, partly_derived))
        if len(memories) > 1:  # what GPUs want too enters their node once, and counts there
            twice = [len(ranks) > 0 for ranks in tables[-2].wanted_by]
            tables[-1] = replace(tables[-1], demanded_bytes=np.where(twice, 0, tables[-1].demanded_bytes))
    return Overlap(devices=devices, saved=saved, wanted=wanted, partly_derived=partly_derived, tables=tuple(tables))


def _add_table(
    table: AtomTable,
    topology: Topology,
    in_host: bool,
    row_of: dict[int, int],
    rank_of_device: dict[int, int],
    saved: IntArray,
    wanted: IntArray,
    partly_derived: IntArray,
) -> TableOverlap:
    num_devices = topology.num_devices
    class_bytes = np.bincount(table.cls, weights=table.num_bytes, minlength=table.num_classes).astype(np.int64)
    group_ranks = [
        np.array([rank_of_device[p % num_devices] for p in g.places if topology.is_host(p) == in_host], dtype=np.int64)
        for g in table.new_groups
    ]
    holds = np.zeros((table.num_classes, len(topology.nodes)), dtype=bool)
    wanted_by: list[IntArray] = []
    rows_of_class: list[IntArray] = []
    for cls in range(table.num_classes):
        places = {p for g in table.class_holders[cls] for p in table.old_groups[g].places}
        living = [p for p in places if topology.alive[topology.node_of_place(p)]]
        for place in living:
            holds[cls, topology.node_of_place(place)] = True
        ranks = [group_ranks[g] for g in table.class_wanters[cls]]
        wanted_by.append(np.unique(np.concatenate(ranks)) if ranks else np.zeros(0, dtype=np.int64))
        rows_of_class.append(np.array(sorted(row_of[p] for p in living if p in row_of), dtype=np.int64))
        if len(wanted_by[-1]):
            if in_host:
                continue
            wanted[wanted_by[-1]] += class_bytes[cls]
            if len(rows_of_class[-1]):
                saved[np.ix_(rows_of_class[-1], wanted_by[-1])] += class_bytes[cls]
    derived = _add_derived(table, topology, in_host, rank_of_device, rows_of_class, saved)
    # A class counts as demanded unless all of its wanters derive all of it.
    full = np.array(
        [all(derived.get((r, c), 0) == class_bytes[c] for r in w.tolist()) for c, w in enumerate(wanted_by)]
    )
    demanded = np.where(full, 0, class_bytes)
    for (rank, cls), num_bytes in derived.items():
        if demanded[cls]:
            partly_derived[rank] += num_bytes
    return TableOverlap(
        class_bytes=class_bytes,
        demanded_bytes=demanded,
        in_host=in_host,
        node_holds=holds,
        wanted_by=tuple(wanted_by),
    )


def _add_derived(
    table: AtomTable,
    topology: Topology,
    in_host: bool,
    rank_of_device: dict[int, int],
    rows_of_class: Sequence[IntArray],
    saved: IntArray,
) -> dict[tuple[int, int], int]:
    """A rank derives its weights from its master wherever it is put: saved on all rows but those that hold them anyway.

    Returns (rank, class) -> derived bytes.
    """
    derived: dict[tuple[int, int], int] = {}
    for place, intervals in table.derived.items():
        if topology.is_host(place) != in_host:
            continue
        rank = rank_of_device[place % topology.num_devices]
        by_class = np.bincount(
            table.cls[intervals], weights=table.num_bytes[intervals], minlength=table.num_classes
        ).astype(np.int64)
        if not in_host:
            saved[:, rank] += int(by_class.sum())
        for cls in np.flatnonzero(by_class).tolist():
            if not in_host:
                saved[rows_of_class[cls], rank] -= by_class[cls]
            derived[rank, cls] = int(by_class[cls])
    return derived
