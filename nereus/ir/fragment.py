"""Where logical state really lies in one process: fragments of logical tensors inside the storages of a framework.

A *storage* is one allocation, seen as a 1-D run of elements. A *fragment* is a rectangle of a logical tensor (seen as
a matrix: dim 0 by the rest; a vector is n x 1) whose row-major elements ``start .. stop`` lie in a storage: element p
of the rectangle at ``origin + (p // num_cols) * stride + p % num_cols``. Fused matrices (grouped QKV, gate | up,
stacked experts), flat partitions (ZeRO, Megatron's distributed optimizer), FSDP rows and padded vocabularies are all
lists of fragments. What no fragment covers is padding: never state, never moved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkStorage:
    """One allocation of a process. ``numel`` counts padding too."""

    name: str  # the framework's own name of it, for diagnostics; unique in the process
    dtype: str  # a key of ``nereus.ir.units.DTYPE_BYTES``
    numel: int
    host: bool = False  # host memory instead of the GPU's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Rows ``row_lo .. row_hi`` x columns ``col_lo .. col_hi`` of a logical tensor seen as a matrix."""

    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int

    @property
    def num_rows(self) -> int:
        return self.row_hi - self.row_lo

    @property
    def num_cols(self) -> int:
        return self.col_hi - self.col_lo

    @property
    def area(self) -> int:
        """Elements of the whole rectangle."""
        return self.num_rows * self.num_cols


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment(Rectangle):
    """Rows ``row_lo .. row_hi`` x columns ``col_lo .. col_hi`` of (``tensor``, ``slot``), clipped to ``start ..
    stop`` of the rectangle's row-major order. ``origin`` is where element 0 of the rectangle would lie (it may be
    negative, or belong to something else, where ``start`` > 0); ``stride``: storage elements from row to row."""

    tensor: str  # global logical name
    slot: str
    storage: int  # index in ``RankState.storages``
    start: int
    stop: int
    origin: int
    stride: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def offset(self, position: int) -> int:
        """Storage element of rectangle element ``position``."""
        row, col = divmod(position, self.num_cols)
        return self.origin + row * self.stride + col


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Everything of one state set (a model in one stage's processes) that one rank holds.

    ``derived`` and ``caches`` name what is reachable from the framework's objects and is not state: it is made again
    after a move, or dropped. Every storage that has a fragment is state.
    """

    rank: int
    storages: tuple[FrameworkStorage, ...]
    fragments: tuple[Fragment, ...]
    derived: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()

    def slots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.slot for f in self.fragments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Rectangle):
    """A rectangle of a logical tensor inside a framework's local parameter, itself seen as a matrix (all dims but the
    last by the last; a vector is n x 1): it starts at row ``at_row``, column ``at_col`` of the parameter."""

    tensor: str
    at_row: int
    at_col: int = 0


def fragments_of(
    segments: tuple[Segment, ...],
    *,
    num_cols: int,
    slot: str,
    storage: int,
    origin: int = 0,
    start: int = 0,
    stop: int | None = None,
) -> tuple[Fragment, ...]:
    """Fragments of a local parameter (``num_cols`` columns, contiguous) whose elements ``start .. stop`` (row-major;
    None: all) are kept, element 0 of the parameter lying at ``origin`` of the storage.

    A flat range keeps a part of a segment only where the segment spans whole rows; ValueError otherwise.
    """
    found = []
    for segment in segments:
        width, size = segment.num_cols, segment.area
        at = segment.at_row * num_cols + segment.at_col
        lo, hi = 0, size
        if start > 0 or stop is not None:
            if width != num_cols and segment.num_rows != 1:
                raise ValueError(f"{segment.tensor}: a flat range cannot cut a part that lies beside other columns")
            lo = min(max(start - at, 0), size)
            hi = size if stop is None else min(max(stop - at, 0), size)
        if lo < hi:
            found.append(
                Fragment(
                    tensor=segment.tensor,
                    slot=slot,
                    storage=storage,
                    row_lo=segment.row_lo,
                    row_hi=segment.row_hi,
                    col_lo=segment.col_lo,
                    col_hi=segment.col_hi,
                    start=lo,
                    stop=hi,
                    origin=origin + at,
                    stride=num_cols,
                )
            )
    return tuple(found)
