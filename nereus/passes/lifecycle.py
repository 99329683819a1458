"""Life-cycle operations: engines to start, processes to spawn, communicators to build; how long each takes and needs.

Durations are priors (``nereus.models.priors``).
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.cluster import Device
from nereus.ir.holdings import Topology
from nereus.ir.layout import layout_of
from nereus.ir.plan import Plan, Stage
from nereus.models.memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    engine_running_bytes,
    resident_state_bytes,
    steady_state,
)
from nereus.models.priors import ENGINE_START_S, SPAWN_S, groups_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleOp:
    kind: str  # engine-start | spawn | build-groups | retire
    stage: str
    devices: tuple[int, ...]  # device numbers
    seconds: float
    #: Bytes per device while the operation runs, and after it (an engine sleeps with its context only).
    running_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    #: Runs beside training before the boundary: its time does not stop training.
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    ops: tuple[LifecycleOp, ...]
    #: Per device: contexts, communicators and pools of the processes alive before / added by the ops / alive after.
    before_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]

    def seconds(self, kind: str, *, background: bool = False) -> float:
        """Longest chain of one kind: operations on a device follow each other, others run at once."""
        per_device: dict[int, float] = {}
        for op in self.ops:
            if op.kind == kind and op.background == background:
                for device in op.devices:
                    per_device[device] = per_device.get(device, 0.0) + op.seconds
        return max(per_device.values(), default=0.0)


def lifecycle(old: Plan, new: Plan, topology: Topology) -> Lifecycle:
    index = topology.index()
    num_devices = topology.num_devices
    before, after = [0] * num_devices, [0] * num_devices
    for plan, totals in ((old, before), (new, after)):
        for stage in plan.owners():
            pool = dict(zip(stage.ranks, _pool_bytes(plan, stage), strict=True))
            # An engine that goes or changes is drained first; its KV pool then holds nothing and makes room.
            staying = set(stage.ranks) if plan is new else _staying_engines(old, new, stage)
            for device in stage.ranks:
                number = index[device]
                if topology.alive[int(topology.node_of[number])]:
                    totals[number] += CONTEXT_BYTES + COMMUNICATOR_BYTES + (pool[device] if device in staying else 0)
    busiest = _steady_need(old, topology)
    ops: list[LifecycleOp] = []
    for stage in new.owners():
        if is_engine(stage):
            ops += _engine_ops(old, new, stage, topology, index, busiest)
        else:
            ops += _process_ops(old, stage, topology, index, busiest)
    for stage in old.owners():
        gone = [index[d] for d in stage.ranks if topology.alive[int(topology.node_of[index[d]])]]
        survivor = new.find_stage(stage.name)
        stays = set(survivor.ranks) if survivor is not None and survivor.with_ is None else set()
        gone = [d for d in gone if topology.devices[d] not in stays]
        if gone:
            zero = (0,) * len(gone)
            ops.append(
                LifecycleOp(
                    kind="retire",
                    stage=stage.name,
                    devices=tuple(gone),
                    seconds=0.0,
                    running_bytes=zero,
                    after_bytes=zero,
                )
            )
    return Lifecycle(ops=tuple(ops), before_bytes=tuple(before), after_bytes=tuple(after))


def is_engine(stage: Stage) -> bool:
    return stage.kind == "generate" or stage.engine is not None


def _staying_engines(old: Plan, new: Plan, before: Stage) -> set[Device]:
    """Devices of the old engine replicas that the new plan leaves as they are."""
    after = new.find_stage(before.name)
    if after is None or after.with_ is not None or not same_engine(old, new, before, after):
        return set()
    kept = set(engine_replicas(before)) & set(engine_replicas(after))
    return {device for replica in kept for device in replica}


def _pool_bytes(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """KV pool of an engine that stays awake at the boundary (asynchronous mode), per rank."""
    awake = stage.kind == "generate" and plan.workload.mode == "async" and stage.idle == "resident"
    if not awake:
        return (0,) * len(stage.ranks)
    weights = resident_state_bytes(plan, stage)
    return tuple(total - weight for total, weight in zip(engine_running_bytes(plan, stage), weights, strict=True))


def _steady_need(plan: Plan, topology: Topology) -> dict[Device, int]:
    """Most bytes in use on each device while any stage of ``plan`` runs."""
    need: dict[Device, int] = {}
    for row in steady_state(plan).rows:
        need_bytes = row.need_bytes
        for device in row.devices:
            need[device] = max(need.get(device, 0), need_bytes)
    return need


def engine_replicas(stage: Stage) -> tuple[tuple[Device, ...], ...]:
    """Devices of every engine replica, in rank order inside it."""
    coords = layout_of(stage).coordinates()
    replicas: dict[int, list[tuple[int, Device]]] = {}
    for rank, device in enumerate(stage.ranks):
        within = int(coords["pp"][rank]) * stage.tp + int(coords["tp"][rank])
        replicas.setdefault(int(coords["dp"][rank]), []).append((within, device))
    return tuple(tuple(d for _, d in sorted(replicas[i], key=lambda e: e[0])) for i in sorted(replicas))


def same_engine(old: Plan, new: Plan, before: Stage, after: Stage) -> bool:
    """Whether replicas of the two stages that lie on the same devices are the same running engine."""
    keys = ("tp", "pp", "ep", "engine", "kv_cache_bytes", "mem_fraction", "pp_split")
    same_model = old.model(before.model).arch == new.model(after.model).arch
    return same_model and all(getattr(before, k) == getattr(after, k) for k in keys)


def _engine_ops(
    old: Plan, new: Plan, stage: Stage, topology: Topology, index: dict[Device, int], busiest: dict[Device, int]
) -> list[LifecycleOp]:
    before = old.find_stage(stage.name)
    alive: set[tuple[Device, ...]] = set()
    if before is not None and before.with_ is None and same_engine(old, new, before, stage):
        alive = set(engine_replicas(before))
    needed = engine_running_bytes if stage.kind == "generate" else resident_state_bytes
    running = dict(zip(stage.ranks, needed(new, stage), strict=True))
    awake = dict(zip(stage.ranks, _pool_bytes(new, stage), strict=True))
    nodes = {node.name: node for node in topology.nodes}
    process = CONTEXT_BYTES + COMMUNICATOR_BYTES
    ops = []
    for replica in engine_replicas(stage):
        if replica in alive:
            continue
        need = tuple(process + running[d] for d in replica)
        room = all(
            busiest.get(d, 0) + n <= nodes[d.node].gpu.capacity_bytes for d, n in zip(replica, need, strict=True)
        )
        ops.append(
            LifecycleOp(
                kind="engine-start",
                stage=stage.name,
                devices=tuple(index[d] for d in replica),
                seconds=ENGINE_START_S,
                running_bytes=need,
                after_bytes=tuple(process + awake[d] for d in replica),
                background=room,
            )
        )
    return ops


def _process_ops(
    old: Plan, stage: Stage, topology: Topology, index: dict[Device, int], busiest: dict[Device, int]
) -> list[LifecycleOp]:
    before = old.find_stage(stage.name)
    had = set(before.ranks) if before is not None and before.with_ is None and before.service is None else set()
    capacity = {node.name: node.gpu.capacity_bytes for node in topology.nodes}
    changed = (
        before is None
        or before.with_ is not None
        or layout_of(before) != layout_of(stage)
        or before.ranks != stage.ranks
    )
    ops = []
    process = CONTEXT_BYTES + COMMUNICATOR_BYTES
    fresh = [d for d in stage.ranks if d not in had]
    for room in (True, False):  # where there is room beside the old plan, processes start while training goes on
        devices = [d for d in fresh if (busiest.get(d, 0) + process <= capacity[d.node]) == room]
        if devices:
            size = (process,) * len(devices)
            ops.append(
                LifecycleOp(
                    kind="spawn",
                    stage=stage.name,
                    devices=tuple(index[d] for d in devices),
                    seconds=SPAWN_S,
                    running_bytes=size,
                    after_bytes=size,
                    background=room,
                )
            )
    if changed:
        # The old communicators stay until commit; processes that are new were charged for theirs above.
        kept = tuple(0 if d not in had else COMMUNICATOR_BYTES for d in stage.ranks)
        ops.append(
            LifecycleOp(
                kind="build-groups",
                stage=stage.name,
                devices=tuple(index[d] for d in stage.ranks),
                seconds=groups_s(len(stage.ranks)),
                running_bytes=kept,
                after_bytes=kept,
            )
        )
    return ops
