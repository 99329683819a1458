"""The two assignment problems of placement: units to nodes by min-cost flow, ranks to the devices of a node exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from ortools.graph.python import linear_sum_assignment, min_cost_flow

from nereus.ir.layout import IntArray
from nereus.passes.lists import summed

#: Nodes of up to so many GPUs are assigned together, by dynamic programming over subsets.
SUBSET_DEVICES = 8
#: Nodes in one batch: 70 subsets of 4 out of 8 devices, 8 bytes each and their choices.
BATCH_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeValues:
    """What each unit is worth on each node: ``base[unit, kind of the node]``, and more on some nodes."""

    base: IntArray
    kind: IntArray  # per node
    unit: IntArray  # of each excess
    node: IntArray
    excess: IntArray

    def at(self, units: IntArray, nodes: IntArray) -> IntArray:
        """Value of ``units[i]`` on ``nodes[i]``."""
        num_nodes = len(self.kind)
        value = self.base[units, self.kind[nodes]]
        if len(self.unit):
            keys, asked = self.unit * num_nodes + self.node, units * num_nodes + nodes
            place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
            value = value + np.where(keys[place] == asked, self.excess[place], 0)
        return value

    def scaled(self, factor: int) -> NodeValues:
        return NodeValues(
            base=self.base * factor, kind=self.kind, unit=self.unit, node=self.node, excess=self.excess * factor
        )

    def lacking(self, wanted: IntArray, level: IntArray) -> NodeValues:
        """Worth less the more of ``wanted`` (per unit) a node lacks, each byte times its ``level``."""
        scale = int(level.max(initial=0)) + 1
        _, example, kind = np.unique(self.kind * scale + level, return_index=True, return_inverse=True)
        return NodeValues(
            base=(self.base[:, self.kind[example]] - wanted[:, None]) * level[example],
            kind=kind.astype(np.int64),
            unit=self.unit,
            node=self.node,
            excess=self.excess * level[self.node],
        )

    def plus(self, other: NodeValues) -> NodeValues:
        num_nodes = len(self.kind)
        scale = int(other.kind.max(initial=0)) + 1
        _, example, kind = np.unique(self.kind * scale + other.kind, return_index=True, return_inverse=True)
        keys, excess = summed(
            np.concatenate((self.unit * num_nodes + self.node, other.unit * num_nodes + other.node)),
            np.concatenate((self.excess, other.excess)),
        )
        return NodeValues(
            base=self.base[:, self.kind[example]] + other.base[:, other.kind[example]],
            kind=kind.astype(np.int64),
            unit=keys // num_nodes,
            node=keys % num_nodes,
            excess=excess,
        )

    def summed(self, block_of_unit: IntArray, num_blocks: int) -> NodeValues:
        """The same for blocks of units; -1: in none."""
        own = block_of_unit >= 0
        base = np.zeros((num_blocks, self.base.shape[1]), dtype=np.int64)
        np.add.at(base, block_of_unit[own], self.base[own])
        block = block_of_unit[self.unit]
        num_nodes = len(self.kind)
        keys, excess = summed((block * num_nodes + self.node)[block >= 0], self.excess[block >= 0])
        return NodeValues(base=base, kind=self.kind, unit=keys // num_nodes, node=keys % num_nodes, excess=excess)


def most_valuable(values: NodeValues, room: IntArray, preferred: IntArray) -> IntArray:
    """Node of every unit so that their values add up to the most; ``room``: units per node. Among equals the
    ``preferred`` node; -1 for units that fit nowhere.

    A unit reaches any node of a kind through one arc, so the graph stays small where nodes are alike.
    """
    num_units, num_kinds = values.base.shape
    num_nodes = len(room)
    units = np.arange(num_units, dtype=np.int64)
    first_kind, first_node = num_units, num_units + num_kinds
    source, sink = first_node + num_nodes, first_node + num_nodes + 1
    liked = (preferred >= 0) & (room[np.maximum(preferred, 0)] > 0)
    likes, liked_node = units[liked], preferred[liked]
    kinds_used = np.unique(values.kind[room > 0])
    through = np.tile(kinds_used, num_units)
    from_unit = np.repeat(units, len(kinds_used))
    usable = room[values.node] > 0
    tails = (
        np.full(num_units, source),
        from_unit,
        first_kind + values.kind,
        values.unit[usable],
        likes,
        first_node + np.arange(num_nodes),
    )
    heads = (
        units,
        first_kind + through,
        first_node + np.arange(num_nodes),
        first_node + values.node[usable],
        first_node + liked_node,
        np.full(num_nodes, sink),
    )
    capacities = (np.ones(num_units), np.ones(len(through)), room, np.ones(usable.sum()), np.ones(len(likes)), room)
    costs = (
        np.zeros(num_units),
        -2 * values.base[from_unit, through],
        np.zeros(num_nodes),
        -2 * (values.base[values.unit, values.kind[values.node]] + values.excess)[usable],
        -2 * values.at(likes, liked_node) - 1,
        np.zeros(num_nodes),
    )
    flow = min_cost_flow.SimpleMinCostFlow()
    arcs = flow.add_arcs_with_capacity_and_unit_cost(
        np.concatenate(tails).astype(np.int32),
        np.concatenate(heads).astype(np.int32),
        np.concatenate(capacities).astype(np.int64),
        np.concatenate(costs).astype(np.int64),
    )
    amount = min(num_units, int(room.sum()))
    flow.set_nodes_supplies(np.array([source, sink]), np.array([amount, -amount]))
    status = flow.solve()
    assert status == flow.OPTIMAL, status
    return _followed(flow.flows(arcs), np.concatenate(tails), np.concatenate(heads), num_units, num_kinds, num_nodes)


def _followed(
    flows: IntArray, tails: IntArray, heads: IntArray, num_units: int, num_kinds: int, num_nodes: int
) -> IntArray:
    """Node of every unit: straight, or through its kind's nodes in order."""
    first_node = num_units + num_kinds
    chosen = np.full(num_units, -1, dtype=np.int64)
    used = flows > 0
    straight = used & (tails < num_units) & (heads >= first_node) & (heads < first_node + num_nodes)
    chosen[tails[straight]] = heads[straight] - first_node
    indirect = used & (tails < num_units) & (heads >= num_units) & (heads < first_node)
    passed = used & (tails >= num_units) & (tails < first_node)
    for kind in np.unique(heads[indirect]).tolist():
        units = tails[indirect & (heads == kind)]
        arcs = np.flatnonzero(passed & (tails == kind))
        chosen[np.sort(units)] = np.sort(np.repeat(heads[arcs] - first_node, flows[arcs]))
    return chosen


@lru_cache(maxsize=16)
def _subsets(size: int) -> tuple[tuple[IntArray, IntArray, IntArray], ...]:
    """Per number of members k >= 1: (the subsets, their members ``[subset, k]``, those without each member)."""
    everything = np.arange(1 << size, dtype=np.int64)
    counts = np.array([int(mask).bit_count() for mask in everything.tolist()])
    found = []
    for k in range(1, size + 1):
        masks = everything[counts == k]
        members = np.array([[j for j in range(size) if mask >> j & 1] for mask in masks.tolist()], dtype=np.int64)
        found.append((masks, members, masks[:, None] ^ (1 << members)))
    return tuple(found)


def assign_all(values: IntArray) -> IntArray:
    """``values[node, rank, device]``, as many ranks as devices: the device of each rank, ``[node, rank]``, for the
    largest sum per node."""
    size = values.shape[1]
    chosen: IntArray = np.argmax(values, axis=2).astype(np.int64)  # everyone's favourite, where these differ
    alike = (values == values[:, :, :1]).all(axis=(1, 2))
    chosen[alike] = np.arange(size)
    hard = np.flatnonzero((np.sort(chosen, axis=1) != np.arange(size)).any(axis=1))
    if size > SUBSET_DEVICES or len(hard) <= 2:
        for node in hard.tolist():
            chosen[node] = _assign(values[node])
        return chosen
    for first in range(0, len(hard), BATCH_NODES):
        batch = hard[first : first + BATCH_NODES]
        chosen[batch] = _by_subsets(values[batch])
    return chosen


def _by_subsets(values: IntArray) -> IntArray:
    num_nodes, size, _ = values.shape
    best = np.zeros((num_nodes, 1 << size), dtype=np.int64)
    last = np.zeros((num_nodes, 1 << size), dtype=np.int8)  # device that the last rank of the subset takes
    for k, (masks, members, rest) in enumerate(_subsets(size)):
        tried = best[:, rest] + values[:, k, members]
        choice = np.argmax(tried, axis=2)
        best[:, masks] = np.take_along_axis(tried, choice[:, :, None], axis=2)[:, :, 0]
        last[:, masks] = np.take_along_axis(np.broadcast_to(members, tried.shape), choice[:, :, None], axis=2)[:, :, 0]
    nodes = np.arange(num_nodes)
    mask = np.full(num_nodes, (1 << size) - 1, dtype=np.int64)
    device = np.zeros((num_nodes, size), dtype=np.int64)
    for rank in range(size - 1, -1, -1):
        device[:, rank] = last[nodes, mask]
        mask ^= np.int64(1) << device[:, rank]
    return device


def _assign(values: IntArray) -> IntArray:
    size = len(values)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(
        np.repeat(np.arange(size), size), np.tile(np.arange(size), size), -values.astype(np.int64).reshape(-1)
    )
    status = solver.solve()
    assert status == solver.OPTIMAL, status
    return np.array([solver.right_mate(i) for i in range(size)], dtype=np.int64)
