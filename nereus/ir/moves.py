"""All moves of a transition as columns. Half a million of them pass through routing, scheduling and every check, so a
``Move`` is made only where one is looked at by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.intervals import Intervals
from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.transition import LINK_NUMBER, LINKS, LOCAL, Move

#: Number of the link class of what stays in one memory space.
LOCAL_LINK = LINK_NUMBER[LOCAL]


@dataclass(frozen=True, eq=False)
class Regions(Sequence[Intervals]):
    """Sets of intervals laid end to end: region i is rows ``first[i]`` up to ``first[i + 1]``."""

    first: IntArray
    cell: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, parts: Sequence[Intervals]) -> Regions:
        empty = [np.zeros(0, dtype=np.int64)]
        columns = [np.concatenate([getattr(p, name) for p in parts] or empty) for name in ("cell", "start", "stop")]
        found = cls(np.cumsum([0, *map(len, parts)], dtype=np.int64), *columns)
        found._known.update(enumerate(parts))
        return found

    @cached_property
    def _known(self) -> dict[int, Intervals]:
        return {}

    @cached_property
    def numel(self) -> IntArray:
        """Elements of each region."""
        return np.diff(np.concatenate(([0], np.cumsum(self.stop - self.start)))[self.first])

    @property
    def counts(self) -> IntArray:
        return np.diff(self.first)

    def rows(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """(position in ``numbers``, row) of every interval of these regions."""
        owner, within = runs(self.counts[numbers])
        return owner, self.first[numbers][owner] + within

    def __len__(self) -> int:
        return len(self.first) - 1

    @overload
    def __getitem__(self, number: int) -> Intervals: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Intervals]: ...
    def __getitem__(self, number: int | slice) -> Intervals | Sequence[Intervals]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        found = self._known.get(number)
        if found is None:
            part = slice(int(self.first[number]), int(self.first[number + 1]))
            found = self._known[number] = Intervals(self.cell[part], self.start[part], self.stop[part])
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Moves(Sequence[Move]):
    """``link``: position in ``LINKS``; ``slots``: bit mask over the table's slots, -1 for all; ``region``: number in
    ``regions``. Move i comes after moves ``after[after_first[i]:after_first[i + 1]]``."""

    src: IntArray
    dst: IntArray
    table: IntArray
    region: IntArray
    num_bytes: IntArray
    link: IntArray
    slots: IntArray
    after_first: IntArray
    after: IntArray
    regions: Regions

    @classmethod
    def of(cls, moves: Iterable[Move]) -> Moves:
        rows = list(moves)
        number: dict[int, int] = {}
        parts: list[Intervals] = []
        for move in rows:
            if number.setdefault(id(move.intervals), len(parts)) == len(parts):
                parts.append(move.intervals)
        columns = np.array(
            [
                (m.src, m.dst, m.table, number[id(m.intervals)], m.num_bytes, LINK_NUMBER[m.link], _mask(m.slots))
                for m in rows
            ],
            dtype=np.int64,
        ).reshape(-1, 7)
        src, dst, table, region, num_bytes, link, slots = columns.T.copy()
        return cls(
            src=src,
            dst=dst,
            table=table,
            region=region,
            num_bytes=num_bytes,
            link=link,
            slots=slots,
            after_first=np.cumsum([0, *(len(m.after) for m in rows)], dtype=np.int64),
            after=np.array([before for m in rows for before in m.after], dtype=np.int64),
            regions=Regions.of(parts),
        )

    @cached_property
    def numel(self) -> IntArray:
        found: IntArray = self.regions.numel[self.region]
        return found

    @cached_property
    def width(self) -> IntArray:
        """Bytes per element, all slots of a move together."""
        return self.num_bytes // np.maximum(self.numel, 1)

    @property
    def crosses(self) -> BoolArray:
        """Which cross a link; the others stay in one memory space."""
        found: BoolArray = self.link != LOCAL_LINK
        return found

    @property
    def after_counts(self) -> IntArray:
        return np.diff(self.after_first)

    @cached_property
    def relays(self) -> tuple[IntArray, IntArray]:
        """(move, what it comes after) of all such pairs, in the order of moves."""
        return runs(self.after_counts)[0], self.after

    @cached_property
    def depth(self) -> IntArray:
        """How many moves, itself included, bring a move's bytes from their holder."""
        depth = np.ones(len(self), dtype=np.int64)
        relays, before = self.relays
        while True:  # one round for each sending of the longest chain
            reached = depth.copy()
            np.maximum.at(reached, relays, depth[before] + 1)
            if np.array_equal(reached, depth):
                return depth
            if int(reached.max()) > len(self):
                raise ValueError("moves wait for each other")
            depth = reached

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, number: int) -> Move: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Move]: ...
    def __getitem__(self, number: int | slice) -> Move | Sequence[Move]:
        return self._rows[number]

    def __iter__(self) -> Iterator[Move]:
        return iter(self._rows)

    @cached_property
    def _rows(self) -> tuple[Move, ...]:
        columns = (self.src, self.dst, self.table, self.region, self.num_bytes, self.link, self.slots)
        first, after = self.after_first.tolist(), self.after.tolist()
        return tuple(
            Move(src, dst, table, self.regions[region], num_bytes, LINKS[link], tuple(after[a:b]), _numbers(slots))
            for (src, dst, table, region, num_bytes, link, slots), a, b in zip(
                zip(*(c.tolist() for c in columns), strict=True), first[:-1], first[1:], strict=True
            )
        )


def _mask(slots: tuple[int, ...] | None) -> int:
    return -1 if slots is None else sum(1 << i for i in slots)


def _numbers(mask: int) -> tuple[int, ...] | None:
    return None if mask < 0 else tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
