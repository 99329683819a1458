"""One stage to be placed: what its ranks would find on each device and node, and the placements worth comparing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.holdings import StateSet, Topology
from nereus.ir.layout import BoolArray, IntArray, Layout
from nereus.ir.plan import Plan, Stage
from nereus.passes.lists import Lists, Sparse, combinations, concatenated, join, summed
from nereus.passes.overlap import ModelOverlap, TableOverlap
from nereus.passes.place_assign import NodeValues, assign_all, most_valuable
from nereus.passes.step_cost import StepCost

#: A table is looked at type by type while types x ranks are at most so many; beyond, entry by entry.
COARSE_ENTRIES = 1 << 18
#: More entries than these are not listed: the table then guides no choice, and only plain bounds are given.
MOST_ENTRIES = 1 << 22
#: Ranks are assigned to devices one by one while types x ranks are at most so many.
MOST_SINGLE_ENTRIES = 1 << 16
#: A byte kept out of a node's NIC counts as so many that a device has already.
NODE_WEIGHT = 64


class PlacedStage:
    """Rows are the stage's devices in ascending order; a placement is the row of every rank."""

    def __init__(
        self, plan: Plan, stage: Stage, state_set: StateSet, number: int, model: ModelOverlap, topology: Topology
    ) -> None:
        layout = state_set.bound.layout
        assert isinstance(layout, Layout), "only what a plan lays out is placed"
        self.stage, self.layout, self.state_set, self.topology = stage, layout, state_set, topology
        self.model, self.number = model, number
        index = topology.index()
        ranks = np.array([index[d] for d in state_set.bound.ranks], dtype=np.int64)
        self.devices = np.sort(ranks)
        self.listed: IntArray = np.searchsorted(self.devices, ranks).astype(np.int64)
        self.fixed = stage.place is not None
        self.nodes, self.first_row, counts = np.unique(
            topology.node_of[self.devices], return_index=True, return_counts=True
        )
        self.rows_of_node: IntArray = counts.astype(np.int64)
        self.node_of_row = np.repeat(np.arange(len(self.nodes), dtype=np.int64), counts)
        coords = layout.coordinates()
        group = (coords["pp"] * layout.dp + coords["dp"]) * layout.cp + coords["cp"]
        self.ranks_of_group: IntArray = np.lexsort((coords["tp"], group)).reshape(-1, layout.tp)
        self.group_of_rank: IntArray = group.astype(np.int64)
        self.slots: IntArray = self.rows_of_node // layout.tp
        self.step = StepCost(plan, stage, layout, sum(t.numel for t in state_set.tensors), topology)
        self.tables = [t for t in model.tables if t.groups(number)]
        #: Whether some table was too large to guide the choice.
        self.partial = False
        self._read_devices()

    @property
    def num_groups(self) -> int:
        return len(self.ranks_of_group)

    @property
    def groups_fit(self) -> bool:
        """Whether every tensor-parallel group can lie inside a node."""
        return int(self.slots.sum()) >= self.num_groups

    def nodes_of(self, rows: IntArray) -> IntArray:
        """Node number (of the topology) of every rank."""
        nodes: IntArray = self.nodes[self.node_of_row[rows]]
        return nodes

    def step_s(self, rows: IntArray) -> float:
        return self.step.seconds(self.nodes_of(rows))

    def least_step_s(self) -> float:
        return self.step.least(self.slots, self.nodes) if self.groups_fit else 0.0

    # -- bytes on devices ---------------------------------------------------------------------------------------------

    def _groups(self, table: TableOverlap) -> IntArray:
        groups = table.gpu_groups[self.number]
        assert groups is not None
        return groups

    def _read_devices(self) -> None:
        """``saved(row, rank) = types[type of row, rank] + entries[row, rank]``, but for what a rank derives anywhere
        alike."""
        num_rows, num_ranks = len(self.devices), self.layout.num_ranks
        tables = sorted(
            (t for t in self.tables if t.gpu_groups[self.number] is not None), key=lambda t: len(t.gpu_held)
        )
        type_of_row = np.zeros(num_rows, dtype=np.int64)
        coarse: list[TableOverlap] = []
        fine: list[TableOverlap] = []
        for table in tables:
            both = type_of_row * len(table.gpu_held) + table.gpu_type[self.devices]
            distinct, back = np.unique(both, return_inverse=True)
            if len(distinct) * num_ranks <= COARSE_ENTRIES:
                coarse.append(table)
                type_of_row = back.astype(np.int64)
            else:
                fine.append(table)
        example = np.zeros(int(type_of_row.max(initial=0)) + 1, dtype=np.int64)
        example[type_of_row] = self.devices
        self.type_of_row = type_of_row
        self.types = np.zeros((len(example), num_ranks), dtype=np.int64)
        ranks = np.arange(num_ranks, dtype=np.int64)
        for table in coarse:
            type_ = table.gpu_type[example][:, None]
            self.types += table.saved.at(type_, self._groups(table)[None, :])
            made = table.derived[self.number]
            if made is not None:
                self.types -= made.held.at(type_, ranks[None, :])
        found = [entries for table in fine for entries in self._entries(table)]
        row, rank, value = (concatenated(column) for column in zip(*found, strict=True)) if found else (ranks[:0],) * 3
        self.entries = Sparse.summing(num_rows, num_ranks, row, rank, value)

    def _entries(self, table: TableOverlap) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """(row, rank, bytes) of a table with many types."""
        types, groups, values = table.saved.pairs()
        own = np.append(table.group_set, -1)[groups] == self.number
        types, groups, values = types[own], groups[own], values[own]
        rows = Lists.of_pairs(table.gpu_type[self.devices], np.arange(len(self.devices)), len(table.gpu_held))
        if int((rows.counts[types] * table.ranks_of_group.counts[groups]).sum()) > MOST_ENTRIES:
            self.partial = True
            return
        at, row = rows.of(types)
        again, rank = table.ranks_of_group.of(groups[at])
        yield row[again], rank, values[at[again]]
        made = table.derived[self.number]
        if made is not None:
            types, ranks, values = made.held.pairs()
            at, row = rows.of(types)
            yield row, ranks[at], -values[at]

    def saved(self, rows: IntArray, ranks: IntArray) -> IntArray:
        """Bytes that ``ranks`` find on ``rows`` (broadcast), the same for all rows left out."""
        found: IntArray = self.types[self.type_of_row[rows], ranks] + self.entries.at(rows, ranks)
        return found

    def most_saved(self) -> IntArray:
        """Per rank, on its best device (where ``partial``: at least as much as there)."""
        best: IntArray = self.types.max(axis=0)
        row, rank, value = self.entries.pairs()
        np.maximum.at(best, rank, self.types[self.type_of_row[row], rank] + value)
        return best

    # -- values of nodes ----------------------------------------------------------------------------------------------

    @cached_property
    def device_values(self) -> NodeValues:
        """Bytes saved if every rank of a group had its best device of the node to itself."""
        num_nodes, num_ranks = len(self.nodes), self.layout.num_ranks
        kind, contents = combinations(Lists.of_pairs(self.node_of_row, self.type_of_row, num_nodes))
        best = np.maximum.reduceat(self.types[contents.item], contents.first[:-1], axis=0)
        row, rank, value = self.entries.pairs()
        node = self.node_of_row[row]
        here = self.types[self.type_of_row[row], rank] + value - best[kind[node], rank]
        order = np.lexsort((here, rank * num_nodes + node))
        keys, here = (rank * num_nodes + node)[order], here[order]
        last = np.ones(len(keys), dtype=bool)
        last[:-1] = keys[1:] != keys[:-1]
        last &= here > 0
        rank, node = keys[last] // num_nodes, keys[last] % num_nodes
        keys, excess = summed(self.group_of_rank[rank] * num_nodes + node, here[last])
        base = np.ascontiguousarray(best[:, self.ranks_of_group.reshape(-1)])
        return NodeValues(
            base=base.reshape(len(best), self.num_groups, -1).sum(axis=2).T if num_ranks else base.T,
            kind=kind,
            unit=keys // num_nodes,
            node=keys % num_nodes,
            excess=excess,
        )

    @cached_property
    def node_values(self) -> tuple[NodeValues, IntArray]:
        """(bytes that a group wants and some memory of the node has, each once; bytes that it wants at all)."""
        return self._node_values()

    @cached_property
    def host_values(self) -> tuple[NodeValues, IntArray]:
        """The same of what it wants in host memory."""
        return self._node_values(host_only=True)

    def _node_values(self, *, host_only: bool = False) -> tuple[NodeValues, IntArray]:
        num_nodes, num_groups = len(self.nodes), self.num_groups
        kind = np.zeros(num_nodes, dtype=np.int64)
        coarse: list[tuple[Sparse, IntArray, IntArray]] = []
        keys: list[IntArray] = []
        extra: list[IntArray] = []
        wanted = np.zeros(num_groups, dtype=np.int64)
        for table in self.tables:
            on_host = table.host_groups[self.number]
            if host_only and on_host is None:
                continue
            parts = (on_host,) if host_only and on_host is not None else table.groups(self.number)
            want, contents = combinations(
                Lists.of_pairs(np.tile(self.group_of_rank, len(parts)), np.concatenate(parts), num_groups)
            )
            classes = contents.through(table.classes_of_group)
            wanted += classes.sums(table.demanded_bytes)[want]
            shared = join(table.node_held, classes, table.demanded_bytes)
            type_ = table.node_type[self.nodes]
            distinct, back = np.unique(kind * len(table.node_held) + type_, return_inverse=True)
            if len(distinct) * num_groups <= COARSE_ENTRIES:
                coarse.append((shared, type_, want))
                kind = back.astype(np.int64)
                continue
            types, wants, values = shared.pairs()
            nodes = Lists.of_pairs(type_, np.arange(num_nodes), len(table.node_held))
            groups = Lists.of_pairs(want, np.arange(num_groups), len(contents))
            if int((nodes.counts[types] * groups.counts[wants]).sum()) > MOST_ENTRIES:
                self.partial = True
                continue
            at, node = nodes.of(types)
            again, group = groups.of(wants[at])
            keys.append(group * num_nodes + node[again])
            extra.append(values[at[again]])
        example = np.zeros(int(kind.max(initial=0)) + 1, dtype=np.int64)
        example[kind] = np.arange(num_nodes)
        base = np.zeros((num_groups, len(example)), dtype=np.int64)
        for shared, type_, want in coarse:
            base += shared.at(type_[example][None, :], want[:, None])
        key, excess = summed(concatenated(keys), concatenated(extra))
        values_of = NodeValues(base=base, kind=kind, unit=key // num_nodes, node=key % num_nodes, excess=excess)
        return values_of, wanted

    # -- placements ---------------------------------------------------------------------------------------------------

    def groups_of(self, rows: IntArray) -> IntArray | None:
        """Node of every group; None where a group spans nodes."""
        nodes = self.node_of_row[rows[self.ranks_of_group]]
        first: IntArray = nodes[:, 0]
        if bool((nodes != nodes[:, :1]).any()) or bool(
            (np.bincount(first, minlength=len(self.nodes)) > self.slots).any()
        ):
            return None
        return first

    def flow(self, values: NodeValues) -> IntArray:
        """Node of every group for the most value, the listed one among equals; -1: fits in none."""
        return most_valuable(values, self.slots, self.node_of_row[self.listed[self.ranks_of_group[:, 0]]])

    def ranks_to_rows(self) -> IntArray | None:
        """Without tensor parallelism ranks choose devices one by one, whatever their node: the rows that save the most
        bytes of all. None with it, or where that is too large."""
        if self.layout.tp > 1 or self.types.size > MOST_SINGLE_ENTRIES:
            return None
        row, rank, value = self.entries.pairs()
        order = np.lexsort((row, rank))
        values = NodeValues(
            base=self.types.T, kind=self.type_of_row, unit=rank[order], node=row[order], excess=value[order]
        )
        return most_valuable(values, np.ones(len(self.devices), dtype=np.int64), self.listed)

    def blocks(self, values: NodeValues, node_of_group: IntArray) -> IntArray:
        """The groups of a node stay together, and these blocks choose nodes with as many GPUs: what crosses nodes in
        every step stays as it is."""
        chosen = np.full(self.num_groups, -1, dtype=np.int64)
        block_values = values.summed(node_of_group, len(self.nodes))
        for size in np.unique(self.slots[np.unique(node_of_group)]).tolist():
            alike: BoolArray = self.slots == size
            blocks = np.flatnonzero(alike)
            renamed = np.full(len(self.nodes), -1, dtype=np.int64)
            renamed[blocks] = np.arange(len(blocks))
            own = alike[block_values.unit]
            part = NodeValues(
                base=block_values.base[blocks],
                kind=block_values.kind,
                unit=renamed[block_values.unit[own]],
                node=block_values.node[own],
                excess=block_values.excess[own],
            )
            node_of_block = most_valuable(part, alike.astype(np.int64), blocks)
            mine = alike[node_of_group]
            chosen[mine] = node_of_block[renamed[node_of_group[mine]]]
        return chosen

    def packed(self, *axes: str) -> IntArray | None:
        """Groups laid out node by node, the last of ``axes`` fastest; None where they do not fit."""
        if not self.groups_fit:
            return None
        coords = self.layout.coordinates()
        lead = self.ranks_of_group[:, 0]
        order = np.lexsort([coords[axis][lead] for axis in reversed(axes)])
        node_of_group = np.empty(self.num_groups, dtype=np.int64)
        node_of_group[order] = np.repeat(np.arange(len(self.nodes)), self.slots)[: self.num_groups]
        return node_of_group

    def inside(self, node_of_group: IntArray) -> IntArray:
        """Rows of all ranks, on the best devices inside each node; groups without a node share what is left, in
        order."""
        rows = np.full(self.layout.num_ranks, -1, dtype=np.int64)
        for row, table in self._by_size(node_of_group):
            rank = np.maximum(table, 0)[:, :, None]
            values = 2 * self.saved(row, rank) + (self.listed[rank] == row)
            values[table < 0] = 0  # idle ranks take what is left
            rows[table[table >= 0]] = (assign_all(values) + row[:, 0, :1])[table >= 0]
        free = np.ones(len(rows), dtype=bool)
        free[rows[rows >= 0]] = False
        rest = self.ranks_of_group[node_of_group < 0].reshape(-1)
        rows[rest] = np.flatnonzero(free)
        return rows

    def even(self, node_of_group: IntArray, wanted: IntArray, others: IntArray) -> IntArray:
        """As ``inside`` where every group has a node, but first for the least intake of the fullest device.
        ``wanted``: bytes per rank; ``others``: what comes into each row beside this stage's bytes."""
        rows = np.full(self.layout.num_ranks, -1, dtype=np.int64)
        problems = []
        for row, table in self._by_size(node_of_group):
            rank = np.maximum(table, 0)[:, :, None]
            load = wanted[rank] - self.saved(row, rank) + others[row]
            load[table < 0] = 0
            problems.append((row, table, load))
        steps = np.unique(np.concatenate([load.reshape(-1) for _, _, load in problems]))
        low, high = 0, len(steps) - 1
        while low < high:  # the least of these that some assignment keeps below
            middle = (low + high) // 2
            fits = all(
                bool(np.take_along_axis(load <= steps[middle], assign_all(within)[:, :, None], axis=2).all())
                for _, _, load in problems
                for within in [(load <= steps[middle]).astype(np.int64)]
            )
            low, high = (low, middle) if fits else (middle + 1, high)
        for row, table, load in problems:
            over = int(load.max(initial=0)) * load.shape[1] + 1
            chosen = assign_all(-np.where(load <= steps[low], load, over)) + row[:, 0, :1]
            rows[table[table >= 0]] = chosen[table >= 0]
        return rows

    def _by_size(self, node_of_group: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Nodes with equally many devices: (rows ``[node, 1, device]``, ranks in them ``[node, device]``, -1 for
        none)."""
        placed = np.argsort(node_of_group, kind="stable")
        placed = placed[node_of_group[placed] >= 0]
        counts = np.bincount(node_of_group[placed], minlength=len(self.nodes)) * self.layout.tp
        ranks = self.ranks_of_group[placed].reshape(-1)
        node, within = runs(counts)
        for size in np.unique(self.rows_of_node).tolist():
            nodes = np.flatnonzero(self.rows_of_node == size)
            of_node = np.full(len(self.nodes), -1, dtype=np.int64)
            of_node[nodes] = np.arange(len(nodes))
            table = np.full((len(nodes), size), -1, dtype=np.int64)
            mine = of_node[node] >= 0
            table[of_node[node[mine]], within[mine]] = ranks[mine]
            yield self.first_row[nodes][:, None, None] + np.arange(size)[None, None, :], table
