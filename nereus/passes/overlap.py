"""What devices and nodes already hold of what ranks want: the columns that placement decides on.

Nothing is kept per pair of device and rank. Devices that hold the same old groups are one *type*, ranks that want the
same are one new group, and bytes are known per (type, group): a few numbers where state is replicated, about one per
shard where it is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.layout import BoolArray, IntArray
from nereus.passes.atoms import AtomTable
from nereus.passes.diff import model_atoms
from nereus.passes.lists import Lists, Sparse, combinations, join, summed
from nereus.passes.model_atoms import ModelAtoms


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOverlap:
    """A model whose state exists already, with all its new state sets."""

    atoms: ModelAtoms
    tables: tuple[TableOverlap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What one state set makes itself of a table: a rank's weights from its masters, wherever it is put."""

    rank: IntArray  # ascending
    cls: IntArray
    num_bytes: IntArray
    on_gpu: BoolArray
    total: IntArray  # per rank, on its GPU
    held: Sparse  # type x rank: part of that which a device of the type holds anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOverlap:
    """One atom table in columns. Types number distinct contents: of GPUs, of nodes' host memory, of whole nodes;
    lost nodes hold nothing."""

    class_bytes: IntArray
    demanded_bytes: IntArray  # 0 where every wanter derives the whole class
    group_set: IntArray  # new group -> state set
    classes_of_group: Lists  # and one list more, empty: the group of a rank that wants nothing in a memory
    groups_of_class: Lists
    ranks_of_group: Lists
    gpu_groups: tuple[IntArray | None, ...]  # per state set: group of every rank; None where none wants any on its GPU
    host_groups: tuple[IntArray | None, ...]
    gpu_type: IntArray  # per device
    gpu_held: Lists  # type -> classes
    host_type: IntArray  # per node
    host_held: Lists
    node_type: IntArray  # per node
    node_held: Lists
    sole_node: IntArray  # per class: the only living node that holds it, else -1
    sole_gpu: IntArray  # per class: the only living place that holds it, where that is a GPU
    wanted: IntArray  # bytes per new group
    saved: Sparse  # GPU type x new group: bytes there already
    derived: tuple[Derived | None, ...]  # per state set

    def groups(self, state_set: int) -> tuple[IntArray, ...]:
        """Of its ranks: on GPUs, in host memory, or both."""
        return tuple(g for g in (self.gpu_groups[state_set], self.host_groups[state_set]) if g is not None)


def overlap(old: Holdings, model: str, new_sets: tuple[StateSet, ...], topology: Topology) -> ModelOverlap | None:
    """None where no old state set has the model: then every placement costs the same bytes."""
    old_sets = old.of_model(model)
    if not old_sets:
        return None
    atoms = model_atoms(model, old_sets, new_sets, topology)
    rank_of_device = []
    for state_set in new_sets:
        rank_of = np.full(topology.num_devices, -1, dtype=np.int64)
        rank_of[topology.numbers_of(state_set.bound.ranks)] = np.arange(len(state_set.bound.ranks))
        rank_of_device.append(rank_of)
    return ModelOverlap(atoms=atoms, tables=tuple(_columns(t, topology, rank_of_device) for t in atoms.tables))


def _columns(table: AtomTable, topology: Topology, rank_of_device: list[IntArray]) -> TableOverlap:
    num_devices, num_nodes = topology.num_devices, len(topology.nodes)
    num_classes, num_groups = table.num_classes, len(table.new_groups)
    class_bytes = np.bincount(table.cls, weights=table.num_bytes, minlength=num_classes).astype(np.int64)
    wanters = Lists.of_tuples(table.class_wanters)
    classes_of_group = wanters.inverse(num_groups + 1)
    places = Lists.of_tuples([group.places for group in table.new_groups])
    device = places.item % num_devices
    group_set = np.array([group.state_set for group in table.new_groups], dtype=np.int64)
    rank = np.stack(rank_of_device)[group_set[places.owner], device]
    on_host = places.item >= num_devices
    groups: list[list[IntArray | None]] = [[], []]
    for number, rank_of in enumerate(rank_of_device):
        for host, found in enumerate(groups):
            own = (group_set[places.owner] == number) & (on_host == bool(host))
            of_rank = np.full(int((rank_of >= 0).sum()), num_groups, dtype=np.int64)
            of_rank[rank[own]] = places.owner[own]
            found.append(of_rank if own.any() else None)
    # -- who holds what
    holders = Lists.of_tuples(table.class_holders)
    classes_of_old = holders.inverse(len(table.old_groups))
    old_places = Lists.of_tuples([group.places for group in table.old_groups])
    alive = np.array(topology.alive, dtype=bool)[topology.node_of[old_places.item % num_devices]]
    owner, place = old_places.owner[alive], old_places.item[alive]
    node = topology.node_of[place % num_devices]
    on_gpu = place < num_devices
    gpu_type, gpu_held = _types(place[on_gpu], owner[on_gpu], num_devices, classes_of_old)
    host_type, host_held = _types(node[~on_gpu], owner[~on_gpu], num_nodes, classes_of_old)
    node_type, node_held = _types(node, owner, num_nodes, classes_of_old)
    sole_node = _sole(node_type, node_held, num_classes)
    sole_gpu = np.where(
        _sole(host_type, host_held, num_classes, any_holder=True) < 0, _sole(gpu_type, gpu_held, num_classes), -1
    )
    derived, fully = _derived(table, topology, group_set, rank_of_device, class_bytes, gpu_type, gpu_held)
    num_wanters = np.bincount(wanters.owner, weights=places.counts[wanters.item], minlength=num_classes)
    return TableOverlap(
        class_bytes=class_bytes,
        demanded_bytes=np.where((fully >= num_wanters) & (fully > 0), 0, class_bytes),
        group_set=group_set,
        classes_of_group=classes_of_group,
        groups_of_class=wanters,
        ranks_of_group=Lists(places.first, rank),
        gpu_groups=tuple(groups[0]),
        host_groups=tuple(groups[1]),
        gpu_type=gpu_type,
        gpu_held=gpu_held,
        host_type=host_type,
        host_held=host_held,
        node_type=node_type,
        node_held=node_held,
        sole_node=sole_node,
        sole_gpu=sole_gpu,
        wanted=classes_of_group.sums(class_bytes),
        saved=join(gpu_held, classes_of_group, class_bytes),
        derived=derived,
    )


def _types(key: IntArray, group: IntArray, num_keys: int, classes_of_group: Lists) -> tuple[IntArray, Lists]:
    """(type of every memory, type -> classes): memories that hold the same groups have one type."""
    of_key, contents = combinations(Lists.of_pairs(key, group, num_keys))
    return of_key, contents.through(classes_of_group)


def _sole(type_of: IntArray, held: Lists, num_classes: int, *, any_holder: bool = False) -> IntArray:
    """Per class: the only memory that holds it, else -1 (``any_holder``: some memory that holds it, -1 if none)."""
    num_types = len(held)
    of_type = np.bincount(type_of, minlength=num_types)
    example = np.zeros(num_types, dtype=np.int64)
    example[type_of] = np.arange(len(type_of))
    count = np.bincount(held.item, weights=of_type[held.owner], minlength=num_classes)
    found = np.full(num_classes, -1, dtype=np.int64)
    found[held.item] = example[held.owner]
    return found if any_holder else np.where(count == 1, found, -1)


def _derived(
    table: AtomTable,
    topology: Topology,
    group_set: IntArray,
    rank_of_device: list[IntArray],
    class_bytes: IntArray,
    gpu_type: IntArray,
    gpu_held: Lists,
) -> tuple[tuple[Derived | None, ...], IntArray]:
    """What each state set derives, and per class how many ranks derive the whole of it."""
    num_classes = table.num_classes
    found: list[Derived | None] = [None] * len(rank_of_device)
    fully = np.zeros(num_classes, dtype=np.int64)
    if not table.derived:
        return tuple(found), fully
    intervals = Lists(
        np.concatenate(([0], np.cumsum([len(own) for own in table.derived.values()]))),
        np.concatenate(list(table.derived.values())),
    )
    key, num_bytes = summed(intervals.owner * num_classes + table.cls[intervals.item], table.num_bytes[intervals.item])
    place = np.fromiter(table.derived, dtype=np.int64)[key // num_classes]
    cls = key % num_classes
    fully += np.bincount(cls[num_bytes == class_bytes[cls]], minlength=num_classes)
    held = Lists.of_pairs(gpu_held.owner, gpu_held.item, len(gpu_held))
    left = np.ones(len(place), dtype=bool)
    for number, rank_of in enumerate(rank_of_device):
        rank = rank_of[place % topology.num_devices]
        own = np.flatnonzero(left & (rank >= 0))
        if not len(own) or not bool((group_set == number).any()):
            continue
        left[own] = False
        order = own[np.argsort(rank[own], kind="stable")]
        num_ranks = int((rank_of >= 0).sum())
        on_gpu = order[place[order] < topology.num_devices]
        found[number] = Derived(
            rank=rank[order],
            cls=cls[order],
            num_bytes=num_bytes[order],
            on_gpu=place[order] < topology.num_devices,
            total=np.bincount(rank[on_gpu], weights=num_bytes[on_gpu], minlength=num_ranks).astype(np.int64),
            held=_held_of_derived(held, num_classes, num_ranks, rank[on_gpu], cls[on_gpu], num_bytes[on_gpu]),
        )
    return tuple(found), fully


def _held_of_derived(
    held: Lists, num_classes: int, num_ranks: int, rank: IntArray, cls: IntArray, num_bytes: IntArray
) -> Sparse:
    at, type_ = held.inverse(num_classes).of(cls)
    return Sparse.summing(len(held), max(num_ranks, 1), type_, rank[at], num_bytes[at])
