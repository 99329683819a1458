"""Loads of a placement: bytes that it brings into and out of memories and nodes, whatever the routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.passes.lists import Lists, Sparse, combinations, common, concatenated, contains, distinct, summed
from nereus.passes.overlap import TableOverlap

#: Device number of every rank, by number of the state set among its model's new ones.
Devices = Mapping[int, IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Bytes that a placement brings into and out of memories and nodes, at least. ``host_in``: into host memories."""

    device_in: IntArray
    node_in: IntArray
    device_out: IntArray  # what only that GPU holds
    node_out: IntArray  # what only that node holds
    host_in: int

    @property
    def moved_bytes(self) -> int:
        return int(self.device_in.sum()) + self.host_in

    def __add__(self, other: Loads) -> Loads:
        return Loads(
            device_in=self.device_in + other.device_in,
            node_in=self.node_in + other.node_in,
            device_out=self.device_out + other.device_out,
            node_out=self.node_out + other.node_out,
            host_in=self.host_in + other.host_in,
        )

    @classmethod
    def nothing(cls, topology: Topology) -> Loads:
        devices, nodes = (np.zeros(n, dtype=np.int64) for n in (topology.num_devices, len(topology.nodes)))
        return cls(device_in=devices, node_in=nodes, device_out=devices, node_out=nodes, host_in=0)


def table_loads(table: TableOverlap, devices: Devices, topology: Topology) -> Loads:
    """What must come in and go out when the state sets of ``devices`` lie there (other sets of the table: nowhere).

    What two sets want in one place, or in one node, arrives there once.
    """
    num_nodes = len(topology.nodes)
    gpu = [n for n in devices if table.gpu_groups[n] is not None]
    host = [n for n in devices if table.host_groups[n] is not None]
    group = concatenated(
        _of(groups, n) for groups, sets in ((table.gpu_groups, gpu), (table.host_groups, host)) for n in sets
    )
    node = topology.node_of[concatenated(devices[n] for n in (*gpu, *host))]
    of_node, wants = _wants(table, node, group, num_nodes)
    node_in = wants.sums(table.demanded_bytes)[of_node] - _shared(
        table.node_held, wants, table.node_type, of_node, table.demanded_bytes
    )
    node_in -= _made(table, devices, node, group, table.node_type, table.node_held, topology, host_only=False)
    host_in = 0
    if host:
        node_of_host = topology.node_of[concatenated(devices[n] for n in host)]
        in_host = concatenated(_of(table.host_groups, n) for n in host)
        of_host, wants = _wants(table, node_of_host, in_host, num_nodes)
        missing = wants.sums(table.demanded_bytes)[of_host] - _shared(
            table.host_held, wants, table.host_type, of_host, table.demanded_bytes
        )
        missing -= _made(
            table, devices, node_of_host, in_host, table.host_type, table.host_held, topology, host_only=True
        )
        host_in = int(missing.sum())
    device_in = _device_in(table, devices, gpu, topology)
    node_out, device_out = _leaving(table, node, group, topology)
    return Loads(device_in=device_in, node_in=node_in, device_out=device_out, node_out=node_out, host_in=host_in)


def _of(groups: tuple[IntArray | None, ...], number: int) -> IntArray:
    found = groups[number]
    assert found is not None
    return found


def _wants(table: TableOverlap, key: IntArray, group: IntArray, num_keys: int) -> tuple[IntArray, Lists]:
    """(number of what each key wants, number -> classes)."""
    of_key, contents = combinations(Lists.of_pairs(key, group, num_keys))
    return of_key, contents.through(table.classes_of_group)


def _shared(held: Lists, wants: Lists, type_of: IntArray, want_of: IntArray, weights: IntArray) -> IntArray:
    """Per key: weights of what it holds and wants, worked out once for every pair of contents."""
    pairs, back = np.unique(type_of * len(wants) + want_of, return_inverse=True)
    return common(held, wants, pairs // len(wants), pairs % len(wants), weights)[back]


def _made(
    table: TableOverlap,
    devices: Devices,
    node: IntArray,
    group: IntArray,
    type_of: IntArray,
    held: Lists,
    topology: Topology,
    *,
    host_only: bool,
) -> IntArray:
    """Per node: demanded bytes that it lacks and that all who want them there make themselves: all of a class, or what
    the only one makes of it. ``node``, ``group``: what is wanted where."""
    total = np.zeros(len(topology.nodes), dtype=np.int64)
    sources = [(table.derived[n], devices[n]) for n in devices]
    parts = [
        (topology.node_of[where[made.rank[use]]], made.cls[use], made.num_bytes[use])
        for made, where in sources
        if made is not None
        for use in [~made.on_gpu if host_only else np.ones(len(made.rank), dtype=bool)]
    ]
    if not parts:
        return total
    at, cls, num_bytes = (np.concatenate(column) for column in zip(*parts, strict=True))
    lacked = (table.demanded_bytes[cls] > 0) & ~contains(held, type_of[at], cls)
    at, cls, num_bytes = at[lacked], cls[lacked], num_bytes[lacked]
    num_classes = len(table.class_bytes)
    wanters = Sparse.summing(
        len(topology.nodes), len(table.classes_of_group), node, group, np.ones(len(node), dtype=np.int64)
    )
    keys, makers = summed(at * num_classes + cls, (num_bytes == table.class_bytes[cls]).astype(np.int64))
    _, made_bytes = summed(at * num_classes + cls, num_bytes)
    at, cls = keys // num_classes, keys % num_classes
    entry, groups = table.groups_of_class.of(cls)
    asking = np.bincount(entry, weights=wanters.at(at[entry], groups), minlength=len(keys))
    spared = np.where(makers == asking, table.class_bytes[cls], np.where(asking == 1, made_bytes, 0))
    np.add.at(total, at, spared)
    return total


def missing_of(table: TableOverlap, number: int, device: IntArray) -> IntArray:
    """Bytes that each rank of a state set lacks on ``device`` (one per rank), alone there."""
    groups = _of(table.gpu_groups, number)
    type_of = table.gpu_type[device]
    missing = table.wanted[groups] - table.saved.at(type_of, groups)
    made = table.derived[number]
    if made is not None:
        missing -= made.total - made.held.at(type_of, np.arange(len(groups)))
    return missing


def _device_in(table: TableOverlap, devices: Devices, sets: list[int], topology: Topology) -> IntArray:
    total = np.zeros(topology.num_devices, dtype=np.int64)
    for number in sets:
        total[devices[number]] += missing_of(table, number, devices[number])
    if len(sets) < 2:
        return total
    all_devices = concatenated(devices[number] for number in sets)
    shared = np.flatnonzero(np.bincount(all_devices, minlength=topology.num_devices) > 1)
    if not len(shared):
        return total
    row_of = np.full(topology.num_devices, -1, dtype=np.int64)
    row_of[shared] = np.arange(len(shared))
    group = concatenated(_of(table.gpu_groups, number) for number in sets)
    row = row_of[all_devices]
    of_row, wants = _wants(table, row[row >= 0], group[row >= 0], len(shared))
    type_of = table.gpu_type[shared]
    missing = wants.sums(table.class_bytes)[of_row] - _shared(table.gpu_held, wants, type_of, of_row, table.class_bytes)
    for number in sets:
        made = table.derived[number]
        if made is not None:
            at = row_of[devices[number]]
            here = at >= 0
            rank = np.flatnonzero(here)
            missing[at[here]] -= made.total[rank] - made.held.at(type_of[at[here]], rank)
    total[shared] = missing
    return total


def _leaving(table: TableOverlap, node: IntArray, group: IntArray, topology: Topology) -> tuple[IntArray, IntArray]:
    """(per node, per device): demanded bytes that only it holds and another node wants."""
    num_groups, num_classes = len(table.classes_of_group), len(table.class_bytes)
    least, most = np.full(num_groups, len(topology.nodes), dtype=np.int64), np.full(num_groups, -1, dtype=np.int64)
    pairs = distinct(group * len(topology.nodes) + node)
    np.minimum.at(least, pairs // len(topology.nodes), pairs % len(topology.nodes))
    np.maximum.at(most, pairs // len(topology.nodes), pairs % len(topology.nodes))
    first, last = np.full(num_classes, len(topology.nodes), dtype=np.int64), np.full(num_classes, -1, dtype=np.int64)
    np.minimum.at(first, table.classes_of_group.item, least[table.classes_of_group.owner])
    np.maximum.at(last, table.classes_of_group.item, most[table.classes_of_group.owner])
    sole = table.sole_node
    leaves = np.flatnonzero((sole >= 0) & (last >= 0) & ((first < sole) | (last > sole)))
    sizes = table.demanded_bytes[leaves]
    node_out = np.bincount(sole[leaves], weights=sizes, minlength=len(topology.nodes)).astype(np.int64)
    alone = table.sole_gpu[leaves]
    device_out = np.bincount(alone[alone >= 0], weights=sizes[alone >= 0], minlength=topology.num_devices).astype(
        np.int64
    )
    return node_out, device_out
