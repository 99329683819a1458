"""Which part of a whole parameter a DTensor's local tensor holds: intervals per dim, and segments cut to them.

DTensor cuts a dim by mesh axis, in the manner of torch.chunk: chunks of ceil(extent / size), the last ones shorter or
empty. A strided shard with split factor k comes after the axes to its right that cut the same dim k ways together
(FSDP over tensor parallelism); where there are none, the dim is k packed parts and each of them is cut
(transformers' gate | up under tensor parallelism).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nereus.ir.fragment import Segment

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCut:
    """One mesh axis that cuts a dim: ``size`` ranks, this is ``rank``; ``factor`` > 1: a strided shard."""

    size: int
    rank: int
    factor: int = 1


def held_intervals(extent: int, cuts: Sequence[AxisCut]) -> tuple[Interval, ...]:
    """What remains of ``0 .. extent`` after ``cuts`` (in mesh order), in local order; empty where nothing does.

    Raises ValueError for a split factor that no axes to its right make up, beside others that cut the dim.
    """
    held: list[Interval] = [(0, extent)]
    for cut in _applied(cuts):
        held = [part for piece in _chunks(held, cut.factor) for part in _chunks(piece, cut.size)[cut.rank]]
    merged: list[Interval] = []
    for lo, hi in held:
        if lo == hi:
            continue
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def _applied(cuts: Sequence[AxisCut]) -> list[AxisCut]:
    """In the order in which they cut; a factor that is left cuts packed parts."""
    order: list[AxisCut] = []
    for cut in reversed(cuts):
        position, done = 0, 1
        while done < cut.factor and position < len(order):
            done *= order[position].size
            position += 1
        if done == cut.factor:
            order.insert(position, replace(cut, factor=1))
        elif not order:
            order.append(cut)
        else:
            raise ValueError(f"a strided shard with split factor {cut.factor} fits none of the axes to its right")
    return order


def _chunks(intervals: Sequence[Interval], count: int) -> list[list[Interval]]:
    """The elements of ``intervals``, in order, as torch.chunk cuts them: always ``count`` parts, maybe empty ones."""
    size = -(-local_extent(intervals) // count)
    parts: list[list[Interval]] = [[] for _ in range(count)]
    position = 0
    for lo, hi in intervals:
        while lo < hi:
            number = position // size
            length = min(hi - lo, (number + 1) * size - position)
            parts[number].append((lo, lo + length))
            lo, position = lo + length, position + length
    return parts


def local_extent(intervals: Sequence[Interval]) -> int:
    return sum(hi - lo for lo, hi in intervals)


def local_segments(
    segments: Sequence[Segment], shape: Sequence[int], held: Sequence[Sequence[Interval]]
) -> tuple[Segment, ...]:
    """``segments`` of a whole parameter of ``shape``, cut to the intervals ``held`` of each dim, at their places in the
    local tensor (both seen as matrices: all dims but the last by the last; a vector is n x 1)."""
    rows = list(_row_runs(shape, held))
    cols = list(_runs(held[-1])) if len(shape) > 1 else [(0, 1, 0)]
    starts = [first for first, _, _ in rows]
    found = []
    for segment in segments:
        # Rows of the parameter -> rows of the logical tensor.
        row_shift, col_shift = segment.row_lo - segment.at_row, segment.col_lo - segment.at_col
        lo, hi = segment.at_row, segment.at_row + segment.num_rows
        left, right = segment.at_col, segment.at_col + segment.num_cols
        for first, count, local_row in rows[max(bisect_right(starts, lo) - 1, 0) : bisect_right(starts, hi - 1)]:
            top, bottom = max(lo, first), min(hi, first + count)
            if top >= bottom:
                continue
            for col, num_cols, local_col in cols:
                start, stop = max(left, col), min(right, col + num_cols)
                if start < stop:
                    found.append(
                        Segment(
                            tensor=segment.tensor,
                            row_lo=top + row_shift,
                            row_hi=bottom + row_shift,
                            col_lo=start + col_shift,
                            col_hi=stop + col_shift,
                            at_row=local_row + top - first,
                            at_col=local_col + start - col,
                        )
                    )
    return tuple(found)


def _runs(intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """(first in the whole, count, first in the local tensor)."""
    local = 0
    for lo, hi in intervals:
        yield lo, hi - lo, local
        local += hi - lo


def _row_runs(shape: Sequence[int], held: Sequence[Sequence[Interval]]) -> Iterator[tuple[int, int, int]]:
    """As ``_runs``, over the rows of the matrix, ascending: the dims but the last, or a vector's only dim."""
    dims = len(shape) - 1 if len(shape) > 1 else 1
    outer = [[i for lo, hi in held[dim] for i in range(lo, hi)] for dim in range(dims - 1)]
    last = list(_runs(held[dims - 1]))
    per_index = local_extent(held[dims - 1])
    pending: tuple[int, int, int] | None = None
    for number, indices in enumerate(product(*outer)):
        base = 0
        for dim, index in enumerate(indices):
            base = base * shape[dim] + index
        for lo, count, local in last:
            run = (base * shape[dims - 1] + lo, count, number * per_index + local)
            if pending is not None and (pending[0] + pending[1], pending[2] + pending[1]) == (run[0], run[2]):
                pending = (pending[0], pending[1] + run[1], pending[2])
                continue
            if pending is not None:
                yield pending
            pending = run
    if pending is not None:
        yield pending
