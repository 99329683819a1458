"""Units of the paper's lowering: which devices form one, what each position holds, and how layouts nest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.holdings import StateSet
from nereus.ir.layout import MEGATRON_VOCAB_MULTIPLE, SHARD_NONE, BoundLayout, IntArray
from nereus.ir.plan import ORDER_REPLICA, Plan
from nereus.passes.atoms import AtomTable, build_atoms, model_geometry
from nereus.passes.diff import slot_groups
from nereus.sim.baselines.problem import Problem, plan_layout

#: Device numbers of one unit, position by position: pipeline stages slowest, tensor ranks fastest.
Unit = tuple[int, ...]


def replicated(plan: Plan) -> Plan:
    """``plan`` with whole optimizer states on every replica, which is all that the paper's units know."""
    return replace(plan, stages=tuple(replace(s, zero=0) if s.zero in (1, 2) else s for s in plan.stages))


def outside_scope(state_set: StateSet) -> str | None:
    """What of a state set the paper's units cannot express."""
    layout = plan_layout(state_set)
    if any(slot.is_split for slot in state_set.slots):
        return "state partly in host memory"
    if layout.cp > 1:
        return "context parallelism"
    if layout.splits_experts:
        return "expert parallelism"
    if layout.weight_shards != SHARD_NONE or layout.optimizer_shards != SHARD_NONE:
        return "state sharded over data parallelism"
    if layout.chunks:
        return "interleaved pipelines"
    return None


def units_of(state_set: StateSet, index: dict[Device, int]) -> list[Unit]:
    """Replicas of a state set, in order of their data-parallel rank."""
    layout = plan_layout(state_set)
    coords = layout.coordinates()
    order = np.lexsort((coords["tp"], coords["pp"], coords["dp"]))
    devices = [index[state_set.bound.ranks[rank]] for rank in order.tolist()]
    size = layout.tp * layout.pp
    return [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]


def split_groups(before: tuple[int, int], common: tuple[int, int]) -> list[list[int]]:
    """Positions of a (tp, pp) unit that share each position of a ``common`` unit, ascending."""
    (tp, pp), (sub_tp, sub_pp) = before, common
    wide, deep = tp // sub_tp, pp // sub_pp
    return [
        [p * tp + t for p in range(b * deep, (b + 1) * deep) for t in range(a * wide, (a + 1) * wide)]
        for b in range(sub_pp)
        for a in range(sub_tp)
    ]


def common_set(old: StateSet, common: tuple[int, int], units: list[Unit], devices: tuple[Device, ...]) -> StateSet:
    """``units`` of layout ``common`` with the slots of ``old``."""
    layout = plan_layout(old)
    tp, pp = common
    deep = layout.pp // pp
    cut = replace(
        layout,
        tp=tp,
        pp=pp,
        dp=len(units),
        order=ORDER_REPLICA,
        pp_split=tuple(sum(layout.pp_split[i * deep : (i + 1) * deep]) for i in range(pp)),
        vocab_multiple=MEGATRON_VOCAB_MULTIPLE * tp if layout.raw_rows else layout.vocab_multiple,
    )
    ranks = tuple(devices[d] for unit in units for d in unit)
    return replace(old, bound=BoundLayout(layout=cut, ranks=ranks))


def placed_set(new: StateSet, units: list[Unit], devices: tuple[Device, ...]) -> StateSet:
    """``new`` with replica i on ``units[i]``."""
    layout = plan_layout(new)
    coords = layout.coordinates()
    ranks = tuple(
        devices[units[dp][pp * layout.tp + tp]]
        for dp, pp, tp in zip(coords["dp"].tolist(), coords["pp"].tolist(), coords["tp"].tolist(), strict=True)
    )
    return replace(new, bound=BoundLayout(layout=layout, ranks=ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What each position of the states of a model-stage holds: ``[state][table][position]`` interval numbers. State 0
    is the old plan's, then the common layout's, then the new plan's."""

    tables: tuple[AtomTable, ...]
    in_host: tuple[bool, ...]  # per table, after the change
    was_in_host: tuple[bool, ...]
    positions: tuple[tuple[tuple[IntArray, ...], ...], ...]
    final: tuple[tuple[int, ...], ...]  # per table: groups of the new plan's state

    def num_bytes(self, state: int, position: int) -> tuple[int, int]:
        """(GPU, host) bytes of a position."""
        sizes = [0, 0]
        for number, table in enumerate(self.tables):
            host = self.in_host[number] if state == 2 else self.was_in_host[number]
            sizes[host] += int(table.num_bytes[self.positions[state][number][position]].sum())
        return sizes[0], sizes[1]


def content_of(problem: Problem, old: StateSet, mid: StateSet, new: StateSet) -> Content:
    geometry = model_geometry((old,), (mid, new))
    tables, in_host, was_in_host, final = [], [], [], []
    states: tuple[list[tuple[IntArray, ...]], ...] = ([], [], [])
    for group in slot_groups((old,), (new,)):
        table = build_atoms(geometry, problem.topology, old.model, group, derive=False)
        slots = [side.slot(group.names[0]) for side in (old, new)]
        was_in_host.append(bool(slots[0] and slots[0].host))
        in_host.append(bool(slots[1] and slots[1].host))
        states[0].append(_positions(table, old=True, state_set=0))
        states[1].append(_positions(table, old=False, state_set=0))
        states[2].append(_positions(table, old=False, state_set=1))
        final.append(tuple(i for i, g in enumerate(table.new_groups) if g.state_set == 1))
        tables.append(table)
    return Content(
        tables=tuple(tables),
        in_host=tuple(in_host),
        was_in_host=tuple(was_in_host),
        positions=tuple(tuple(state) for state in states),
        final=tuple(final),
    )


def _positions(table: AtomTable, *, old: bool, state_set: int) -> tuple[IntArray, ...]:
    groups, classes = (table.old_groups, table.class_holders) if old else (table.new_groups, table.class_wanters)
    found: dict[int, IntArray] = {}
    for number, group in enumerate(groups):
        if group.state_set == state_set:
            member = np.array([number in members for members in classes], dtype=bool)
            found[group.coord] = np.flatnonzero(member[table.cls])
    return tuple(found[coord] for coord in sorted(found))
