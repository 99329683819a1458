"""The coarse schedule as a problem: what excludes what, what fills which device, a list schedule, a bound, CP-SAT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.lifecycle import LifecycleOp

#: What sets something up on a device, one at a time.
EXCLUSIVE = ("engine-start", "spawn", "build-groups")
#: Ticks of the solver per second.
TICKS = 1_000_000


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
    source: LifecycleOp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """``solve``: whether CP-SAT may improve the list schedule; ``max_ops``: above it the list schedule stands."""

    solve: bool = True
    deterministic_s: float = 0.5
    max_ops: int = 400


class Held(NamedTuple):
    """What operation ``number`` holds on one device while it runs and afterwards, bytes."""

    number: int
    running: int
    rest: int


def held_on_devices(ops: Sequence[CoarseOp]) -> dict[int, list[Held]]:
    found: dict[int, list[Held]] = {}
    for number, op in enumerate(ops):
        nothing = (0,) * len(op.devices)
        sizes = zip(op.running_bytes or nothing, op.after_bytes or nothing, strict=True)
        for device, (running, rest) in zip(op.devices, sizes, strict=True):
            found.setdefault(device, []).append(Held(number, running, rest))
    return found


def limits(held: Sequence[Held], room: int) -> bool:
    """Whether memory of a device with ``room`` bytes restricts when these operations run: they exceed it together, and
    neither one alone nor all at rest do (which no order would help against)."""
    if sum(max(h.running, h.rest) for h in held) <= room:
        return False
    return sum(h.rest for h in held) <= room and all(h.running <= room for h in held)


class CoarseProblem:
    """One side of the boundary, in ticks. Starts are lists in the order of ``numbers``."""

    def __init__(self, ops: Sequence[CoarseOp], numbers: Sequence[int], base: IntArray, capacity: IntArray) -> None:
        self.ops = [ops[n] for n in numbers]
        position = {n: at for at, n in enumerate(numbers)}
        self.after = [[position[a] for a in op.after if a in position] for op in self.ops]
        self.ticks = [round(op.seconds * TICKS) for op in self.ops]
        on_device = held_on_devices(self.ops)
        #: Sets of operations of which one runs at a time, each set once.
        excluding = (
            tuple(h.number for h in held if self.ops[h.number].kind in EXCLUSIVE) for held in on_device.values()
        )
        self.exclusive = sorted({group for group in excluding if len(group) > 1})
        #: (room, ((operation, running, after), ...)) of devices that could be too full, each set once.
        self.limits = sorted(
            {
                (int(room), tuple((h.number, h.running, h.rest) for h in held if h.running or h.rest))
                for (device, held) in on_device.items()
                for room in [capacity[device] - base[device]]
                if limits(held, int(room))
            }
        )
        self.groups_of: list[list[tuple[int, ...]]] = [[] for _ in self.ops]
        for group in self.exclusive:
            for at in group:
                self.groups_of[at].append(group)
        self.limits_of: list[list[tuple[int, tuple[tuple[int, int, int], ...]]]] = [[] for _ in self.ops]
        for limit in self.limits:
            for at, _, _ in limit[1]:
                self.limits_of[at].append(limit)

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
        waiting = {n: sum(1 for _ in self.after[n]) for n in range(count)}
        followers: dict[int, list[int]] = {}
        for n, before in enumerate(self.after):
            for a in before:
                followers.setdefault(a, []).append(n)
        ready = {n for n in range(count) if not waiting[n]}
        known: dict[int, tuple[tuple[object, ...], int, bool]] = {}  # of those that nothing placed since touches
        sharing = self._sharing()
        placed: dict[int, list[int]] = {}  # by group of those that exclude each other
        while ready:
            for n in ready - known.keys():
                moment, fit = self._first_moment(n, start, placed)
                first = (-alone[n], moment) if roomy_first else (moment, self.ops[n].rank)
                known[n] = ((not fit, *first, -self.ticks[n], n), moment, fit)
            chosen = min(ready, key=lambda n: known[n][0])
            _, start[chosen], fit = known[chosen]
            fits &= fit
            ready.remove(chosen)
            for group in self.groups_of[chosen]:
                placed.setdefault(id(group), []).append(chosen)
            for n in (chosen, *sharing[chosen]):
                known.pop(n, None)
            for n in followers.get(chosen, ()):
                waiting[n] -= 1
                if not waiting[n]:
                    ready.add(n)
        return start, fits

    def _sharing(self) -> list[set[int]]:
        """Per operation: those with which it shares a device or memory."""
        found: list[set[int]] = [set() for _ in self.ops]
        for group in (*self.exclusive, *([n for n, _, _ in rows] for _, rows in self.limits)):
            for n in group:
                found[n].update(group)
        return found

    def _first_moment(self, number: int, start: Sequence[int], placed: Mapping[int, Sequence[int]]) -> tuple[int, bool]:
        size = self.ticks[number]
        least = max((start[a] + self.ticks[a] for a in self.after[number]), default=0)
        ends = {start[n] + self.ticks[n] for n in range(len(start)) if start[n] >= 0}
        for moment in sorted({least, *(e for e in ends if e > least)}):
            if self._fits(number, moment, size, start, placed):
                return moment, True
        return max(least, max(ends, default=0)), False

    def _fits(
        self, number: int, moment: int, size: int, start: Sequence[int], placed: Mapping[int, Sequence[int]]
    ) -> bool:
        for group in self.groups_of[number]:
            for n in placed.get(id(group), ()):
                if start[n] < moment + size and moment < start[n] + self.ticks[n]:
                    return False
        for room, rows in self.limits_of[number]:
            there = [(moment if n == number else start[n], n, run, rest) for n, run, rest in rows]
            there = [entry for entry in there if entry[0] >= 0]
            for at in {begin for begin, *_ in there} | {begin + self.ticks[n] for begin, n, *_ in there}:
                held = 0
                for begin, n, run, rest in there:
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
        # Starts are sums of durations, so the solver may count in their common divisor.
        unit = max(gcd(*self.ticks), 1)
        ticks = [size // unit for size in self.ticks]
        horizon = (self.makespan(hint) if hint is not None else max(sum(self.ticks), bound)) // unit
        starts = [model.new_int_var(0, horizon, "") for _ in self.ops]
        stop = model.new_int_var(-(-bound // unit), horizon, "")
        runs = []
        for at, size in enumerate(ticks):
            runs.append(model.new_fixed_size_interval_var(starts[at], size, ""))
            model.add(stop >= starts[at] + size)
            for before in self.after[at]:
                model.add(starts[at] >= starts[before] + ticks[before])
            if hint is not None:
                model.add_hint(starts[at], hint[at] // unit)
        for group in self.exclusive:
            model.add_no_overlap([runs[at] for at in group])
        for room, rows in self.limits:
            intervals, demands = [], []
            for at, running, rest in rows:
                if running and ticks[at]:
                    intervals.append(runs[at])
                    demands.append(running)
                if rest:
                    left = model.new_int_var(0, horizon + 1, "")
                    end = starts[at] + ticks[at]
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
        best = int(np.ceil(solver.best_objective_bound - 1e-6))
        return [int(solver.value(at)) * unit for at in starts], best * unit
