"""Who can send a class's bytes: the least loaded rail with a holder, and what nodes took in and may relay.

Loads only grow while moves are added, so each list is a heap of loads as they were when last looked at: an entry at the
top whose load has grown goes back with its new load, and the first that has not is the least of all. A choice then
costs what changed, not how many there are to choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

#: A class is looked up by parts, so that a search meets hardly any stripe that does not hold what is wanted.
_PARTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Seconds that the moves so far keep each port busy."""

    gpu_out: list[float]
    gpu_in: list[float]
    nic_out: list[float]
    nic_in: list[float]

    @property
    def busiest_s(self) -> float:
        return max((max(p, default=0.0) for p in (self.gpu_out, self.gpu_in, self.nic_out, self.nic_in)), default=0.0)

    @property
    def busiest_out_s(self) -> float:
        return max((max(p, default=0.0) for p in (self.gpu_out, self.nic_out)), default=0.0)


class HolderRails:
    """Rails with a holder of a class, by what they send so far; among equals the first listed."""

    __slots__ = ("heap", "nic_out")

    def __init__(self, rails: Iterable[int], nic_out: list[float]) -> None:
        self.nic_out = nic_out
        self.heap = [(0.0, at, rail) for at, rail in enumerate(rails)]

    def least(self) -> int:
        heap, nic_out = self.heap, self.nic_out
        while True:
            load, at, rail = heap[0]
            now = nic_out[rail]
            if now == load:
                return rail
            heapreplace(heap, (now, at, rail))


class Taken(NamedTuple):
    """Elements ``lo..hi`` of a region that ``place`` took in from another node by stripe ``stripe``: it may relay
    them, through rail ``rail``. ``depth``: how many sendings brought them there."""

    place: int
    node: int
    rail: int
    lo: int
    hi: int
    stripe: int
    depth: int


#: (cost in seconds when last looked at, number of the stripe, what).
_Entry = tuple[float, int, Taken]


class Relays:
    """Of one region. Those without room are put aside until the target that they are full for is raised."""

    __slots__ = ("full", "known", "numel", "open", "per_part", "ports", "target")

    def __init__(self, numel: int, ports: Ports) -> None:
        self.numel, self.ports = numel, ports
        self.per_part = -(-numel // _PARTS)
        #: Heaps by part; ``_PARTS``: of those that hold all of the region.
        self.open: dict[int, list[_Entry]] = {}
        self.full: list[tuple[int, Taken]] = []
        self.known: list[Taken] = []
        self.target = 0.0

    def add(self, taken: Iterable[Taken]) -> None:
        for part in taken:
            self.known.append(part)
            whole = part.lo == 0 and part.hi == self.numel
            first, last = part.lo // self.per_part, (part.hi - 1) // self.per_part
            for number in (_PARTS,) if whole else range(first, last + 1):
                heappush(self.open.setdefault(number, []), (0.0, part.stripe, part))

    def cheapest(self, position: int, target: float, deeper_s: float, below: float) -> Iterator[tuple[float, Taken]]:
        """(load in seconds, relay) of those with room that hold ``position``, by cost (load + depth x ``deeper_s``,
        which grows with the target), as long as that is less than ``below``."""
        if target != self.target:
            self.target = target
            for number, part in self.full:
                heappush(self.open[number], (0.0, part.stripe, part))
            self.full.clear()
        looked_at: list[tuple[list[_Entry], _Entry]] = []
        try:
            while True:
                best: _Entry | None = None
                of: list[_Entry] = []
                for number in (position // self.per_part, _PARTS):
                    heap = self.open.get(number, [])
                    entry = self._top(number, heap, target, deeper_s)
                    if entry is not None and (best is None or entry < best):
                        best, of = entry, heap
                if best is None or best[0] >= below:
                    return
                looked_at.append((of, heappop(of)))
                part = best[2]
                if part.lo <= position < part.hi:
                    yield self._load(part), part
        finally:
            for heap, entry in looked_at:
                heappush(heap, entry)

    def _top(self, number: int, heap: list[_Entry], target: float, deeper_s: float) -> _Entry | None:
        while heap:
            cost, stripe, part = heap[0]
            load = self._load(part)
            now = load + part.depth * deeper_s
            if load >= target:
                self.full.append((number, heappop(heap)[2]))
            elif now == cost:
                return heap[0]
            else:
                heapreplace(heap, (now, stripe, part))
        return None

    def _load(self, part: Taken) -> float:
        nic, gpu = self.ports.nic_out[part.rail], self.ports.gpu_out[part.place % len(self.ports.gpu_out)]
        return gpu if gpu > nic else nic
