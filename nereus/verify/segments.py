"""Sets of integers as half-open segments of a line, columnar: the arithmetic of the verifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def ints(values: object) -> IntArray:
    return np.asarray(values, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Ascending, disjoint, not touching, not empty."""

    lo: IntArray
    hi: IntArray

    @classmethod
    def union(cls, lo: IntArray, hi: IntArray) -> Segments:
        """Of any segments; empty ones are left out."""
        some = hi > lo
        lo, hi = lo[some], hi[some]
        if not len(lo):
            return cls(lo, hi)
        order = np.argsort(lo, kind="stable")
        lo, reach = lo[order], np.maximum.accumulate(hi[order])
        first = np.flatnonzero(np.concatenate(([True], lo[1:] > reach[:-1])))
        return cls(lo[first], reach[np.append(first[1:], len(lo)) - 1])

    @property
    def total(self) -> int:
        return int((self.hi - self.lo).sum())

    def __len__(self) -> int:
        return len(self.lo)

    def minus(self, other: Segments) -> Segments:
        return _where(self, other, keep_common=False)

    def common(self, other: Segments) -> Segments:
        return _where(self, other, keep_common=True)


def _where(one: Segments, other: Segments, *, keep_common: bool) -> Segments:
    """The part of ``one`` that ``other`` has (or lacks), by one walk along all borders."""
    if not len(one) or not len(other):
        return Segments(one.lo[:0], one.hi[:0]) if keep_common else one
    points = np.concatenate((one.lo, one.hi, other.lo, other.hi))
    step_one = np.zeros(len(points), dtype=np.int8)
    step_other = np.zeros(len(points), dtype=np.int8)
    step_one[: len(one)], step_one[len(one) : 2 * len(one)] = 1, -1
    step_other[2 * len(one) : 2 * len(one) + len(other)], step_other[2 * len(one) + len(other) :] = 1, -1
    order = np.argsort(points, kind="stable")
    points = points[order]
    in_one, in_other = np.cumsum(step_one[order], dtype=np.int32), np.cumsum(step_other[order], dtype=np.int32)
    chosen = (in_one[:-1] > 0) & ((in_other[:-1] > 0) == keep_common) & (points[1:] > points[:-1])
    return Segments.union(points[:-1][chosen], points[1:][chosen])


def first_overlap(lo: IntArray, hi: IntArray) -> int | None:
    """A number that is in two of the segments, or None."""
    some = hi > lo
    lo, hi = lo[some], hi[some]
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], hi[order]
    twice = np.flatnonzero(lo[1:] < np.maximum.accumulate(hi)[:-1])
    return int(lo[twice[0] + 1]) if len(twice) else None


def outside(lo: IntArray, hi: IntArray, held: Segments) -> IntArray:
    """Which of the segments are not inside ``held`` as a whole: their positions."""
    if not len(held):
        return np.flatnonzero(hi > lo)
    at = np.searchsorted(held.lo, lo, side="right") - 1
    inside = (at >= 0) & (hi <= held.hi[np.maximum(at, 0)])
    return np.flatnonzero(~inside & (hi > lo))


def meeting(lo: IntArray, hi: IntArray, other_lo: IntArray, other_hi: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs (i, j) where segment i shares a number with segment j of the others, which are ascending and disjoint."""
    first = np.searchsorted(other_hi, lo, side="right")
    last = np.searchsorted(other_lo, hi, side="left")
    counts = np.where(hi > lo, np.maximum(last - first, 0), 0)
    one = np.repeat(np.arange(len(lo), dtype=np.int64), counts)
    return one, np.repeat(first, counts) + within(counts)


def within(counts: IntArray) -> IntArray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    total = int(counts.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
