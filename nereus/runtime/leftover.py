"""Elements that a move would lose: held and wanted nowhere, or described by nobody at all.

Counted by element, since a naming with a hole (three rows of four, all columns but the last) describes objects that
look whole: the hole would become zero, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from nereus.ir.fragment import Fragment, Rectangle

#: (row_lo, row_hi, col_lo, col_hi) of a logical tensor seen as a matrix.
Box = tuple[int, int, int, int]


def boxes(fragments: Iterable[Fragment]) -> set[Box]:
    """What the fragments cover: at most three rectangles each, where a flat range begins or ends inside a row."""
    found: set[Box] = set()
    for f in fragments:
        found.update(_clipped(f, f.start, f.stop))
    return found


def _clipped(box: Rectangle, start: int, stop: int) -> Iterator[Box]:
    width = box.num_cols
    if start >= stop or width <= 0:
        return
    first, last = start // width, (stop - 1) // width
    begin, end = start - first * width, stop - last * width
    if first == last:
        yield box.row_lo + first, box.row_lo + first + 1, box.col_lo + begin, box.col_lo + end
        return
    if begin:
        yield box.row_lo + first, box.row_lo + first + 1, box.col_lo + begin, box.col_hi
        first += 1
    if end < width:
        yield box.row_lo + last, box.row_lo + last + 1, box.col_lo, box.col_lo + end
        last -= 1
    if first <= last:
        yield box.row_lo + first, box.row_lo + last + 1, box.col_lo, box.col_hi


def outside(inner: Collection[Box], outer: Collection[Box]) -> tuple[int, str]:
    """(how many elements of ``inner`` lie in no box of ``outer``, the rows and columns that they span)."""
    rest = set(inner) - set(outer)
    if not rest:
        return 0, ""
    every = np.array([*rest, *outer], dtype=np.int64).reshape(-1, 4)
    rows, cols = np.unique(every[:, :2]), np.unique(every[:, 2:])
    open_cells = np.zeros((len(rows) - 1, len(cols) - 1), dtype=bool)
    for group, value in ((rest, True), (outer, False)):
        for row_lo, row_hi, col_lo, col_hi in group:
            at = slice(*np.searchsorted(rows, (row_lo, row_hi))), slice(*np.searchsorted(cols, (col_lo, col_hi)))
            open_cells[at] = value
    if not open_cells.any():
        return 0, ""
    count = int((np.outer(np.diff(rows), np.diff(cols)) * open_cells).sum())
    r, c = np.flatnonzero(open_cells.any(axis=1)), np.flatnonzero(open_cells.any(axis=0))
    where = f"rows {rows[r[0]]}..{rows[r[-1] + 1]}, columns {cols[c[0]]}..{cols[c[-1] + 1]}"
    return count, where
