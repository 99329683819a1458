"""Processes: who runs on which device before and after, that every one is started or ended once, and that no device has
two owners at a time."""

from __future__ import annotations

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.models.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, engine_running_bytes, resident_state_bytes
from nereus.verify.case import Case
from nereus.verify.finding import Violation

_PROCESS = CONTEXT_BYTES + COMMUNICATOR_BYTES
_KINDS = ("engine-start", "spawn", "build-groups", "retire")


def check_processes(case: Case) -> str:
    document, world = case.document, case.world
    old, new = _owners(case.old_plan), _owners(case.new_plan)
    numbers = [{name: {world.number[d] for d in ranks} for name, ranks in side.items()} for side in (old, new)]
    started: dict[tuple[str, int], int] = {}
    retired: set[tuple[str, int]] = set()
    for op in document.lifecycle:
        if op.kind not in _KINDS:
            raise Violation(f"'{op.kind}' is no operation on processes")
        allowed = numbers[0 if op.kind == "retire" else 1].get(op.stage, set())
        for device, after in zip(op.devices.tolist(), op.after_bytes.tolist(), strict=True):
            name = world.devices[device]
            if device not in allowed:
                raise Violation(f"{op.kind} of {op.stage} on {name}, which is not that stage's device")
            if not world.alive[device]:
                raise Violation(f"{op.kind} of {op.stage} on {name}, which is lost")
            key = (op.stage, device)
            if op.kind == "retire" and key in retired:
                raise Violation(f"{op.stage} on {name} is retired twice")
            if op.kind in ("engine-start", "spawn") and key in started:
                raise Violation(f"{op.stage} is started twice on {name}")
            if op.kind == "retire":
                retired.add(key)
            elif op.kind != "build-groups":
                started[key] = after
        if bool((op.running_bytes < op.after_bytes).any()) or bool((op.after_bytes < 0).any()) or op.seconds < 0:
            raise Violation(f"{op.kind} of {op.stage} needs less while it runs than after it, or less than nothing")
    _check_ends(case, old, new, started, retired)
    _check_one_owner(case, old, new, retired)
    _check_bytes(case, old, new, started)
    running = sum(len(devices) for devices in new.values())
    return f"{running:,} processes then, {len(started):,} started, {len(retired):,} ended; no device has two owners"


def _owners(plan: Plan) -> dict[str, tuple[Device, ...]]:
    return {stage.name: stage.ranks for stage in plan.owners()}


def _check_ends(
    case: Case,
    old: dict[str, tuple[Device, ...]],
    new: dict[str, tuple[Device, ...]],
    started: dict[tuple[str, int], int],
    retired: set[tuple[str, int]],
) -> None:
    world = case.world
    for stage, devices in new.items():
        had = set(old.get(stage, ()))
        for device in devices:
            if device not in had and (stage, world.number[device]) not in started:
                raise Violation(f"nothing starts {stage} on {device}")
    for stage, devices in old.items():
        stays = set(new.get(stage, ()))
        for device in devices:
            number = world.number[device]
            if (stage, number) in retired and device in stays:
                raise Violation(f"{stage} is retired on {device}, where the new plan has it")
            if (stage, number) not in retired and device not in stays and world.alive[number]:
                raise Violation(f"nothing ends {stage} on {device}: the device keeps its old owner beside the new ones")


def _check_one_owner(
    case: Case, old: dict[str, tuple[Device, ...]], new: dict[str, tuple[Device, ...]], retired: set[tuple[str, int]]
) -> None:
    """In asynchronous mode generation runs at the same time as everything else."""
    for plan, owners in ((case.old_plan, old), (case.new_plan, new)):
        if plan.workload.mode != "async":
            continue
        users: dict[Device, list[str]] = {}
        generating = {stage.name for stage in plan.stages if stage.kind == "generate"}
        for name, devices in owners.items():
            for device in devices:
                users.setdefault(device, []).append(name)
        for stage in plan.stages:  # generation in processes of others runs beside them all the same
            if stage.kind == "generate" and stage.with_ is not None:
                for device in stage.ranks:
                    users.setdefault(device, []).append(stage.name)
        if plan is case.new_plan:  # processes that nothing ends run on
            staying = {name: set(devices) for name, devices in new.items()}
            for stage_name, devices in old.items():
                for device in devices:
                    number = case.world.number[device]
                    gone = (stage_name, number) in retired or device in staying.get(stage_name, set())
                    if not gone and case.world.alive[number]:
                        users.setdefault(device, []).append(stage_name)
        for device, names in users.items():
            if len(names) > 1 and generating & set(names):
                raise Violation(f"{device} has two owners at once: {' and '.join(names)}")


def _check_bytes(
    case: Case,
    old: dict[str, tuple[Device, ...]],
    new: dict[str, tuple[Device, ...]],
    started: dict[tuple[str, int], int],
) -> None:
    """What processes take is not less than contexts, communicators, and pools of engines that are awake."""
    world, promise = case.world, case.document.memory
    for what, plan, owners, said in (
        ("before", case.old_plan, old, promise.before),
        ("after", case.new_plan, new, promise.after),
    ):
        least = np.zeros(world.num_devices, dtype=np.int64)
        for stage in plan.owners():
            pools, staying = _pools(plan, stage), set(new.get(stage.name, ()))
            for device in owners[stage.name]:
                number = world.number[device]
                # An engine that is started anew was drained before: its old pool is no more.
                stays = what == "after" or (device in staying and (stage.name, number) not in started)
                least[number] += _PROCESS + (pools.get(device, 0) if stays else 0)
        short = np.flatnonzero((said < least) & world.alive)
        if len(short):
            at = int(short[0])
            name, need = world.devices[at], int(least[at])
            raise Violation(f"processes on {name} take {need:,} bytes {what} and {int(said[at]):,} are counted")
    needs: dict[tuple[str, str], dict[Device, tuple[int, int]]] = {}
    for op in case.document.lifecycle:
        if op.kind not in ("engine-start", "spawn"):
            continue
        key = (op.stage, op.kind)
        if key not in needs:
            needs[key] = _needs(case.new_plan, case.new_plan.stage(op.stage), engine=op.kind == "engine-start")
        for at, device in enumerate(world.devices[d] for d in op.devices.tolist()):
            running, after = needs[key][device]
            if int(op.running_bytes[at]) < running or int(op.after_bytes[at]) < after:
                text = f"needs {running:,} bytes, {after:,} of them to stay"
                raise Violation(f"{op.kind} of {op.stage} on {device} {text}")


def _needs(plan: Plan, stage: Stage, *, engine: bool) -> dict[Device, tuple[int, int]]:
    """(bytes while it starts, bytes then) of a process on each device of ``stage``."""
    pools = _pools(plan, stage)
    more: tuple[int, ...] = (0,) * len(stage.ranks)
    if engine:
        more = (engine_running_bytes if stage.kind == "generate" else resident_state_bytes)(plan, stage)
    return {
        device: (_PROCESS + size, _PROCESS + pools.get(device, 0))
        for device, size in zip(stage.ranks, more, strict=True)
    }


def _pools(plan: Plan, stage: Stage) -> dict[Device, int]:
    """KV pools of engines that are awake at the boundary."""
    if stage.kind != "generate" or plan.workload.mode != "async" or stage.idle != "resident":
        return {}
    running, weights = engine_running_bytes(plan, stage), resident_state_bytes(plan, stage)
    return {device: all_ - own for device, all_, own in zip(stage.ranks, running, weights, strict=True)}
