"""Cells: the common refinement of every tensor-parallel cut of a model, and the 1-D geometry inside a cell.

Layouts cut a logical tensor into boxes; together the cuts give *cells*, boxes that no coordinate of any layout
divides. Inside a cell every further cut (ZeRO's flat ranges, FSDP's rows) is a cut of the cell's row-major order: the
cell lies inside one local box, so walking the local box in its order visits the cell's elements in theirs. All regions
of the compiler are therefore ``(cell, start, stop)`` intervals; they become boxes only when a program is emitted.

Tensors are seen as matrices ``rows x cols`` (a vector is ``n x 1``; a cut along dim 0 cuts rows, along dim 1 columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.described import DescribedLayout
from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_NONE, SHARD_PARAM, BoolArray, IntArray, Layout
from nereus.ir.tensor import LogicalTensor, matrix_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Columnar: one row a cell, in tensor order and row-major inside a tensor."""

    tensors: tuple[LogicalTensor, ...]
    tensor: IntArray  # index into ``tensors``
    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray
    tensor_rows: IntArray  # per tensor
    tensor_cols: IntArray

    @property
    def num_cells(self) -> int:
        return len(self.tensor)

    @property
    def numel(self) -> IntArray:
        return (self.row_hi - self.row_lo) * (self.col_hi - self.col_lo)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBoxes:
    """What one layout's coordinates hold: arrays ``[num_coords, num_tensors]``; an absent tensor is an empty box.

    ``cut_tensor``, ``cut_row``: rows at which a description cuts a tensor beside its boxes (parts of fused storages).
    """

    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray
    cut_tensor: IntArray
    cut_row: IntArray

    @property
    def rows(self) -> IntArray:
        return self.row_hi - self.row_lo

    @property
    def cols(self) -> IntArray:
        return self.col_hi - self.col_lo

    @property
    def numel(self) -> IntArray:
        return self.rows * self.cols


_NO_CUTS = np.zeros(0, dtype=np.int64)


def build_cells(tensors: tuple[LogicalTensor, ...], boxes: Sequence[LocalBoxes]) -> Cells:
    """Refine ``tensors`` by the borders of all ``boxes``."""
    shapes = np.array([matrix_shape(t.shape) for t in tensors], dtype=np.int64).reshape(-1, 2)
    rows, first_row = _points(shapes[:, 0], [(b.row_lo, b.row_hi, b) for b in boxes], with_cuts=True)
    cols, first_col = _points(shapes[:, 1], [(b.col_lo, b.col_hi, b) for b in boxes], with_cuts=False)
    num_rows, num_cols = np.diff(first_row) - 1, np.diff(first_col) - 1
    counts = num_rows * num_cols
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)
    within = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    row = first_row[tensor] + within // num_cols[tensor]
    col = first_col[tensor] + within % num_cols[tensor]
    return Cells(
        tensors=tensors,
        tensor=tensor,
        row_lo=rows[row],
        row_hi=rows[row + 1],
        col_lo=cols[col],
        col_hi=cols[col + 1],
        tensor_rows=shapes[:, 0],
        tensor_cols=shapes[:, 1],
    )


def _points(
    extent: IntArray, bounds: Sequence[tuple[IntArray, IntArray, LocalBoxes]], *, with_cuts: bool
) -> tuple[IntArray, IntArray]:
    """All cut points of all tensors, ascending per tensor and with both ends; and where each tensor's begin, with the
    end of the last."""
    scale = int(extent.max(initial=0)) + 1
    base = np.arange(len(extent), dtype=np.int64) * scale
    keys = [base, base + extent]
    for lo, hi, box in bounds:
        coord, tensor = np.nonzero(box.numel > 0)
        keys += [base[tensor] + lo[coord, tensor], base[tensor] + hi[coord, tensor]]
        if with_cuts:
            keys.append(base[box.cut_tensor] + box.cut_row)
    points = np.unique(np.concatenate(keys))
    first = np.searchsorted(points, np.append(base, len(extent) * scale))
    return points % scale, first.astype(np.int64)


def local_boxes(tensors: tuple[LogicalTensor, ...], layout: Layout | DescribedLayout) -> LocalBoxes:
    """Raises CutError where a degree does not divide a cut dimension."""
    if isinstance(layout, DescribedLayout):
        return LocalBoxes(
            row_lo=layout.row_lo,
            row_hi=layout.row_hi,
            col_lo=layout.col_lo,
            col_hi=layout.col_hi,
            cut_tensor=layout.cut_tensor,
            cut_row=layout.cut_row,
        )
    coords = layout.coord_table()
    num_experts = 1 + max((t.expert for t in tensors if t.expert is not None), default=-1)
    if num_experts % layout.ep:
        raise ValueError(f"ep={layout.ep} does not divide {num_experts} experts")
    per_rank = max(num_experts // layout.ep, 1)
    shape = (len(coords), len(tensors))
    stages: dict[int, BoolArray] = {stage: np.zeros(len(tensors), dtype=bool) for stage in range(layout.pp)}
    for index, tensor in enumerate(tensors):
        for stage in layout.pipeline_stages(tensor):
            stages[stage][index] = True
    expert = np.array([-1 if t.expert is None else t.expert // per_rank for t in tensors], dtype=np.int64)
    matrix = np.array([matrix_shape(t.shape) for t in tensors], dtype=np.int64).reshape(-1, 2)
    # Tensors of one kind are cut alike; models have a few dozen kinds, whatever their size.
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.cut is not None:
            extent = tensor.shape[tensor.cut.dim]
            kinds.setdefault((tensor.cut, extent, tensor.expert is not None), []).append(index)
    row_lo, col_lo = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    row_hi = np.broadcast_to(matrix[:, 0], shape).copy()
    col_hi = np.broadcast_to(matrix[:, 1], shape).copy()
    for members in kinds.values():
        example = tensors[members[0]]
        cut = example.cut
        assert cut is not None
        if cut.dim > 1 or (cut.dim == 1 and len(example.shape) > 2):
            raise ValueError(f"{example.name}: cuts are along dim 0, or dim 1 of a matrix")
        degree, axis = (layout.expert_tp, 3) if example.expert is not None else (layout.tp, 1)
        ranges = np.array(
            [layout.interval(cut, example.shape[cut.dim], degree, rank) for rank in range(degree)], dtype=np.int64
        )
        of_coord = ranges[coords[:, axis]]
        lo, hi = (row_lo, row_hi) if cut.dim == 0 else (col_lo, col_hi)
        lo[:, members], hi[:, members] = of_coord[:, :1], of_coord[:, 1:]
    held = np.stack([stages[int(pp)] for pp in coords[:, 0]])
    held &= (expert[None, :] < 0) | (expert[None, :] == coords[:, 2:3])
    held &= (row_hi > row_lo) & (col_hi > col_lo)
    for bounds in (row_lo, row_hi, col_lo, col_hi):
        bounds[~held] = 0
    return LocalBoxes(row_lo=row_lo, row_hi=row_hi, col_lo=col_lo, col_hi=col_hi, cut_tensor=_NO_CUTS, cut_row=_NO_CUTS)


def held_cells(cells: Cells, boxes: LocalBoxes, coord: int) -> IntArray:
    """Numbers of the cells that lie inside ``coord``'s boxes (each lies inside or outside, never across)."""
    t = cells.tensor
    inside = (
        (cells.row_lo >= boxes.row_lo[coord, t])
        & (cells.row_hi <= boxes.row_hi[coord, t])
        & (cells.col_lo >= boxes.col_lo[coord, t])
        & (cells.col_hi <= boxes.col_hi[coord, t])
    )
    return np.flatnonzero(inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Ranges of one coordinate's local boxes (each in its own row-major order) that its ranks hold: number ``share[i]``
    (of ``shard_of_rank``; -1: all ranks of the coordinate) has ``start[i, tensor] .. stop[i, tensor]``; it may be
    empty."""

    share: IntArray
    start: IntArray  # [shares, tensors]
    stop: IntArray


def shares_of(
    tensors: Sequence[LogicalTensor],
    boxes: LocalBoxes,
    layout: Layout | DescribedLayout,
    slot: str,
    coord: int,
    absent: BoolArray | None = None,
) -> Shares:
    """``absent``: tensors that do not have the slot."""
    if isinstance(layout, DescribedLayout):
        start, stop = layout.held(slot)
        return Shares(share=np.array([-1]), start=start[coord : coord + 1], stop=stop[coord : coord + 1])
    numel = boxes.numel[coord]
    if absent is not None:
        numel = np.where(absent, 0, numel)
    rule = layout.shard_rule(slot)
    if rule == SHARD_NONE:
        return Shares(share=np.array([-1]), start=np.zeros((1, len(numel)), dtype=np.int64), stop=numel[None, :])
    present = np.unique(layout.shard_of_rank()[layout.coord_of_rank() == coord])
    rows, cols = boxes.rows[coord], boxes.cols[coord]
    if not layout.splits_experts:
        start, stop = _ranges(rule, layout.num_shards, present, numel, rows, cols)
        return Shares(share=present, start=start, stop=stop)
    is_expert = np.array([t.expert is not None for t in tensors], dtype=bool)
    dense, expert = present % layout.num_shards, present // layout.num_shards
    start, stop = _ranges(rule, layout.num_shards, dense, np.where(is_expert, 0, numel), rows, cols)
    own = _ranges(rule, layout.num_expert_shards, expert, np.where(is_expert, numel, 0), rows, cols)
    return Shares(share=present, start=np.where(is_expert, own[0], start), stop=np.where(is_expert, own[1], stop))


def _ranges(
    rule: str, num_shards: int, shards: IntArray, numel: IntArray, rows: IntArray, cols: IntArray
) -> tuple[IntArray, IntArray]:
    """(start, stop), both ``[len(shards), tensors]``."""
    first = 0 if rule != SHARD_FLAT else np.concatenate(([0], np.cumsum(numel)))[:-1]
    if rule == SHARD_FLAT:
        size = np.array([-(-int(numel.sum()) // num_shards)], dtype=np.int64)
    elif rule == SHARD_PARAM:
        size = -(-numel // num_shards)
    elif rule == SHARD_DIM0:
        size = -(-rows // num_shards) * cols
    else:
        raise ValueError(f"unknown shard rule {rule!r}")
    # In place: there may be thousands of shards of hundreds of tensors.
    start: IntArray = shards[:, None] * size - first
    stop = start + size
    for column in (start, stop):
        np.clip(column, 0, numel, out=column)
    return start, stop


def cell_offset(cells: Cells, boxes: LocalBoxes, coord: int, cell: IntArray, position: IntArray) -> IntArray:
    """How many elements of ``cell`` lie before ``position`` of the local box that contains it (both row-major).

    Broadcasts over ``cell`` and ``position``.
    """
    t = cells.tensor[cell]
    width = np.maximum(boxes.cols[coord, t], 1)
    row, col = position // width, position % width
    row0 = cells.row_lo[cell] - boxes.row_lo[coord, t]
    col0 = cells.col_lo[cell] - boxes.col_lo[coord, t]
    num_rows = cells.row_hi[cell] - cells.row_lo[cell]
    num_cols = cells.col_hi[cell] - cells.col_lo[cell]
    full_rows = np.clip(row - row0, 0, num_rows)
    in_row = np.where((row >= row0) & (row < row0 + num_rows), np.clip(col - col0, 0, num_cols), 0)
    offset: IntArray = full_rows * num_cols + in_row
    return offset
