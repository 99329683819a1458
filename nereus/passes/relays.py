"""Relays: what nodes took in of a class, and who of them has room to send it on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


class Taken(NamedTuple):
    """Elements ``lo..hi`` of a region that ``place`` took in from another node by stripe ``stripe``: it may relay
    them. ``depth``: how many sendings brought them there."""

    place: int
    node: int
    lo: int
    hi: int
    stripe: int
    depth: int


class Relays:
    """Of one region. Those without room are put aside until the target that they are full for is raised, so that a
    search costs what is open, not what ever was."""

    def __init__(self, numel: int) -> None:
        self.per_part = -(-numel // _PARTS)
        self.open: list[list[Taken]] = [[] for _ in range(_PARTS)]
        self.full: list[list[Taken]] = [[] for _ in range(_PARTS)]
        self.target = [0.0] * _PARTS

    def add(self, taken: Iterable[Taken]) -> None:
        for part in taken:
            for number in range(part.lo // self.per_part, (part.hi - 1) // self.per_part + 1):
                self.open[number].append(part)

    def open_at(self, position: int, ports: Ports, target: float) -> list[tuple[float, Taken]]:
        """Those with room that hold ``position``, with their load in seconds."""
        number = position // self.per_part
        if self.target[number] != target:
            self.target[number] = target
            self.open[number] += self.full[number]
            self.full[number] = []
        nic_out, gpu_out = ports.nic_out, ports.gpu_out
        num_devices = len(gpu_out)
        found: list[tuple[float, Taken]] = []
        full = False
        for part in self.open[number]:
            load, gpu = nic_out[part.node], gpu_out[part.place % num_devices]
            load = gpu if gpu > load else load
            if load >= target:
                full = True
            elif part.lo <= position < part.hi:
                found.append((load, part))
        if full:
            still: list[Taken] = []
            for part in self.open[number]:
                busy = max(nic_out[part.node], gpu_out[part.place % num_devices]) >= target
                (self.full[number] if busy else still).append(part)
            self.open[number] = still
        return found
