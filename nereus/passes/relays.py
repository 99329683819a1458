"""Relays: what nodes took in of a class, and who of them has room to send it on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

#: A class is looked up by parts, so that a search meets hardly any stripe that does not hold what is wanted.
_PARTS = 16


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

    def open_at(self, position: int, is_full: Callable[[Taken], bool], target: float) -> Iterator[Taken]:
        """Those with room that hold ``position``."""
        number = position // self.per_part
        if self.target[number] != target:
            self.target[number] = target
            self.open[number] += self.full[number]
            self.full[number] = []
        still: list[Taken] = []
        for part in self.open[number]:
            if is_full(part):
                self.full[number].append(part)
            else:
                still.append(part)
                if part.lo <= position < part.hi:
                    yield part
        self.open[number] = still
