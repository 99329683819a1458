"""Boxes of n-dimensional parameters as rectangles of the matrix that ``Segment`` sees (all dims but the last by the
last; a vector is n x 1), and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from nereus.ir.fragment import Fragment, Segment
from nereus.runtime.adapters.regions import Rect, intersection

#: (offset, size) in every dim.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def row_runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int, int]]:
    """(row of the matrix, row of the box's own matrix, rows) of each run of rows that the box covers."""
    if 0 in box[1]:
        return
    dims, offsets, sizes = _leading(shape), _leading(box[0]), _leading(box[1])
    # Dims from ``split`` on are whole, so one step of the dim before them is one run together with its neighbours.
    split = len(dims) - 1
    while split > 0 and sizes[split] == dims[split]:
        split -= 1
    inner, own_inner = prod(dims[split + 1 :]), prod(sizes[split + 1 :])
    run = sizes[split] * own_inner
    for number, outer in enumerate(_positions(sizes[:split])):
        row = 0
        for offset, position, extent in zip(offsets[:split], outer, dims[:split], strict=True):
            row = row * extent + offset + position
        row = row * dims[split] + offsets[split]
        yield row * inner, number * run, run


def chunk_fragments(
    segments: Sequence[Segment], shape: Sequence[int], box: Box, *, slot: str, storage: int, origin: int
) -> Iterator[Fragment]:
    """Fragments in a contiguous stored ``box`` of a parameter of ``shape`` whose first element lies at ``origin``."""
    vector = len(shape) < 2
    col_lo, width = (0, 1) if vector else (box[0][-1], box[1][-1])
    for row, own_row, num_rows in row_runs(shape, box):
        for segment in segments:
            common = intersection(segment_rect(segment), (row, row + num_rows, col_lo, col_lo + width))
            if common is None:
                continue
            first = (common[0] - row + own_row) * width + common[2] - col_lo
            logical = shift(common, segment.row_lo - segment.at_row, segment.col_lo - segment.at_col)
            yield Fragment(
                tensor=segment.tensor,
                slot=slot,
                storage=storage,
                row_lo=logical[0],
                row_hi=logical[1],
                col_lo=logical[2],
                col_hi=logical[3],
                start=0,
                stop=(logical[1] - logical[0]) * (logical[3] - logical[2]),
                origin=origin + first,
                stride=width,
            )


def rect_boxes(shape: Sequence[int], rect: Rect) -> Iterator[tuple[Box, Rect]]:
    """(box, its rectangle) that together are ``rect`` of the parameter's matrix."""
    vector = len(shape) < 2
    cols, widths = ((), ()) if vector else ((rect[2],), (rect[3] - rect[2],))
    for offsets, sizes, row, num_rows in _row_boxes(_leading(shape), rect[0], rect[1]):
        yield ((*offsets, *cols), (*sizes, *widths)), (row, row + num_rows, rect[2], rect[3])


def segment_rect(segment: Segment) -> Rect:
    """Where the segment lies in its parameter."""
    return (
        segment.at_row,
        segment.at_row + segment.num_rows,
        segment.at_col,
        segment.at_col + segment.num_cols,
    )


def shift(rect: Rect, rows: int, cols: int) -> Rect:
    return rect[0] + rows, rect[1] + rows, rect[2] + cols, rect[3] + cols


def _leading(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[:-1]) if len(shape) > 1 else tuple(shape)


def _positions(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _positions(sizes[1:]):
            yield (first, *rest)


def _row_boxes(dims: Sequence[int], lo: int, hi: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """(offsets, sizes, first row, rows): rows ``lo .. hi`` of flattened ``dims`` as boxes, in order."""
    if lo >= hi:
        return
    inner = prod(dims[1:])
    rest = dims[1:]
    if lo % inner:
        base, stop = lo // inner * inner, min(hi, (lo // inner + 1) * inner)
        for offsets, sizes, row, num_rows in _row_boxes(rest, lo - base, stop - base):
            yield (base // inner, *offsets), (1, *sizes), row + base, num_rows
        lo = stop
    base = hi // inner * inner
    if lo < base:
        yield (lo // inner, *([0] * len(rest))), ((base - lo) // inner, *rest), lo, base - lo
    for offsets, sizes, row, num_rows in _row_boxes(rest, max(lo, base) - base, hi - base):
        yield (base // inner, *offsets), (1, *sizes), row + base, num_rows
