"""place: which device takes which coordinate of the new layout.

Allowed: every assignment of a stage's coordinates to the devices in its ``on`` that keeps a tensor-parallel group
inside one node wherever it can be. Groups choose nodes by min-cost flow, devices inside a node follow by linear
assignment. Candidates are the listed order and the flows for bytes per device and bytes per node; the one with the
least (predicted transfer + horizon x added step time), then the fewest bytes, wins, so the listed order is never
beaten by something slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from ortools.graph.python import linear_sum_assignment, min_cost_flow

from nereus.ir.cluster import Device
from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.layout import IntArray, Layout, layout_of
from nereus.ir.plan import Plan, Stage
from nereus.passes.hold import hold
from nereus.passes.overlap import Overlap, overlap
from nereus.passes.step_cost import node_traffic_s

#: Up to so many ranks the best placement is proved by CP-SAT where the flow leaves a gap; above, its bound is given.
MAX_EXACT_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Why a stage lies where it does. Seconds and bytes are this stage's alone."""

    stage: str
    chosen: str  # pinned | unchanged | listed | bytes | nodes | devices
    moved_bytes: int
    listed_moved_bytes: int
    best_moved_bytes: int  # least over all allowed placements (a lower bound where ``exact`` is false)
    exact: bool
    best_node_in_bytes: tuple[int, ...]  # per node: least that must enter it under any allowed placement
    best_device_in_bytes: tuple[tuple[int, int], ...]  # (device number, least bytes that must enter it)
    transfer_s: float
    step_s: float
    listed_transfer_s: float
    listed_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    plan: Plan
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """``horizon_steps``: RL steps over which a placement's added step time is charged."""

    horizon_steps: int = 100

    name = "place"

    def apply(self, old: Plan, old_holdings: Holdings, new: Plan, topology: Topology) -> Placed:
        holdings = hold(new)
        stages: list[Stage] = []
        choices: list[Choice] = []
        for stage in new.stages:
            if stage.with_ is not None or stage.service is not None:
                stages.append(stage)
                continue
            previous = _unchanged(old, stage)
            state_set = next((s for s in holdings.sets if (s.owner, s.model) == (stage.name, stage.model)), None)
            if stage.place is None and previous is not None:
                stage = replace(stage, place=previous)
                state_set = state_set and replace(state_set, bound=replace(state_set.bound, ranks=previous))
            if state_set is not None:
                matrix = overlap(old_holdings, state_set, topology)
                if matrix is not None:
                    problem = _Problem(self, new, stage, state_set, matrix, topology)
                    stage, choice = problem.solve("unchanged" if previous is not None else "pinned")
                    choices.append(choice)
            stages.append(stage if stage.place is not None else replace(stage, place=stage.ranks))
        return Placed(plan=replace(new, stages=_follow(stages)), choices=tuple(choices))


def pin(plan: Plan) -> Plan:
    """``plan`` with its placement written out: what ``on`` and ``order`` say where ``place`` does not."""
    return replace(
        plan, stages=_follow([s if s.place or s.service else replace(s, place=s.ranks) for s in plan.stages])
    )


def _unchanged(old: Plan, stage: Stage) -> tuple[Device, ...] | None:
    """Old ranks of a stage whose layout and devices stay: there is nothing to gain by moving it."""
    before = old.find_stage(stage.name)
    if before is None or before.with_ is not None or before.service is not None:
        return None
    same = layout_of(before) == layout_of(stage) and set(before.devices) == set(stage.devices)
    return before.ranks if same else None


def _follow(stages: list[Stage]) -> tuple[Stage, ...]:
    """Stages ``with`` another lie where it does."""
    by_name = {stage.name: stage for stage in stages}

    def host(stage: Stage) -> Stage:
        while stage.with_ is not None:
            stage = by_name[stage.with_]
        return stage

    return tuple(s if s.with_ is None else replace(s, place=host(s).place) for s in stages)


class _Problem:
    """One stage: rows of ``overlap`` are its devices, columns its ranks."""

    def __init__(
        self, options: Place, plan: Plan, stage: Stage, state_set: StateSet, matrix: Overlap, topology: Topology
    ) -> None:
        self.options, self.plan, self.stage, self.overlap, self.topology = options, plan, stage, matrix, topology
        layout = state_set.bound.layout
        assert isinstance(layout, Layout), "only what a plan lays out is placed"
        self.layout: Layout = layout
        self.state_set_name = state_set.stage
        self.num_params = sum(t.numel for t in state_set.tensors)
        index = topology.index()
        self.row_of_device = {device: row for row, device in enumerate(matrix.devices)}
        self.listed = np.array([self.row_of_device[index[d]] for d in stage.ranks], dtype=np.int64)
        self.node_of_row = topology.node_of[np.array(matrix.devices, dtype=np.int64)]
        self.nodes = np.unique(self.node_of_row)
        coords = self.layout.coordinates()
        group = (coords["pp"] * self.layout.dp + coords["dp"]) * self.layout.cp + coords["cp"]
        order = np.lexsort((coords["tp"], group))
        self.ranks_of_group: IntArray = order.reshape(-1, self.layout.tp)
        self.rows_of_node = [np.flatnonzero(self.node_of_row == node) for node in self.nodes]
        self.slots = np.array([len(rows) // self.layout.tp for rows in self.rows_of_node], dtype=np.int64)

    def solve(self, fixed_reason: str) -> tuple[Stage, Choice]:
        listed = self._cost(self.listed)
        bound, exact, best_rows = self._best_moved()
        if self.stage.place is not None:
            chosen, rows, cost = fixed_reason, self.listed, listed
        else:
            candidates = [("listed", self.listed), *self._candidates()]
            if best_rows is not None:
                candidates.append(("bytes", best_rows))
            costs = [(name, rows, self._cost(rows)) for name, rows in candidates]
            chosen, rows, cost = min(costs, key=lambda c: (round(c[2][0], 6), c[2][1]))
        devices = tuple(self.topology.devices[self.overlap.devices[row]] for row in rows)
        choice = Choice(
            stage=self.state_set_name,
            chosen=chosen,
            moved_bytes=cost[1],
            listed_moved_bytes=listed[1],
            best_moved_bytes=bound,
            exact=exact,
            best_node_in_bytes=self._least_node_in(),
            best_device_in_bytes=self._best_device_in(),
            transfer_s=cost[2],
            step_s=cost[3],
            listed_transfer_s=listed[2],
            listed_step_s=listed[3],
        )
        return replace(self.stage, place=devices), choice

    # -- candidates -------------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[tuple[str, IntArray]]:
        listed_node = self.node_of_row[self.listed[self.ranks_of_group[:, 0]]]
        yield "nodes", self._inside_nodes(self._flow(self._node_values()))
        yield "bytes", self._inside_nodes(self._flow(self._device_values()))
        listed_slot = np.searchsorted(self.nodes, listed_node)
        if (np.bincount(listed_slot, minlength=len(self.nodes)) <= self.slots).all():
            yield "devices", self._inside_nodes(listed_slot)

    def _device_values(self) -> IntArray:
        """[group, node]: bytes saved if every rank of the group had its best device of the node to itself."""
        best = np.stack([self.overlap.saved[rows].max(axis=0) for rows in self.rows_of_node], axis=1)
        values: IntArray = best[self.ranks_of_group].sum(axis=1)
        return values

    def _node_values(self) -> IntArray:
        """[group, node]: wanted bytes that some device of the node has, ties broken by bytes per device."""
        per_rank = np.zeros((self.layout.num_ranks, len(self.nodes)), dtype=np.int64)
        for table in self.overlap.tables:
            holds = table.node_holds[:, self.nodes]
            for cls, ranks in enumerate(table.wanted_by):
                per_rank[np.ix_(ranks, np.flatnonzero(holds[cls]))] += table.class_bytes[cls]
        scaled: IntArray = per_rank[self.ranks_of_group].sum(axis=1) * 64 + self._device_values()
        return scaled

    def _flow(self, values: IntArray) -> IntArray:
        """Node (index into ``nodes``) of every group, maximising ``values``; -1 for groups that fit in no node."""
        num_groups, num_nodes = values.shape
        listed = np.searchsorted(self.nodes, self.node_of_row[self.listed[self.ranks_of_group[:, 0]]])
        costs = -2 * values
        costs[np.arange(num_groups), listed] -= 1  # among equals the listed node
        flow = min_cost_flow.SimpleMinCostFlow()
        groups = np.arange(num_groups, dtype=np.int32)
        source, sink = num_groups + num_nodes, num_groups + num_nodes + 1
        flow.add_arcs_with_capacity_and_unit_cost(
            np.full(num_groups, source, dtype=np.int32),
            groups,
            np.ones(num_groups, dtype=np.int64),
            np.zeros(num_groups, dtype=np.int64),
        )
        tails = np.repeat(groups, num_nodes)
        heads = np.tile(np.arange(num_nodes, dtype=np.int32) + num_groups, num_groups)
        arcs = flow.add_arcs_with_capacity_and_unit_cost(
            tails, heads, np.ones(len(tails), dtype=np.int64), costs.reshape(-1)
        )
        flow.add_arcs_with_capacity_and_unit_cost(
            np.arange(num_nodes, dtype=np.int32) + num_groups,
            np.full(num_nodes, sink, dtype=np.int32),
            self.slots,
            np.zeros(num_nodes, dtype=np.int64),
        )
        amount = min(num_groups, int(self.slots.sum()))
        flow.set_nodes_supplies(np.array([source, sink]), np.array([amount, -amount]))
        status = flow.solve()
        assert status == flow.OPTIMAL, status
        used = flow.flows(arcs) > 0
        chosen = np.full(num_groups, -1, dtype=np.int64)
        chosen[tails[used]] = heads[used] - num_groups
        return chosen

    def _inside_nodes(self, node_of_group: IntArray) -> IntArray:
        """Rows of all ranks: an assignment inside every node; groups without a node share what is left, in order."""
        rows = np.full(self.layout.num_ranks, -1, dtype=np.int64)
        free: list[int] = []
        for number, node_rows in enumerate(self.rows_of_node):
            ranks = self.ranks_of_group[node_of_group == number].reshape(-1)
            if len(ranks):
                rows[ranks] = node_rows[self._assign(node_rows, ranks)]
            free += sorted(set(node_rows.tolist()) - set(rows[ranks].tolist()))
        rest = self.ranks_of_group[node_of_group < 0].reshape(-1)
        rows[rest] = free
        return rows

    def _assign(self, rows: IntArray, ranks: IntArray) -> IntArray:
        """Index into ``rows`` for each of ``ranks``, saving the most bytes (listed device among equals)."""
        costs = -2 * self.overlap.saved[np.ix_(rows, ranks)].T
        costs[self.listed[ranks][:, None] == rows[None, :]] -= 1
        size = len(rows)
        if len(ranks) < size:  # the solver wants a square problem: idle ranks take what is left
            costs = np.vstack((costs, np.zeros((size - len(ranks), size), dtype=np.int64)))
        solver = linear_sum_assignment.SimpleLinearSumAssignment()
        left = np.repeat(np.arange(size), size)
        right = np.tile(np.arange(size), size)
        solver.add_arcs_with_cost(left, right, costs.reshape(-1))
        status = solver.solve()
        assert status == solver.OPTIMAL, status
        return np.array([solver.right_mate(i) for i in range(len(ranks))], dtype=np.int64)

    # -- costs and bounds ---------------------------------------------------------------------------------------------

    def _cost(self, rows: IntArray) -> tuple[float, int, float, float]:
        """(objective, moved bytes, transfer seconds, added seconds per step)."""
        ranks = np.arange(self.layout.num_ranks)
        missing = self.overlap.wanted - self.overlap.saved[rows, ranks]
        node_of_rank = self.node_of_row[rows]
        node_in = np.zeros(len(self.topology.nodes), dtype=np.int64)
        host_in = 0
        for table in self.overlap.tables:
            entering = table.entering(node_of_rank)
            node_in += entering
            host_in += int(entering.sum()) if table.in_host else 0
        nodes = self.topology.nodes
        intra = np.array([n.gpu.intra_bytes_per_s for n in nodes])
        nic = np.array([n.nic_bytes_per_s for n in nodes])
        transfer_s = max(float((missing / intra[node_of_rank]).max()), float((node_in / nic).max()))
        step_s = node_traffic_s(self.plan, self.stage, self.layout, node_of_rank, self.num_params, self.topology)
        objective = transfer_s + self.options.horizon_steps * step_s
        return objective, int(missing.sum()) + host_in, transfer_s, step_s

    def _best_moved(self) -> tuple[int, bool, IntArray | None]:
        """Least moved bytes over all allowed placements, whether that is exact, and a placement that reaches it."""
        if any(table.in_host for table in self.overlap.tables):
            rest = self.overlap.wanted - self.overlap.saved.max(axis=0)
            return int(rest.sum()) + sum(self._least_node_in(host_only=True)), False, None
        total = int(self.overlap.wanted.sum())
        if int(self.slots.sum()) < len(self.ranks_of_group):  # some group spans nodes: only a bound that ignores groups
            return total - int(self.overlap.saved.max(axis=0).sum()), False, None
        values = self._device_values()
        nodes = self._flow(values)
        upper = int(values[np.arange(len(nodes)), nodes].sum())
        rows = self._inside_nodes(nodes)
        reached = int(self.overlap.saved[rows, np.arange(len(rows))].sum())
        if reached == upper:
            return total - reached, True, rows
        if self.layout.num_ranks > MAX_EXACT_RANKS:
            return total - upper, False, rows
        # CP-SAT takes longer to import than most plans to compile, and few need it.
        from nereus.passes.place_exact import most_saved

        exact = most_saved(self.overlap.saved, self.ranks_of_group, self.rows_of_node, rows)
        if exact is not None:
            return total - exact[0], True, exact[1]
        return total - upper, False, rows

    def _least_node_in(self, *, host_only: bool = False) -> tuple[int, ...]:
        """Every device of ``on`` is used, so a node takes in at least what its cheapest group lacks there."""
        least = np.zeros(len(self.topology.nodes), dtype=np.int64)
        if int(self.slots.sum()) < len(self.ranks_of_group):
            return tuple(least.tolist())
        group_of_rank = np.empty(self.layout.num_ranks, dtype=np.int64)
        group_of_rank[self.ranks_of_group.reshape(-1)] = np.repeat(np.arange(len(self.ranks_of_group)), self.layout.tp)
        missing = np.zeros((len(self.ranks_of_group), len(self.nodes)), dtype=np.int64)
        for table in self.overlap.tables:
            if host_only and not table.in_host:
                continue
            lacks = ~table.node_holds[:, self.nodes]
            for cls, ranks in enumerate(table.wanted_by):
                if table.demanded_bytes[cls] and len(ranks):
                    missing[np.unique(group_of_rank[ranks])] += table.demanded_bytes[cls] * lacks[cls]
        missing -= self.overlap.partly_derived[self.ranks_of_group].sum(axis=1)[:, None]
        least[self.nodes] = np.maximum(missing.min(axis=0), 0)
        return tuple(least.tolist())

    def _best_device_in(self) -> tuple[tuple[int, int], ...]:
        least = (self.overlap.wanted[None, :] - self.overlap.saved).min(axis=1)
        return tuple(zip(self.overlap.devices, np.maximum(least, 0).tolist(), strict=True))
