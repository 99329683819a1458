"""Figures of a transition per model-stage, per class of GPUs and for the whole plan: what text and JSON both show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.ir.transition import INTER, LINKS, LOCAL
from nereus.models.memory import MemoryRow, steady_state
from nereus.passes.atoms import AtomTable
from nereus.passes.compiled import Transition
from nereus.passes.lifecycle import engine_replicas
from nereus.passes.lower import StageChange


@dataclass(slots=True, kw_only=True)
class StageFlow:
    """Bytes of one state set. ``kept``: wanted and already at its place; ``untouched``: the part of it whose storages
    stay as they are. ``bound_node_in``: None where other state sets want the same bytes on the same node."""

    moved_bytes: int = 0
    bound_moved_bytes: int = 0
    bytes_by_link: dict[str, int] = field(default_factory=dict)
    node_in: dict[int, int] = field(default_factory=dict)  # node number -> bytes from other nodes
    bound_node_in: dict[int, int] | None = field(default_factory=dict)
    kept_bytes: int = 0
    untouched_bytes: int = 0
    derived_bytes: int = 0
    local_bytes: int = 0

    @property
    def node_in_bytes_max(self) -> int:
        return max(self.node_in.values(), default=0)

    @property
    def bound_node_in_bytes_max(self) -> int | None:
        return None if self.bound_node_in is None else max(self.bound_node_in.values(), default=0)


def stage_flows(transition: Transition) -> dict[str, StageFlow]:
    """By stage that holds a state set in the new plan."""
    flows = {s.stage: StageFlow() for s in transition.new_holdings.sets}
    owners = [_owners(transition, table) for table in transition.diff.tables]
    _add_moves(transition, owners, flows)
    _add_demands(transition, owners, flows)
    for number, table in enumerate(transition.diff.tables):
        _add_kept(transition, number, table, owners[number], flows)
    storages = transition.storages
    for stage, flow in flows.items():
        for name, _, slot in storages.slots(stage):
            if slot is not None:
                untouched = sum(int(total.kept.sum()) for total in storages.totals(stage, name))
                flow.untouched_bytes += untouched * slot.element_bytes
    return flows


def _owners(transition: Transition, table: AtomTable) -> dict[int, str]:
    """Place -> new state set that wants the table's atoms there; the first where two of one model do."""
    sets = transition.geometry_of(table).new_sets
    owner: dict[int, str] = {}
    for group in table.new_groups:
        for place in group.places:
            owner.setdefault(place, sets[group.state_set].stage)
    return owner


def _add_moves(transition: Transition, owners: list[dict[int, str]], flows: dict[str, StageFlow]) -> None:
    """Summed per table, destination and link first: there are far fewer of those than of moves. In the moves' order."""
    topology, moves = transition.topology, transition.schedule.moves
    num_places = 2 * topology.num_devices
    keys = (moves.table * num_places + moves.dst) * len(LINKS) + moves.link
    kinds, example, kind = np.unique(keys, return_index=True, return_inverse=True)
    sums = np.bincount(kind, weights=moves.num_bytes, minlength=len(kinds)).astype(np.int64)
    order = np.argsort(example)
    for key, num_bytes in zip(kinds[order].tolist(), sums[order].tolist(), strict=True):
        place, link = key // len(LINKS), LINKS[key % len(LINKS)]
        table, dst = divmod(place, num_places)
        flow = flows[owners[table][dst]]
        if link == LOCAL:
            flow.local_bytes += num_bytes
            continue
        flow.moved_bytes += num_bytes
        flow.bytes_by_link[link] = flow.bytes_by_link.get(link, 0) + num_bytes
        if link == INTER:
            node = topology.node_of_place(dst)
            flow.node_in[node] = flow.node_in.get(node, 0) + num_bytes


def _add_demands(transition: Transition, owners: list[dict[int, str]], flows: dict[str, StageFlow]) -> None:
    topology = transition.topology
    node_of = topology.node_of.tolist()
    # Per class: nodes with a holder, and nodes with a holder in host memory.
    known_nodes: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    for demand in transition.diff.demands:
        key = (demand.table, demand.cls)
        if key not in known_nodes:
            holders = transition.diff.holders[demand.table][demand.cls]
            known_nodes[key] = (
                {node_of[p % topology.num_devices] for p in holders},
                {node_of[p % topology.num_devices] for p in holders if topology.is_host(p)},
            )
        nodes, host_nodes = known_nodes[key]
        arriving: tuple[int, ...] = demand.wanters
        if topology.is_host(demand.wanters[0]):  # host memory of a node is one space for all its processes
            arriving = () if demand.node in host_nodes else demand.wanters[:1]
        owner = owners[demand.table]
        for place in arriving:
            flows[owner[place]].bound_moved_bytes += demand.num_bytes
        if demand.node in nodes:
            continue
        stages = {owner[place] for place in demand.wanters}
        for stage in stages:
            known = flows[stage].bound_node_in
            if len(stages) > 1 or known is None:
                flows[stage].bound_node_in = None
            else:
                known[demand.node] = known.get(demand.node, 0) + demand.num_bytes


def _add_kept(
    transition: Transition, number: int, table: AtomTable, owner: dict[int, str], flows: dict[str, StageFlow]
) -> None:
    sizes = np.bincount(table.cls, weights=table.num_bytes, minlength=table.num_classes).astype(np.int64).tolist()
    holders, wanters = transition.diff.holders[number], transition.diff.wanters[number]
    for cls, size in enumerate(sizes):
        if not wanters[cls]:
            continue
        held = set(holders[cls])
        for place in wanters[cls]:
            if place in held:
                flows[owner[place]].kept_bytes += size
    for place, own in table.derived.items():
        if place not in owner:
            continue
        wanted = np.array(
            [place in wanters[c] and place not in holders[c] for c in range(table.num_classes)], dtype=bool
        )
        flows[owner[place]].derived_bytes += int(table.num_bytes[own[wanted[table.cls[own]]]].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Replicas of a generation stage: those that start anew, and those that run on."""

    started: int
    in_background: int
    total: int

    @property
    def kept(self) -> int:
        return self.total - self.started


def engines_of(transition: Transition, stage: Stage) -> Engines | None:
    """None for what is no engine of its own."""
    if stage.kind != "generate" or stage.with_ is not None or stage.service is not None:
        return None
    ops = [op for op in transition.life.ops if op.kind == "engine-start" and op.stage == stage.name]
    return Engines(
        started=len(ops), in_background=sum(1 for op in ops if op.background), total=len(engine_replicas(stage))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakClass:
    """GPUs (or host memories, then ``devices`` is empty) that peak alike."""

    devices: tuple[Device, ...]
    hosts: tuple[str, ...]
    peak_bytes: int
    capacity_bytes: int
    phase: str


def peak_classes(transition: Transition) -> tuple[PeakClass, ...]:
    """Least room first; what differs by less than is printed (0.1 GB) is one class, with the fullest's figure.

    Memory of lost nodes is left out."""
    memory, topology = transition.memory, transition.topology
    peak = memory.reversible_peak
    transfer = memory.reversible["during the transfer"]
    if transition.schedule.mode == "tight":
        from nereus.passes.check import check_memory

        _, transfer = check_memory(transition.dag, memory.tight_base, memory.capacity, topology)
        phases = {**memory.reversible, "during the transfer": transfer}
        peak = np.maximum.reduce(list(phases.values()))
    else:
        phases = memory.reversible
    found: dict[tuple[int, int, str, bool], list[int]] = {}  # (capacity, tenths of a GB, phase, whether host)
    for space in range(len(peak)):
        host = space >= topology.num_devices
        node = space - topology.num_devices if host else int(topology.node_of[space])
        value = int(peak[space])
        if not topology.alive[node] or not value:
            continue
        phase = max(phases, key=lambda name: int(phases[name][space]))
        found.setdefault((int(memory.capacity[space]), round(value / 1e8), phase, host), []).append(space)
    fullest = {key: max(int(peak[s]) for s in spaces) for key, spaces in found.items()}
    return tuple(
        PeakClass(
            devices=() if key[3] else tuple(topology.devices[s] for s in spaces),
            hosts=tuple(topology.nodes[s - topology.num_devices].name for s in spaces) if key[3] else (),
            peak_bytes=fullest[key],
            capacity_bytes=key[0],
            phase=key[2],
        )
        for key, spaces in sorted(found.items(), key=lambda e: (e[0][0] - fullest[e[0]], -fullest[e[0]], e[0][2:]))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """Why an operation is inside the stop: on ``device`` it does not fit beside training."""

    device: str
    need_bytes: int
    capacity_bytes: int


def no_room(transition: Transition, kind: str) -> NoRoom | None:
    """The GPU that lacks the most for the operations of ``kind`` that training must wait for."""
    busiest: dict[Device, int] = {}
    for row in steady_state(transition.old).rows:
        for device in row.devices:
            busiest[device] = max(busiest.get(device, 0), row.need_bytes)
    topology = transition.topology
    worst: tuple[int, int, int] | None = None
    for op in transition.life.ops:
        if op.kind != kind or op.background:
            continue
        for number, running in zip(op.devices, op.running_bytes, strict=True):
            need = busiest.get(topology.devices[number], 0) + running
            short = need - int(transition.memory.capacity[number])
            if short > 0 and (worst is None or short > worst[0]):
                worst = (short, number, need)
    if worst is None:
        return None
    _, number, need = worst
    return NoRoom(
        device=str(topology.devices[number]),
        need_bytes=need,
        capacity_bytes=int(transition.memory.capacity[number]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Steady-state memory after the change: worst GPU of each training stage; and, where the workload changed, the
    stages of the old layout that would not fit (empty: it would)."""

    seq_len: int
    training: tuple[MemoryRow, ...]
    old_misfits: tuple[MemoryRow, ...] | None


def fits(old: Plan, new: Plan) -> Fits:
    report = steady_state(new)
    training = tuple(row for row in report.worst_rows() if new.stage(row.stage).is_train)
    misfits = None
    if replace(old.workload, span=None) != replace(new.workload, span=None):
        before = steady_state(replace(old, workload=new.workload))
        misfits = tuple(row for row in before.worst_rows() if not row.fits)
    return Fits(seq_len=new.workload.seq_len, training=training, old_misfits=misfits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A fact of the plan, outside of stages, that changes: ``("workload", "response_len", 1024, 3072)``."""

    part: str  # cluster | model | workload | checkpoint
    what: str
    old: Any
    new: Any


def plan_changes(old: Plan, new: Plan) -> tuple[PlanChange, ...]:
    return tuple(_plan_changes(old, new))


def _plan_changes(old: Plan, new: Plan) -> Iterator[PlanChange]:
    before, after = {n.name: n for n in old.cluster.nodes}, {n.name: n for n in new.cluster.nodes}
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            yield PlanChange(part="cluster", what=name, old="there", new="lost")
        elif name not in before:
            yield PlanChange(part="cluster", what=name, old=None, new=f"{after[name].num_gpus} x {after[name].gpu.id}")
        else:
            yield from _fields("cluster", name + ".", before[name], after[name])
    yield from _fields("cluster", "pool.", old.cluster.pool, new.cluster.pool)
    models = {m.name: m for m in old.models}, {m.name: m for m in new.models}
    for name in dict.fromkeys([*models[0], *models[1]]):
        yield from _fields("model", name + ".", models[0].get(name), models[1].get(name))
    yield from _fields("workload", "", old.workload, new.workload)
    yield from _fields("checkpoint", "", old.checkpoint, new.checkpoint)


def _fields(part: str, prefix: str, before: Any, after: Any) -> Iterator[PlanChange]:
    if before == after:
        return
    if before is None or after is None:
        name = prefix.rstrip(".") or part
        yield PlanChange(part=part, what=name, old=before and "there", new=after and "there")
        return
    for entry in fields(before):
        a, b = getattr(before, entry.name), getattr(after, entry.name)
        if not entry.compare or a == b:
            continue
        if isinstance(a if a is not None else b, Arch | Moe | Mla):
            yield from _fields(part, f"{prefix}{entry.name}.", a, b)
        else:
            yield PlanChange(part=part, what=prefix + entry.name, old=_plain(a), new=_plain(b))


def _plain(value: Any) -> Any:
    """What JSON can say; an object by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(getattr(value, "id", None) or getattr(value, "name", None) or value)


def destroyed(transition: Transition) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(old stage, slots) of state that no state set of the new plan holds any more."""
    found = []
    for before in transition.old_holdings.sets:
        kept = {slot.name for s in transition.new_holdings.of_model(before.model) for slot in s.slots}
        gone = tuple(slot.name for slot in before.slots if slot.name not in kept)
        if gone:
            found.append((before.stage, gone))
    return tuple(found)


def follows(transition: Transition, change: StageChange) -> str | None:
    """The stage whose processes and tensors ``change``'s stage uses before and after; None if it has its own."""
    old, new = change.old, change.new
    if old is None or new is None or new.with_ is None or old.with_ != new.with_:
        return None
    return None if transition.new_holdings.find(new.name) is not None else new.with_


def differs(transition: Transition) -> bool:
    """Whether anything at all is different between the two plans."""
    return (
        any(change.changed for change in transition.changes)
        or bool(plan_changes(transition.old, transition.new))
        or transition.certificate.mode != "none"
    )
