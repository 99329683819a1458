"""Seconds that no schedule says: what setting up, draining and committing take, recounted from plans and priors.

Which operations there have to be follows from the two plans: processes where a stage had none, engines whose settings
or devices changed, communicators of every stage that is cut or placed in another way. What runs beside training has
room next to the old plan at its fullest.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.models.memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    engine_running_bytes,
    resident_state_bytes,
    steady_state,
)
from nereus.models.priors import ENGINE_START_S, SPAWN_S, commit_s, groups_s, rest_of_rollouts_s
from nereus.verify.case import Case
from nereus.verify.document import LifecycleOp
from nereus.verify.finding import Violation
from nereus.verify.parts import coordinates

_CLOSE = 1e-9
#: What an engine is started with, and what a stage's communicators follow from.
_ENGINE_SETTINGS = ("tp", "pp", "ep", "engine", "kv_cache_bytes", "mem_fraction", "pp_split")
_DEGREES = ("dp", "tp", "pp", "cp", "ep", "order", "ranks")
_LAYOUT = (*_DEGREES, "etp", "zero", "fsdp", "pp_split", "chunks", "backend", "engine", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    drain_s: float
    commit_s: float


def expected(case: Case) -> Priors:
    """What the certificate has to say. Nothing is drained, nor voted on, where nothing changes."""
    document, new = case.document, case.new_plan
    if not (len(document.moves) or document.lifecycle):
        return Priors(drain_s=0.0, commit_s=0.0)
    changed = {op.stage for op in document.lifecycle if op.kind in ("engine-start", "retire")}
    waits = any(s.kind == "generate" and s.inflight == "drain" and s.name in changed for s in new.stages)
    quiet = new.workload.mode == "sync" or new.workload.partial  # nothing is in flight, or it may stop anywhere
    drain = rest_of_rollouts_s(new.workload.response_len) if waits and not quiet else 0.0
    return Priors(drain_s=drain, commit_s=commit_s(len({d for s in new.owners() for d in s.ranks})))


def check_priors(case: Case) -> str:
    """Every operation on processes that the plans ask for, with its prior, beside training only where there is room."""
    by_stage: dict[tuple[str, str], list[LifecycleOp]] = {}
    for op in case.document.lifecycle:
        by_stage.setdefault((op.kind, op.stage), []).append(op)
        stage = case.new_plan.find_stage(op.stage)
        true = {
            "engine-start": ENGINE_START_S,
            "spawn": SPAWN_S,
            "build-groups": groups_s(len(stage.ranks)) if stage is not None else 0.0,
            "retire": 0.0,
        }.get(op.kind)
        if true is None or abs(op.seconds - true) > _CLOSE:
            raise Violation(f"{op.kind} of {op.stage} takes {op.seconds:.6g} s: the prior is {true} s")
    fullest = _fullest(case.old_plan)
    for stage in case.new_plan.owners():
        if stage.kind == "generate" or stage.engine is not None:
            _check_engines(case, stage, by_stage.get(("engine-start", stage.name), []), fullest)
        else:
            _check_groups(case, stage, by_stage.get(("build-groups", stage.name), []))
            _check_spawns(case, by_stage.get(("spawn", stage.name), []), fullest)
    found = expected(case)
    said = case.document.certificate
    for name, value in (("drain_s", found.drain_s), ("commit_s", found.commit_s)):
        figure = said.get(name)
        if isinstance(figure, bool) or not isinstance(figure, int | float) or abs(figure - value) > _CLOSE:
            raise Violation(f"{name} is {value:.6g} and the certificate says {figure}")
    return f"{len(case.document.lifecycle)} operations, draining {found.drain_s:g} s, committing {found.commit_s:.3g} s"


def _check_engines(case: Case, stage: Stage, ops: list[LifecycleOp], fullest: dict[Device, int]) -> None:
    old, new, world = case.old_plan, case.new_plan, case.world
    before = old.find_stage(stage.name)
    running: set[tuple[Device, ...]] = set()
    if before is not None and before.with_ is None and before.service is None:
        same = all(getattr(before, key) == getattr(stage, key) for key in _ENGINE_SETTINGS)
        if same and old.model(before.model).arch == new.model(stage.model).arch:
            running = set(_replicas(before))
    anew = {tuple(world.number[d] for d in replica): replica for replica in _replicas(stage) if replica not in running}
    started = [tuple(op.devices.tolist()) for op in ops]
    wrong = set(started) ^ set(anew)
    if wrong or len(started) != len(anew):
        names = ", ".join(str(world.devices[d]) for d in (min(wrong) if wrong else started[0]))
        raise Violation(f"{stage.name}: the engine on {names} is to be started once, or not at all")
    need = (engine_running_bytes if stage.kind == "generate" else resident_state_bytes)(new, stage)
    of_device = dict(zip(stage.ranks, need, strict=True))
    for op, devices in zip(ops, started, strict=True):
        _check_background(case, op, {d: of_device[d] for d in anew[devices]}, fullest)


def _check_spawns(case: Case, ops: list[LifecycleOp], fullest: dict[Device, int]) -> None:
    for op in ops:
        for number in op.devices.tolist():
            _check_background(case, op, {case.world.devices[number]: 0}, fullest)


def _check_background(case: Case, op: LifecycleOp, more: dict[Device, int], fullest: dict[Device, int]) -> None:
    """``more``: what each process takes beyond its context and communicators."""
    capacity = {node.name: node.gpu.capacity_bytes for node in case.world.nodes}
    process = CONTEXT_BYTES + COMMUNICATOR_BYTES
    room = all(fullest.get(d, 0) + process + size <= capacity[d.node] for d, size in more.items())
    if room != op.background:
        where, how = next(iter(more)), "has" if room else "has no"
        raise Violation(f"{op.kind} of {op.stage} on {where} {how} room beside training")


def _check_groups(case: Case, stage: Stage, ops: list[LifecycleOp]) -> None:
    before = case.old_plan.find_stage(stage.name)
    owned = before is not None and before.with_ is None
    must = not owned or any(getattr(before, key) != getattr(stage, key) for key in _DEGREES)
    may = must or any(getattr(before, key) != getattr(stage, key) for key in _LAYOUT)
    if must and len(ops) != 1:
        raise Violation(f"{stage.name} is cut or placed anew and its communicators are set up {len(ops)} times")
    if ops and not may:
        raise Violation(f"{stage.name} stays as it is and its communicators are set up anew")
    everywhere = {case.world.number[d] for d in stage.ranks}
    if any(set(op.devices.tolist()) != everywhere for op in ops):
        raise Violation(f"the communicators of {stage.name} are not set up on all of its devices")


def _replicas(stage: Stage) -> list[tuple[Device, ...]]:
    """Devices of every engine, in the order of pipeline stage and tensor rank."""
    coords = coordinates(stage)
    found: dict[int, list[tuple[int, int, Device]]] = {}
    for device, dp, pp, tp in zip(stage.ranks, *(coords[axis].tolist() for axis in ("dp", "pp", "tp")), strict=True):
        found.setdefault(dp, []).append((pp, tp, device))
    return [tuple(device for *_, device in sorted(found[dp], key=lambda e: e[:2])) for dp in sorted(found)]


def _fullest(plan: Plan) -> dict[Device, int]:
    """Most bytes in use on each device while any stage of ``plan`` runs."""
    need: dict[Device, int] = {}
    for row in steady_state(plan).rows:
        for device in row.devices:
            need[device] = max(need.get(device, 0), row.need_bytes)
    return need
