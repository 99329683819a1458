"""What a run of the simulator shows: when everything happened, how full memory was, and why it did not end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.sim.job import FloatArray, IntArray, Job

#: What an operation waits for.
OPERATION, DEVICE, MEMORY = "operation", "device", "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """``op`` acquired memory that was not there: ``space`` then held ``excess_bytes`` more than it can."""

    op: int
    time_s: float
    space: int
    excess_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``op`` waits for an operation, a device or a space, number ``what``; ``on``: unfinished operations that would end
    the wait (none: nobody ever does)."""

    op: int
    kind: str
    what: int
    on: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """Nothing runs and something is unfinished. ``cycle``: operations each of which waits for the next and the last for
    the first; empty where all waits end at something that nobody will ever give."""

    time_s: float
    waits: tuple[Wait, ...]
    cycle: tuple[int, ...]

    def describe(self, job: Job) -> str:
        by_op = {wait.op: wait for wait in self.waits}

        def say(op: int) -> str:
            wait = by_op[op]
            if wait.kind == OPERATION:
                return f"{job.name[op]} waits for {job.name[wait.what]}"
            return f"{job.name[op]} waits for {wait.kind} {wait.what}"

        shown = self.cycle or tuple(by_op)[:5]
        return f"nothing runs from {self.time_s:.6g} s on: " + "; ".join(say(op) for op in shown)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Per operation: ``ready_s`` (all before it had finished), ``start_s`` (it had its device and memory) and
    ``finish_s``; NaN where that never came. ``peak_bytes``: per space, base included."""

    ready_s: FloatArray
    start_s: FloatArray
    finish_s: FloatArray
    peak_bytes: IntArray
    overflows: tuple[Overflow, ...]
    deadlock: Deadlock | None
    num_refreshes: int  # how often ports were shared anew

    @property
    def finished(self) -> bool:
        return self.deadlock is None

    @property
    def safe(self) -> bool:
        return self.deadlock is None and not self.overflows

    @property
    def makespan_s(self) -> float:
        """When the last operation that finished did so; 0 where none did."""
        done = self.finish_s[~np.isnan(self.finish_s)]
        return float(done.max()) if len(done) else 0.0

    def trace(self, job: Job) -> list[tuple[str, float, float]]:
        """(operation, start, finish) in order of start."""
        started = np.flatnonzero(~np.isnan(self.start_s))
        order = started[np.lexsort((started, self.start_s[started]))]
        return [(job.name[op], float(self.start_s[op]), float(self.finish_s[op])) for op in order.tolist()]

    def memory(self, job: Job, space: int) -> tuple[FloatArray, IntArray]:
        """(times, bytes from then on) of one space; the first time is 0."""
        here = (job.space == space) & ~np.isnan(self.start_s)
        gained = np.flatnonzero(here & (job.acquired > 0))
        lost = np.flatnonzero(here & (job.released > 0) & ~np.isnan(self.finish_s))
        times = np.concatenate((self.start_s[gained], self.finish_s[lost]))
        change = np.concatenate((job.acquired[gained], -job.released[lost]))
        # At one instant what is released goes first, as in the engine.
        order = np.lexsort((change, times))
        base = int(job.resources.space_base_bytes[space])
        return np.concatenate(([0.0], times[order])), base + np.concatenate(([0], np.cumsum(change[order])))


def find_cycle(waits: tuple[Wait, ...]) -> tuple[int, ...]:
    """A cycle of operations that wait for each other, () where there is none. Linear in the waits."""
    after = {wait.op: wait.on for wait in waits}
    state: dict[int, int] = {}  # 1: on the path, 2: leads to no cycle
    for root, first in after.items():
        if root in state:
            continue
        path, todo = [root], [iter(first)]
        state[root] = 1
        while path:
            following = next(todo[-1], None)
            if following is None:
                state[path.pop()] = 2
                todo.pop()
            elif state.get(following) == 1:
                return tuple(path[path.index(following) :])
            elif following in after and following not in state:
                state[following] = 1
                path.append(following)
                todo.append(iter(after[following]))
    return ()
