"""Sets of (cell, start, stop) intervals, columnar: the regions of everything that moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.layout import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Disjoint, non-empty, ascending by (cell, start)."""

    cell: IntArray
    start: IntArray
    stop: IntArray
    _numel: list[int] = field(default_factory=list, init=False, repr=False)  # computed once, when first asked for

    @property
    def numel(self) -> int:
        if not self._numel:
            self._numel.append(int((self.stop - self.start).sum()))
        return self._numel[0]

    def __len__(self) -> int:
        return len(self.cell)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.cell.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)

    def split(self, parts: int) -> list[Intervals]:
        """``parts`` consecutive pieces whose element counts differ by at most one; empty pieces are left out."""
        total = self.numel
        return self.cut_at([total * i // parts for i in range(1, parts)])

    def cut_at(self, positions: Iterable[int]) -> list[Intervals]:
        """Cut where the running element count reaches each of the ascending ``positions``; empty pieces are left
        out."""
        ends = np.cumsum(self.stop - self.start)
        begins = ends - (self.stop - self.start)
        total = int(ends[-1]) if len(ends) else 0
        pieces: list[Intervals] = []
        previous = 0
        for position in (*positions, total):
            if position > previous:
                first = int(np.searchsorted(ends, previous, side="right"))
                last = int(np.searchsorted(begins, position, side="left"))
                start, stop = self.start[first:last].copy(), self.stop[first:last].copy()
                start[0] += previous - int(begins[first])
                stop[-1] -= int(ends[last - 1]) - position
                pieces.append(Intervals(self.cell[first:last], start, stop))
                previous = position
        return pieces

    def _keys(self, scale: int) -> tuple[IntArray, IntArray]:
        return self.cell * scale + self.start, self.cell * scale + self.stop

    def intersect(self, other: Intervals) -> Intervals:
        """Elements in both."""
        if not len(self) or not len(other):
            return EMPTY
        scale = int(max(self.stop.max(), other.stop.max())) + 1
        own_lo, own_hi = self._keys(scale)
        lo, hi = other._keys(scale)
        # Both lists are ascending and disjoint: the partners of an interval are consecutive.
        first = np.searchsorted(hi, own_lo, side="right")
        last = np.searchsorted(lo, own_hi, side="left")
        counts = np.maximum(last - first, 0)
        own = np.repeat(np.arange(len(self)), counts)
        partner = np.repeat(first - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(len(own))
        begin = np.maximum(own_lo[own], lo[partner])
        end = np.minimum(own_hi[own], hi[partner])
        cell = self.cell[own]
        return Intervals(cell, begin - cell * scale, end - cell * scale)

    def subtract(self, other: Intervals) -> Intervals:
        """Elements of ``self`` that ``other`` lacks."""
        common = self.intersect(other)
        if not len(common):
            return self
        if common.numel == self.numel:
            return EMPTY
        scale = int(self.stop.max()) + 1
        own_lo, own_hi = self._keys(scale)
        cut_lo, cut_hi = common._keys(scale)
        # Gaps between cuts, limited to own intervals: every own start or cut end opens a gap, every cut start or own
        # end closes.
        opens = np.sort(np.concatenate((own_lo, cut_hi)))
        closes = np.sort(np.concatenate((own_hi, cut_lo)))
        keep = closes > opens
        opens, closes = opens[keep], closes[keep]
        cell = opens // scale
        return Intervals(cell, opens - cell * scale, closes - cell * scale)


EMPTY = Intervals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(parts: Iterable[Intervals]) -> Intervals:
    """Union of pairwise disjoint sets; touching intervals of one cell are joined."""
    chosen = [p for p in parts if len(p)]
    if not chosen:
        return EMPTY
    cell = np.concatenate([p.cell for p in chosen])
    start = np.concatenate([p.start for p in chosen])
    stop = np.concatenate([p.stop for p in chosen])
    order = np.lexsort((start, cell))
    cell, start, stop = cell[order], start[order], stop[order]
    fresh = np.ones(len(cell), dtype=bool)
    fresh[1:] = (cell[1:] != cell[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:], [len(cell)])) - 1
    return Intervals(cell[first], start[first], stop[last])
