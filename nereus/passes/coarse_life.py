"""coarse: which engines start, which processes are spawned, which communicators are built, as seconds and bytes per
GPU. The rules and priors of ``lifecycle``, on columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray, layout_of
from nereus.ir.plan import Plan, Stage
from nereus.models.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from nereus.models.priors import ENGINE_START_S, SPAWN_S, groups_s
from nereus.passes.coarse_grid import FloatArray
from nereus.passes.coarse_regions import BoolArray
from nereus.passes.coarse_side import Side, rank_coordinates
from nereus.passes.coarse_space import Space
from nereus.passes.lifecycle import is_engine, same_engine

PROCESS_BYTES = CONTEXT_BYTES + COMMUNICATOR_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class CoarseLife:
    """Seconds and bytes per device. ``start_s``, ``spawn_s``: not beside training; ``background_s``: beside it."""

    start_s: FloatArray
    spawn_s: FloatArray
    groups_s: FloatArray
    background_s: float
    before_bytes: IntArray  # contexts, communicators and pools of the old plan's processes
    starting_bytes: IntArray
    lasting_bytes: IntArray
    after_bytes: IntArray
    changed: frozenset[str]  # stages of which an engine starts or processes end
    num_ops: int


def coarse_life(old: Side, new: Side, space: Space) -> CoarseLife:
    count = space.num_devices
    start, start_back, spawn, spawn_back, groups = (np.zeros(count) for _ in range(5))
    before, starting, asleep, spawned, lasting, after = (np.zeros(count, dtype=np.int64) for _ in range(6))
    changed: set[str] = set()
    num_ops = 0
    before_of = {stage.name: (stage, space.devices(old, where)) for stage, where in old.owners}
    for stage, where in new.owners:
        devices = space.devices(new, where)
        after[devices] += PROCESS_BYTES
        was = before_of.get(stage.name)
        if is_engine(stage):
            stays = _staying(old.plan, new.plan, stage, devices, was)
            weights, cache = new.engine_bytes(stage)
            pp = rank_coordinates(layout_of(stage)).pp
            pool = cache if _awake(new.plan, stage) else np.zeros_like(cache)
            after[devices] += pool[pp]
            if bool(stays.all()):
                continue
            changed.add(stage.name)
            num_ops += 1
            fresh = devices[~stays]
            need = PROCESS_BYTES + (weights + cache)[pp[~stays]]
            room = _room(old, space, fresh, need)
            # An engine starts beside training only where all of its GPUs have room.
            engine = _replica(stage)[~stays]
            room = (np.bincount(engine, weights=~room) == 0)[engine]
            start[fresh[~room]] += ENGINE_START_S
            start_back[fresh[room]] += ENGINE_START_S
            starting[fresh] = np.maximum(starting[fresh], asleep[fresh] + need)
            asleep[fresh] += PROCESS_BYTES + pool[pp[~stays]]
            continue
        had = np.zeros(count, dtype=bool)
        if was is not None and was[0].service is None:
            had[was[1][was[1] >= 0]] = True
        fresh = devices[~had[devices]]
        if len(fresh):
            num_ops += 1
            room = _room(old, space, fresh, np.full(len(fresh), PROCESS_BYTES))
            spawn[fresh[~room]] += SPAWN_S
            spawn_back[fresh[room]] += SPAWN_S
            spawned[fresh] += PROCESS_BYTES
        if was is None or layout_of(was[0]) != layout_of(stage) or not np.array_equal(was[1], devices):
            num_ops += 1
            groups[devices] += groups_s(len(devices))
            lasting[devices[had[devices]]] += COMMUNICATOR_BYTES
    survivors = {stage.name: space.devices(new, where) for stage, where in new.owners}
    for name, (stage, devices) in before_of.items():
        alive = devices[devices >= 0]
        before[alive] += PROCESS_BYTES
        stays_on = np.zeros(count, dtype=bool)
        stays_on[survivors.get(name, np.zeros(0, dtype=np.int64))] = True
        if not bool(stays_on[alive].all()):
            changed.add(name)
            num_ops += 1
        if name not in changed and _awake(old.plan, stage):
            _, cache = old.engine_bytes(stage)
            before[devices] += cache[rank_coordinates(layout_of(stage)).pp]
    return CoarseLife(
        start_s=start,
        spawn_s=spawn,
        groups_s=groups,
        background_s=max(float(start_back.max(initial=0.0)), float(spawn_back.max(initial=0.0))),
        before_bytes=before,
        starting_bytes=np.where(starting > 0, starting + spawned, 0),
        lasting_bytes=asleep + spawned + lasting,
        after_bytes=after,
        changed=frozenset(changed),
        num_ops=num_ops,
    )


def _awake(plan: Plan, stage: Stage) -> bool:
    return stage.kind == "generate" and plan.workload.mode == "async" and stage.idle == "resident"


def _room(old: Side, space: Space, devices: IntArray, need: IntArray) -> BoolArray:
    """Whether ``need`` fits beside the old plan's peak. Its memory model is asked only where it runs anything."""
    used = np.zeros(space.num_devices, dtype=bool)
    for _, where in old.owners:
        there = space.devices(old, where)
        used[there[there >= 0]] = True
    if not bool(used[devices].any()):
        return np.asarray(need <= space.capacity[devices])
    busiest = np.zeros(space.num_devices, dtype=np.int64)
    numbers = space.all_devices(old)
    busiest[numbers[numbers >= 0]] = old.needs[numbers >= 0]
    return np.asarray(busiest[devices] + need <= space.capacity[devices])


def _replica(stage: Stage) -> IntArray:
    return layout_of(stage).coordinates()["dp"]


def _staying(old: Plan, new: Plan, stage: Stage, devices: IntArray, was: tuple[Stage, IntArray] | None) -> BoolArray:
    """Ranks of engines that run on the same GPUs before and after."""
    if was is None or not same_engine(old, new, was[0], stage):
        return np.zeros(len(devices), dtype=bool)
    alike = (was[0].order, was[0].cp) == (stage.order, stage.cp)
    if alike and np.array_equal(was[1], devices):
        return np.ones(len(devices), dtype=bool)
    rows = [_engines(s, d) for s, d in ((was[0], was[1]), (stage, devices))]
    known = {row.tobytes() for row in rows[0]}
    stays = np.array([row.tobytes() in known for row in rows[1]], dtype=bool)
    return np.asarray(stays[_replica(stage)])


def _engines(stage: Stage, devices: IntArray) -> IntArray:
    """Devices of every replica, ``[replicas, ranks]``."""
    coords = layout_of(stage).coordinates()
    table = np.zeros((stage.dp, stage.pp * stage.tp * stage.cp), dtype=np.int64)
    table[coords["dp"], (coords["pp"] * stage.tp + coords["tp"]) * stage.cp + coords["cp"]] = devices
    return table
