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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.memory import MemoryPlan

#: What sets something up on a device, one at a time.
EXCLUSIVE = ("engine-start", "spawn", "build-groups")
#: Ticks of the solver per second.
TICKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseOp:
    """``running_bytes`` / ``after_bytes``: per device, while it runs and from its end until the commit. ``after``:
    numbers of operations that end before it starts. ``rank``: smaller goes first among equals."""

    kind: str
    stage: str
    devices: tuple[int, ...]
    seconds: float
    running_bytes: tuple[int, ...] = ()
    after_bytes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    rank: int = 0
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """``solve``: whether CP-SAT may improve the list schedule; ``max_ops``: above it the list schedule stands."""

    solve: bool = True
    deterministic_s: float = 2.0
    max_ops: int = 400


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
    stops, bounds, lists, solver = [0, 0], [0, 0], [0, 0], "list"
    for side, numbers in enumerate((front, back)):
        if not numbers:
            continue
        problem = _Problem(merged, numbers, base, capacity)
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
    return Timeline(
        ops=tuple(ops),
        start_s=tuple(start[member[n]] / TICKS for n in range(len(ops))),
        stop_s=stops[0] / TICKS,
        background_s=stops[1] / TICKS,
        bound_s=bounds[0] / TICKS,
        list_s=lists[0] / TICKS,
        serial_s=_serial_s(ops),
        solver=solver,
    )


def check_timeline(timeline: Timeline, base: IntArray, capacity: IntArray) -> str | None:
    """What is wrong with a timeline, or None; worked out from its start times alone."""
    ops, start = timeline.ops, timeline.start_s
    end = [at + op.seconds for at, op in zip(start, ops, strict=True)]
    slack = 2 / TICKS
    for number, op in enumerate(ops):
        for before in op.after:
            if ops[before].background == op.background and start[number] < end[before] - slack:
                return f"{op.kind} of {op.stage} starts before {ops[before].kind} of {ops[before].stage} ends"
    for background in (False, True):
        per_device: dict[int, list[int]] = {}
        for number, op in enumerate(ops):
            if op.background == background:
                for device in op.devices:
                    per_device.setdefault(device, []).append(number)
        for device, numbers in per_device.items():
            setup = sorted((start[n], end[n], n) for n in numbers if ops[n].kind in EXCLUSIVE)
            for (_, first_end, _), (second, _, n) in itertools.pairwise(setup):
                if second < first_end - slack:
                    return f"{ops[n].kind} of {ops[n].stage} overlaps another on device {device}"
            if background or _always_over(ops, numbers, device, base, capacity):
                continue
            for moment in sorted({start[n] for n in numbers} | {end[n] for n in numbers}):
                held = int(base[device])
                for n in numbers:
                    at = ops[n].devices.index(device)
                    if ops[n].running_bytes and start[n] <= moment + slack / 4 and moment < end[n] - slack:
                        held += ops[n].running_bytes[at]
                    elif ops[n].after_bytes and end[n] <= moment + slack:
                        held += ops[n].after_bytes[at]
                if held > capacity[device]:
                    return f"device {device} holds {held:,} of {int(capacity[device]):,} bytes at {moment:.3f} s"
    if timeline.stop_s < max((end[n] for n, op in enumerate(ops) if not op.background), default=0.0) - slack:
        return "the stop ends before its last operation"
    return None


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


def _always_over(
    ops: Sequence[CoarseOp], numbers: Sequence[int], device: int, base: IntArray, capacity: IntArray
) -> bool:
    """Whether one operation alone, or all of them at rest, exceed the device."""
    rest = alone = 0
    for n in numbers:
        at = ops[n].devices.index(device)
        rest += ops[n].after_bytes[at] if ops[n].after_bytes else 0
        alone = max(alone, ops[n].running_bytes[at] if ops[n].running_bytes else 0)
    return int(base[device]) + max(rest, alone) > int(capacity[device])


def _merge_alike(ops: Sequence[CoarseOp], base: IntArray, capacity: IntArray) -> tuple[list[CoarseOp], list[int]]:
    """Replicas of one operation on devices to which the same happens, as one on the first's devices; and which of the
    merged operations each is."""
    on_device: dict[int, list[tuple[object, ...]]] = {}

    def shape(op: CoarseOp) -> tuple[object, ...]:
        return (op.kind, op.stage, op.seconds, op.background, op.rank)

    for op in ops:
        for at, device in enumerate(op.devices):
            sizes = (op.running_bytes[at] if op.running_bytes else 0, op.after_bytes[at] if op.after_bytes else 0)
            on_device.setdefault(device, []).append((*shape(op), sizes))
    kind_of: dict[int, tuple[object, ...]] = {
        device: (int(capacity[device] - base[device]), *sorted(map(repr, found))) for device, found in on_device.items()
    }
    index: dict[tuple[object, ...], int] = {}
    first_with: dict[int, int] = {}
    merged: list[CoarseOp] = []
    member: list[int] = []
    for number, op in enumerate(ops):
        key = (*shape(op), tuple(sorted(map(repr, (kind_of[d] for d in op.devices)))))
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


class _Problem:
    """One side of the boundary, in ticks. Starts are lists in the order of ``numbers``."""

    def __init__(self, ops: Sequence[CoarseOp], numbers: Sequence[int], base: IntArray, capacity: IntArray) -> None:
        self.ops = [ops[n] for n in numbers]
        position = {n: at for at, n in enumerate(numbers)}
        self.after = [[position[a] for a in op.after if a in position] for op in self.ops]
        self.ticks = [round(op.seconds * TICKS) for op in self.ops]
        on_device: dict[int, list[int]] = {}
        for at, op in enumerate(self.ops):
            for device in op.devices:
                on_device.setdefault(device, []).append(at)
        #: Sets of operations of which one runs at a time, each set once.
        self.exclusive = sorted(
            {
                tuple(at for at in found if self.ops[at].kind in EXCLUSIVE)
                for found in on_device.values()
                if sum(self.ops[at].kind in EXCLUSIVE for at in found) > 1
            }
        )
        #: (room, ((operation, running, after), ...)) of devices that could be too full, each set once.
        limits: set[tuple[int, tuple[tuple[int, int, int], ...]]] = set()
        for device, found in on_device.items():
            rows = []
            for at in found:
                op = self.ops[at]
                place = op.devices.index(device)
                running = op.running_bytes[place] if op.running_bytes else 0
                rest = op.after_bytes[place] if op.after_bytes else 0
                if running or rest:
                    rows.append((at, running, rest))
            room = int(capacity[device] - base[device])
            if sum(max(running, rest) for _, running, rest in rows) > room and not _always_over(
                self.ops, found, device, base, capacity
            ):
                limits.add((room, tuple(rows)))
        self.limits = sorted(limits)

    def makespan(self, start: Sequence[int]) -> int:
        return max((at + size for at, size in zip(start, self.ticks, strict=True)), default=0)

    def lower_bound(self) -> int:
        """Longest chain, and for every exclusive set the work on it between the shortest head and tail."""
        count = len(self.ops)
        head, tail = [0] * count, [0] * count
        order = sorted(range(count), key=lambda at: (len(self._ancestors(at)), at))
        for at in order:
            head[at] = max((head[a] + self.ticks[a] for a in self.after[at]), default=0)
        for at in reversed(order):
            for a in self.after[at]:
                tail[a] = max(tail[a], tail[at] + self.ticks[at])
        best = max((head[at] + self.ticks[at] + tail[at] for at in range(count)), default=0)
        for group in self.exclusive:
            work = sum(self.ticks[at] for at in group)
            best = max(best, min(head[at] for at in group) + work + min(tail[at] for at in group))
        return best

    def _ancestors(self, number: int) -> set[int]:
        found: set[int] = set()
        stack = [number]
        while stack:
            for before in self.after[stack.pop()]:
                if before not in found:
                    found.add(before)
                    stack.append(before)
        return found

    def list_schedule(self) -> tuple[list[int], bool]:
        """The shorter of two lists that fit; whether one does (else the last, with its overflow).

        Among operations whose predecessors are placed the one that can start first, then by rank, longest first; or
        the one that needs most room for itself first, since what stays of the others would take it.
        """
        best: list[int] | None = None
        start: list[int] = []
        for roomy_first in (False, True) if self.limits else (False,):
            start, fits = self._list(roomy_first)
            if fits and (best is None or self.makespan(start) < self.makespan(best)):
                best = start
        return (best, True) if best is not None else (start, False)

    def _list(self, roomy_first: bool) -> tuple[list[int], bool]:
        count = len(self.ops)
        start = [-1] * count
        alone = [
            max(((r - s) for r, s in zip(op.running_bytes, op.after_bytes, strict=False)), default=0) for op in self.ops
        ]
        fits = True
        while any(at < 0 for at in start):
            ready = [n for n in range(count) if start[n] < 0 and all(start[a] >= 0 for a in self.after[n])]
            choices = []
            for n in ready:
                moment, fit = self._first_moment(n, start)
                first = (-alone[n], moment) if roomy_first else (moment, self.ops[n].rank)
                choices.append(((not fit, *first, -self.ticks[n], n), moment, fit))
            key, moment, fit = min(choices)
            start[key[-1]] = moment
            fits &= fit
        return start, fits

    def _first_moment(self, number: int, start: Sequence[int]) -> tuple[int, bool]:
        size = self.ticks[number]
        least = max((start[a] + self.ticks[a] for a in self.after[number]), default=0)
        ends = {start[n] + self.ticks[n] for n in range(len(start)) if start[n] >= 0}
        for moment in sorted({least, *(e for e in ends if e > least)}):
            if self._fits(number, moment, size, start):
                return moment, True
        return max(least, max(ends, default=0)), False

    def _fits(self, number: int, moment: int, size: int, start: Sequence[int]) -> bool:
        for group in self.exclusive:
            if number in group and any(
                start[n] >= 0 and start[n] < moment + size and moment < start[n] + self.ticks[n] for n in group
            ):
                return False
        for room, rows in self.limits:
            if all(n != number for n, _, _ in rows):
                continue
            placed = [(moment if n == number else start[n], n, run, rest) for n, run, rest in rows]
            placed = [entry for entry in placed if entry[0] >= 0]
            for at in {begin for begin, *_ in placed} | {begin + self.ticks[n] for begin, n, *_ in placed}:
                held = 0
                for begin, n, run, rest in placed:
                    end = begin + self.ticks[n]
                    held += run if begin <= at < end else rest if end <= at else 0
                if held > room:
                    return False
        return True

    def solve(self, hint: Sequence[int] | None, bound: int, options: TimelineOptions) -> tuple[list[int] | None, int]:
        """CP-SAT's best start times (None where it finds none in its limit) and its bound. Without a hint that fits,
        nothing is known but that one operation after the other is the longest that makes sense."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        horizon = self.makespan(hint) if hint is not None else max(sum(self.ticks), bound)
        starts = [model.new_int_var(0, horizon, "") for _ in self.ops]
        stop = model.new_int_var(bound, horizon, "")
        runs = []
        for at, size in enumerate(self.ticks):
            runs.append(model.new_fixed_size_interval_var(starts[at], size, ""))
            model.add(stop >= starts[at] + size)
            for before in self.after[at]:
                model.add(starts[at] >= starts[before] + self.ticks[before])
            if hint is not None:
                model.add_hint(starts[at], hint[at])
        for group in self.exclusive:
            model.add_no_overlap([runs[at] for at in group])
        for room, rows in self.limits:
            intervals, demands = [], []
            for at, running, rest in rows:
                if running and self.ticks[at]:
                    intervals.append(runs[at])
                    demands.append(running)
                if rest:
                    left = model.new_int_var(0, horizon + 1, "")
                    end = starts[at] + self.ticks[at]
                    intervals.append(model.new_interval_var(end, left, horizon + 1, ""))
                    demands.append(rest)
            model.add_cumulative(intervals, demands, room)
        model.minimize(stop)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.max_deterministic_time = options.deterministic_s
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        return [int(solver.value(at)) for at in starts], int(np.ceil(solver.best_objective_bound - 1e-6))
