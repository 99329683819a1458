"""timeline: when the coarse operations of a transition run, and how near that is to the best.

Drain, engine starts, spawns, communicators, the transfer, verify and commit, resume are intervals. Operations that set
something up on a device follow each other there; memory of a device is a reservoir that running and started processes
and arriving storages fill; an operation waits for those named in ``after``. What runs beside training has a timeline of
its own before the boundary.

A list schedule (release before acquire; generation, inference, training) comes first. Where it meets the lower bound it
is optimal; otherwise it is CP-SAT's hint, with one worker and a deterministic limit, and the better of the two is kept.
Devices on which the same happens are solved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nereus.ir.layout import IntArray
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.memory import MemoryPlan
from nereus.passes.timeline_problem import (
    EXCLUSIVE,
    TICKS,
    CoarseOp,
    CoarseProblem,
    TimelineOptions,
    held_on_devices,
    limits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """``start_s`` per operation: from the boundary on, or (background) from the beginning of the preparation.
    ``stop_s``: boundary to resume. ``bound_s``: no order of these operations is shorter; ``list_s``: the list
    schedule's; ``serial_s``: one class of operations after the other."""

    ops: tuple[CoarseOp, ...]
    start_s: tuple[float, ...]
    stop_s: float
    background_s: float
    bound_s: float
    list_s: float
    serial_s: float
    solver: str  # "list": the list schedule meets the bound, or was not improved on; "cp-sat"

    @property
    def gap(self) -> float:
        """How far ``stop_s`` may be above the best, relative."""
        return self.stop_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0


def coarse_ops(
    life: Lifecycle,
    memory: MemoryPlan,
    *,
    mode: str,
    drain_s: float,
    transfer_s: float,
    commit_s: float,
    kind_of_stage: dict[str, str],
) -> tuple[CoarseOp, ...]:
    """Operations of a transition. ``kind_of_stage``: generate, infer, train ... of every new stage.

    Byte one waits for every process and engine, since all agree on the digest first. Communicators of a stage need its
    processes only; in reversible mode they are set up beside the transfer (should that fail, the old plan is whole), in
    tight mode before it, since a release cannot be taken back.
    """
    num_devices = len(life.before_bytes)
    ops: list[CoarseOp] = []
    drained: set[int] = set()
    if drain_s > 0:
        changed = {op.stage for op in life.ops if op.kind in ("engine-start", "retire")}
        drained = {d for op in life.ops if op.stage in changed for d in op.devices}
        ops.append(CoarseOp(kind="drain", stage="", devices=tuple(sorted(drained)), seconds=drain_s))
    order = {"generate": 0, "infer": 1, "logprob": 1}
    numbers: dict[str, list[int]] = {}
    for kind in EXCLUSIVE:
        for op in life.ops:
            if op.kind != kind:
                continue
            after = [0] if not op.background and drained & set(op.devices) else []
            if kind == "build-groups":
                spawned = numbers.get("spawn", [])
                after += [n for n in spawned if ops[n].stage == op.stage and not ops[n].background]
            numbers.setdefault(kind, []).append(len(ops))
            ops.append(
                CoarseOp(
                    kind=kind,
                    stage=op.stage,
                    devices=op.devices,
                    seconds=op.seconds,
                    running_bytes=op.running_bytes,
                    after_bytes=op.after_bytes,
                    after=tuple(after),
                    rank=order.get(kind_of_stage.get(op.stage, ""), 2),
                    background=op.background,
                    source=op,
                )
            )
    begin = [n for n, op in enumerate(ops) if not op.background]
    before_transfer = [n for n in begin if mode == "tight" or ops[n].kind != "build-groups"]
    arriving = (memory.state.new[:num_devices] if mode != "tight" else 0) + memory.staging
    transfer = len(ops)
    ops.append(
        CoarseOp(
            kind="transfer",
            stage="",
            devices=tuple(range(num_devices)),
            seconds=transfer_s,
            running_bytes=tuple(arriving.tolist()),
            after_bytes=tuple(arriving.tolist()),
            after=tuple(before_transfer),
            rank=3,
        )
    )
    ops.append(CoarseOp(kind="commit", stage="", devices=(), seconds=commit_s, after=(*begin, transfer), rank=4))
    ops.append(CoarseOp(kind="resume", stage="", devices=(), seconds=0.0, after=(transfer + 1,), rank=5))
    return tuple(ops)


def schedule_timeline(
    ops: Sequence[CoarseOp], base: IntArray, capacity: IntArray, options: TimelineOptions | None = None
) -> Timeline:
    """``base``: bytes of each device (or more spaces) that lie there throughout; ``capacity``: that it has. Memory
    that even one operation after the other exceeds is not this pass's to judge: such devices are not limited."""
    chosen = options or TimelineOptions()
    merged, member = _merge_alike(ops, base, capacity)
    front = [n for n, op in enumerate(merged) if not op.background]
    back = [n for n, op in enumerate(merged) if op.background]
    start = [0] * len(merged)
    limited = False
    stops, bounds, lists, solver = [0, 0], [0, 0], [0, 0], "list"
    for side, numbers in enumerate((front, back)):
        if not numbers:
            continue
        problem = CoarseProblem(merged, numbers, base, capacity)
        limited |= bool(problem.limits)
        found, fits = problem.list_schedule()
        bound = problem.lower_bound()
        lists[side] = problem.makespan(found)
        better = (not fits) or lists[side] > bound
        if chosen.solve and side == 0 and better and len(numbers) <= chosen.max_ops:
            solved, solved_bound = problem.solve(found if fits else None, bound, chosen)
            bound = max(bound, solved_bound)
            if solved is not None and (not fits or problem.makespan(solved) < lists[side]):
                found, solver = solved, "cp-sat"
                lists[side] = max(lists[side], problem.makespan(solved))
        stops[side], bounds[side] = problem.makespan(found), min(bound, problem.makespan(found))
        for number, at in zip(numbers, found, strict=True):
            start[number] = at
    exact = _exact(ops, [start[member[n]] for n in range(len(ops))], limited)
    stop, before = (
        max((at + op.seconds for at, op in zip(exact, ops, strict=True) if op.background == side), default=0.0)
        for side in (False, True)
    )
    return Timeline(
        ops=tuple(ops),
        start_s=tuple(exact),
        stop_s=stop,
        background_s=before,
        bound_s=stop if bounds[0] == stops[0] else min(stop, bounds[0] / TICKS),
        list_s=stop if lists[0] == stops[0] else max(stop, lists[0] / TICKS),
        serial_s=_serial_s(ops),
        solver=solver,
    )


def _exact(ops: Sequence[CoarseOp], ticks: Sequence[int], limited: bool) -> list[float]:
    """Start times without the rounding to ticks: the same order, nothing later. ``limited``: memory holds something
    back, so nothing earlier either."""
    start = [0.0] * len(ops)
    idle: dict[tuple[int, bool], float] = {}
    ends = [at + round(op.seconds * TICKS) for at, op in zip(ticks, ops, strict=True)]
    for number in sorted(range(len(ops)), key=lambda n: (ticks[n], ends[n], n)):
        op = ops[number]
        at = max((start[a] + ops[a].seconds for a in op.after if ops[a].background == op.background), default=0.0)
        places = [(device, op.background) for device in op.devices] if op.kind in EXCLUSIVE else []
        at = max([at, *(idle.get(place, 0.0) for place in places)])
        start[number] = max(at, ticks[number] / TICKS) if limited else at
        idle.update(dict.fromkeys(places, start[number] + op.seconds))
    return start


def _serial_s(ops: Sequence[CoarseOp]) -> float:
    """Drain, then set-up, communicators, transfer and commit, as a sum of the longest chain of each."""
    total = 0.0
    for kinds in (("drain",), ("engine-start", "spawn"), ("build-groups",), ("transfer",), ("commit",)):
        longest = 0.0
        for kind in kinds:
            per_device: dict[int, float] = {}
            for op in ops:
                if op.kind == kind and not op.background:
                    for device in op.devices or (-1,):
                        per_device[device] = per_device.get(device, 0.0) + op.seconds
            longest = max(longest, max(per_device.values(), default=0.0))
        total += longest
    return total


def _merge_alike(ops: Sequence[CoarseOp], base: IntArray, capacity: IntArray) -> tuple[list[CoarseOp], list[int]]:
    """Replicas of one operation on devices to which the same happens, as one on the first's devices; and which of the
    merged operations each is."""

    def shape(op: CoarseOp) -> tuple[object, ...]:
        return (op.kind, op.stage, op.seconds, op.background, op.rank)

    # Devices with one number are alike: the same happens, and memory is no limit, or the same limit.
    numbers: dict[object, int] = {}
    kind_of: dict[int, int] = {}
    shapes = [numbers.setdefault(shape(op), len(numbers)) for op in ops]
    for device, held in held_on_devices(ops).items():
        room = int(capacity[device] - base[device])
        happens = sorted(shapes[h.number] for h in held)
        sides = ([h for h in held if ops[h.number].background == side] for side in (False, True))
        limited = any(limits(side, room) for side in sides)
        sizes = sorted((shapes[h.number], h.running, h.rest) for h in held) if limited else []
        kind_of[device] = numbers.setdefault((room if limited else 0, *happens, *sizes), len(numbers))
    index: dict[tuple[object, ...], int] = {}
    first_with: dict[int, int] = {}
    merged: list[CoarseOp] = []
    member: list[int] = []
    for number, op in enumerate(ops):
        key = (*shape(op), tuple(sorted(kind_of[d] for d in op.devices)))
        at = index.setdefault(key, len(merged)) if op.kind in ("engine-start", "spawn") else len(merged)
        member.append(at)
        if at == len(merged):
            merged.append(op)
            first_with[at] = number
    kept = {device for op in merged if op.kind in ("engine-start", "spawn") for device in op.devices}
    touched = {device for op in ops if op.kind in ("engine-start", "spawn") for device in op.devices}
    result = []
    for op in merged:
        keep = [i for i, d in enumerate(op.devices) if d in kept or d not in touched]
        result.append(
            replace(
                op,
                devices=tuple(op.devices[i] for i in keep),
                running_bytes=tuple(op.running_bytes[i] for i in keep) if op.running_bytes else (),
                after_bytes=tuple(op.after_bytes[i] for i in keep) if op.after_bytes else (),
                after=tuple(sorted({member[n] for n in op.after})),
            )
        )
    return result, member
