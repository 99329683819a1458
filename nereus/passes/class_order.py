"""The order in which a class of atoms is laid out for routing: what the same nodes lack lies together.

Every node lacks a class but for the little that its ranks derive themselves (bf16 weights of their own fp32 masters),
so the needs of two nodes are nearly one, and what one took in the other can relay. In this order a need is one or a
few ranges of the class's elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOrder:
    """``rows``: interval numbers of the table, in the class's order. ``begin[i]``: elements before row i, and the
    total."""

    region: int
    rows: IntArray
    begin: IntArray

    @property
    def numel(self) -> int:
        return int(self.begin[-1])

    def ranges(self, intervals: IntArray) -> list[tuple[int, int]]:
        """Where ``intervals`` (ascending interval numbers) lie, as ranges of elements, ascending."""
        if len(intervals) == len(self.rows):
            return [(0, int(self.begin[-1]))]
        at = np.flatnonzero(np.isin(self.rows, intervals, assume_unique=True))
        first = np.flatnonzero(np.diff(at, prepend=-2) > 1)
        last = np.append(first[1:], len(at)) - 1
        return list(zip(self.begin[at[first]].tolist(), self.begin[at[last] + 1].tolist(), strict=True))


def class_order(region: int, needs: Sequence[IntArray], sizes: IntArray) -> ClassOrder:
    """``needs``: the interval numbers of each demand for the class, ascending. ``sizes``: elements of every interval
    of the table."""
    rows = _rows(needs)
    begin = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(sizes[rows], out=begin[1:])
    return ClassOrder(region=region, rows=rows, begin=begin)


def _rows(needs: Sequence[IntArray]) -> IntArray:
    rows = max(needs, key=len)
    if all(need is rows or np.array_equal(need, rows) for need in needs):
        return rows
    rows = np.unique(np.concatenate(needs))
    # Rows that the same demands lack get one number; few demands lack few rows, so the numbers are built from those.
    mark = np.zeros(len(rows), dtype=np.int64)
    for need in needs:
        if len(need) == len(rows):
            continue
        inside = np.searchsorted(rows, need)
        short = len(need) * 2 < len(rows)
        chosen = inside if short else np.setdiff1d(np.arange(len(rows)), inside, assume_unique=True)
        mark[chosen] = mark.max() + 1 + np.unique(mark[chosen], return_inverse=True)[1]
    return rows[np.argsort(mark, kind="stable")]
