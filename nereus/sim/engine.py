"""The event simulator: runs a ``Job`` under given timing.

Time moves from one end of an operation to the next. Transfers share ports max-min fairly, anew after every change;
devices and memory are granted in order of arrival. Equal jobs, timings and seeds give equal outcomes.

Cost: O((ops + edges) log ops) beside the sharing. That is O(c log n) per start or end of a transfer for small jobs, c
being the transfers that share ports with it, directly or through others; for large ones it is O(a log a) per refresh
for a transfers under way, and ``quantum_s`` bounds the number of refreshes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from nereus.sim.job import PORTS_PER_OP, FloatArray, IntArray, Job
from nereus.sim.outcome import DEVICE, MEMORY, OPERATION, Deadlock, Outcome, Overflow, Wait, find_cycle
from nereus.sim.sharing import FewFluid, Fluid, ManyFluid
from nereus.sim.timing import EXACT, Timing

#: Up to so many transfers or ports, arrays cost more than they save: few transfers run at once.
FEW_TRANSFERS, FEW_PORTS = 160, 128


def simulate(job: Job, timing: Timing = EXACT, *, quantum_s: float = 1e-9) -> Outcome:
    """Run ``job`` to its end, or until nothing runs any more.

    ``quantum_s``: changes of who transfers that are at most so far apart take effect together, at the end of the
    quantum (who joins waits, what a leaver had lies idle): an operation is at most two quanta slower than in the limit.
    Raises ValueError for a malformed job.
    """
    check_job(job)
    return _Run(job, timing, quantum_s).run()


def coarse_quantum_s(job: Job, refreshes: int = 2000) -> float:
    """A quantum that keeps the number of refreshes of a large job about so low: a share of what its busiest port takes;
    1 ns for small jobs."""
    moving = job.num_bytes > 0
    if int(moving.sum()) <= refreshes:
        return 1e-9
    load = np.zeros(len(job.resources.port_bytes_per_s))
    ports = job.ports[moving]
    weights = np.ones(ports.shape) if job.weights is None else job.weights[moving]
    used = ports >= 0
    np.add.at(load, ports[used], (weights * job.num_bytes[moving][:, None])[used])
    return max(1e-9, float((load / job.resources.port_bytes_per_s).max()) / refreshes)


def check_job(job: Job) -> None:
    """Raises ValueError where columns do not fit each other or name what does not exist."""
    ops, resources = job.num_ops, job.resources
    columns = (job.name, job.num_bytes, job.space, job.acquired, job.released, job.takes, job.gives)
    if any(len(column) != ops for column in columns) or job.ports.shape != (ops, PORTS_PER_OP):
        raise ValueError("the columns of a job differ in length")
    if job.weights is not None and job.weights.shape != job.ports.shape:
        raise ValueError("weights belong to ports one by one")
    for what, values, limit in (
        ("port", job.ports, len(resources.port_bytes_per_s)),
        ("memory space", job.space, len(resources.space_base_bytes)),
        ("device", job.takes, resources.num_devices),
        ("device", job.gives, resources.num_devices),
    ):
        if values.size and (int(values.min()) < -1 or int(values.max()) >= limit):
            raise ValueError(f"a job names a {what} that does not exist")
    if job.edges.size and (int(job.edges.min()) < 0 or int(job.edges.max()) >= ops):
        raise ValueError("an edge names an operation that does not exist")
    if bool(((job.space < 0) & ((job.acquired != 0) | (job.released != 0))).any()):
        raise ValueError("memory is acquired or released in no space")
    if bool((job.fixed_s < 0).any()):
        raise ValueError("negative seconds in a job")
    if any(bool((values < 0).any()) for values in (job.num_bytes, job.acquired, job.released)):
        raise ValueError("negative bytes in a job")
    if not bool((resources.port_bytes_per_s > 0).all()):
        raise ValueError("a port passes nothing")


@dataclass(slots=True)
class _Memory:
    base: list[int]
    capacity: list[int]
    used: list[int] = field(init=False)
    peak: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.used, self.peak = list(self.base), list(self.base)


class _Run:
    def __init__(self, job: Job, timing: Timing, quantum_s: float) -> None:
        self.job, self.quantum_s = job, quantum_s
        fixed, work = timing.draw(job)
        self.fixed: list[float] = fixed.tolist()
        self.moves: list[bool] = (work > 0).tolist()
        few = int((work > 0).sum()) <= FEW_TRANSFERS or len(job.resources.port_bytes_per_s) <= FEW_PORTS
        kind = FewFluid if few else ManyFluid
        weights = job.weights if job.weights is not None else np.ones(job.ports.shape)
        self.fluid: Fluid = kind(job.ports, weights, job.resources.port_bytes_per_s, work)
        self.after, self.open = _successors(job.edges, job.num_ops)
        self.takes, self.gives = job.takes.tolist(), job.gives.tolist()
        self.space, self.acquired, self.released = job.space.tolist(), job.acquired.tolist(), job.released.tolist()
        self.owned = set(job.resources.owned)
        self.for_device: dict[int, list[int]] = {}  # waiting, in order of arrival
        self.for_memory: dict[int, list[int]] = {}
        resources = job.resources
        self.memory = _Memory(resources.space_base_bytes.tolist(), resources.space_capacity_bytes.tolist())
        self.overflows = [
            Overflow(op=-1, time_s=0.0, space=space, excess_bytes=used - self.memory.capacity[space])
            for space, used in enumerate(self.memory.base)
            if used > self.memory.capacity[space]
        ]
        nan = [float("nan")] * job.num_ops
        self.ready, self.start, self.finish = nan[:], nan[:], nan[:]
        self.ends: list[tuple[float, int]] = []  # of the fixed part
        self.num_refreshes = 0

    def run(self) -> Outcome:
        fluid, ends = self.fluid, self.ends
        inf = float("inf")
        refresh_at = inf
        now = 0.0
        self._arrive([op for op in range(self.job.num_ops) if not self.open[op]], now)
        while True:
            next_fixed = ends[0][0] if ends else inf
            next_flow = fluid.next_end()
            now = min(next_fixed, next_flow, refresh_at)
            if now == inf:
                break
            if now < next_fixed and now < next_flow:
                fluid.refresh(now)
                self.num_refreshes += 1
                refresh_at = inf
                continue
            done = []
            changed = False
            if next_flow <= now:
                done = fluid.pop_until(now)
                for op in done:
                    fluid.leave(op)
                changed = True
            while ends and ends[0][0] <= now:
                op = heapq.heappop(ends)[1]
                if self.moves[op]:
                    fluid.join(op, now)
                    changed = True
                else:
                    done.append(op)
            if changed and refresh_at == inf:
                refresh_at = now + self.quantum_s
            if done:
                done.sort()
                self._end(done, now)
        return self._outcome(now_or_last=max((f for f in self.finish if f == f), default=0.0))

    def _end(self, done: list[int], now: float) -> None:
        """Everything that ends now gives back what it had before anybody new gets it."""
        freed_devices, freed_spaces, ready = [], [], []
        for op in done:
            self.finish[op] = now
            if self.released[op]:
                self.memory.used[self.space[op]] -= self.released[op]
                freed_spaces.append(self.space[op])
            device = self.gives[op]
            if device >= 0:
                if device not in self.owned:
                    raise ValueError(f"{self.job.name[op]} gives device {device}, which nobody owns")
                self.owned.remove(device)
                freed_devices.append(device)
            for later in self.after[op]:
                self.open[later] -= 1
                if not self.open[later]:
                    ready.append(later)
        for space in dict.fromkeys(freed_spaces):
            waiting = self.for_memory.pop(space, [])
            for op in waiting:
                self._acquire(op, now)
        for device in freed_devices:
            waiting = self.for_device.get(device, [])
            if waiting:
                self._take(waiting.pop(0), now)
        ready.sort()
        self._arrive(ready, now)

    def _arrive(self, ops: list[int], now: float) -> None:
        for op in ops:
            self.ready[op] = now
            self._take(op, now)

    def _take(self, op: int, now: float) -> None:
        device = self.takes[op]
        if device >= 0:
            if device in self.owned:
                self.for_device.setdefault(device, []).append(op)
                return
            self.owned.add(device)
        self._acquire(op, now)

    def _acquire(self, op: int, now: float) -> None:
        wanted = self.acquired[op]
        if wanted:
            space, memory = self.space[op], self.memory
            excess = memory.used[space] + wanted - memory.capacity[space]
            if excess > 0:
                if self.job.blocking:
                    # Later ones that fit go first: an allocator serves whom it can.
                    self.for_memory.setdefault(space, []).append(op)
                    return
                self.overflows.append(Overflow(op=op, time_s=now, space=space, excess_bytes=excess))
            memory.used[space] += wanted
            memory.peak[space] = max(memory.peak[space], memory.used[space])
        self.start[op] = now
        heapq.heappush(self.ends, (now + self.fixed[op], op))

    def _outcome(self, now_or_last: float) -> Outcome:
        unfinished = [op for op, at in enumerate(self.finish) if at != at]
        return Outcome(
            ready_s=np.array(self.ready),
            start_s=np.array(self.start),
            finish_s=np.array(self.finish),
            peak_bytes=np.array(self.memory.peak, dtype=np.int64),
            overflows=tuple(self.overflows),
            deadlock=self._deadlock(unfinished, now_or_last) if unfinished else None,
            num_refreshes=self.num_refreshes,
        )

    def _deadlock(self, unfinished: list[int], now: float) -> Deadlock:
        missing = set(unfinished)
        givers: dict[int, list[int]] = {}
        releasers: dict[int, list[int]] = {}
        for op in unfinished:
            if self.gives[op] >= 0:
                givers.setdefault(self.gives[op], []).append(op)
            if self.released[op]:
                releasers.setdefault(self.space[op], []).append(op)
        before: dict[int, list[int]] = {}
        for first, later in self.job.edges.tolist():
            if first in missing and later in missing:
                before.setdefault(later, []).append(first)
        waits = []
        for op in unfinished:
            if op in before:
                waits.append(Wait(op=op, kind=OPERATION, what=before[op][0], on=tuple(before[op])))
                continue
            device = self.takes[op]
            at_device = device >= 0 and op in self.for_device.get(device, ())
            kind, what = (DEVICE, device) if at_device else (MEMORY, self.space[op])
            found = (givers if at_device else releasers).get(what, [])
            behind = self._behind(op) if found else set()  # they cannot help, for they wait for this one
            waits.append(Wait(op=op, kind=kind, what=what, on=tuple(other for other in found if other not in behind)))
        return Deadlock(time_s=now, waits=tuple(waits), cycle=find_cycle(tuple(waits)))

    def _behind(self, op: int) -> set[int]:
        """``op`` and all that comes after it."""
        found, stack = {op}, [op]
        while stack:
            for later in self.after[stack.pop()]:
                if later not in found:
                    found.add(later)
                    stack.append(later)
        return found


def _successors(edges: IntArray, num_ops: int) -> tuple[list[list[int]], list[int]]:
    """Per operation: what comes after it, and how many come before it."""
    after: list[list[int]] = [[] for _ in range(num_ops)]
    for first, later in edges.tolist():
        after[first].append(later)
    counts: FloatArray | IntArray = (
        np.bincount(edges[:, 1], minlength=num_ops) if len(edges) else np.zeros(num_ops, int)
    )
    return after, counts.tolist()
