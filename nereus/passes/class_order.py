"""The order in which a class of atoms is laid out for routing: what the same nodes lack lies together.

Every node lacks a class but for the little that its ranks derive themselves (bf16 weights of their own fp32 masters),
so the needs of two nodes are nearly one, and what one took in the other can relay. In this order a need is one or a
few ranges of the class's elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.ir.layout import IntArray


class ClassOrder:
    """``rows``: interval numbers of the table, in the class's order; ``numel``: elements of all of them."""

    __slots__ = ("_begin", "_sizes", "numel", "rows")

    def __init__(self, rows: IntArray, sizes: IntArray) -> None:
        self.rows = rows
        self.numel = int(sizes[rows].sum())
        self._sizes, self._begin = sizes, rows[:0]

    def ranges(self, intervals: IntArray) -> list[tuple[int, int]]:
        """Where ``intervals`` (ascending interval numbers) lie, as ranges of elements, ascending."""
        if len(intervals) == len(self.rows):
            return [(0, self.numel)]
        if not len(self._begin):  # elements before each row, and the total; most classes are wanted whole
            self._begin = np.concatenate(([0], np.cumsum(self._sizes[self.rows])))
        at = np.flatnonzero(np.isin(self.rows, intervals, assume_unique=True))
        first = np.flatnonzero(np.diff(at, prepend=-2) > 1)
        last = np.append(first[1:], len(at)) - 1
        return list(zip(self._begin[at[first]].tolist(), self._begin[at[last] + 1].tolist(), strict=True))


def class_order(needs: Sequence[IntArray], sizes: IntArray) -> ClassOrder:
    """``needs``: the interval numbers of each demand for the class, ascending. ``sizes``: elements of every interval
    of the table."""
    return ClassOrder(_rows(needs), sizes)


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
