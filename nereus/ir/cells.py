"""Cells: the common refinement of every tensor-parallel cut of a model, and the 1-D geometry inside a cell.

Two layouts cut a logical tensor along one dimension each; together the cuts give *cells*, boxes that no (tp, pp)
coordinate of any layout divides. Inside a cell every further cut (ZeRO's flat ranges, FSDP's rows) is a cut of the
cell's row-major order: the cell lies inside one local box, so walking the local box in its order visits the cell's
elements in theirs. All regions of the compiler are therefore ``(cell, start, stop)`` intervals; they become boxes
only when a program is emitted.

Tensors are seen as matrices ``rows x cols`` (a vector is ``n x 1``; a cut along dim 0 cuts rows, along dim 1 columns).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_NONE, SHARD_PARAM, IntArray, Layout
from nereus.ir.tensor import LogicalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Columnar: one row a cell, in tensor order and along the cut dimension inside a tensor."""

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


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a tensor seen as a matrix: dim 0 by everything else; a vector is n x 1."""
    cols = 1
    for extent in shape[1:]:
        cols *= extent
    return shape[0], cols


def build_cells(tensors: tuple[LogicalTensor, ...], tp_degrees: Sequence[int]) -> Cells:
    """Refine ``tensors`` by the cuts of every degree in ``tp_degrees``."""
    degrees = sorted(set(tp_degrees))
    columns: list[tuple[int, int, int, int, int]] = []
    shapes = [matrix_shape(t.shape) for t in tensors]
    cached: dict[tuple[int, int, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        rows, cols = shapes[index]
        if tensor.cut is None:
            columns.append((index, 0, rows, 0, cols))
            continue
        extent = tensor.shape[tensor.cut.dim]
        if tensor.cut.dim > 1 or (tensor.cut.dim == 1 and len(tensor.shape) > 2):
            raise ValueError(f"{tensor.name}: cuts are along dim 0, or dim 1 of a matrix")
        key = (extent, tensor.cut.groups, tensor.cut.replicate)
        if key not in cached:
            points = {0, extent}
            for tp in degrees:
                for rank in range(tp):
                    points.update(tensor.cut.interval(extent, tp, rank))
            cached[key] = sorted(points)
        points_list = cached[key]
        for lo, hi in itertools.pairwise(points_list):
            columns.append((index, lo, hi, 0, cols) if tensor.cut.dim == 0 else (index, 0, rows, lo, hi))
    table = np.array(columns, dtype=np.int64).reshape(-1, 5)
    shape_table = np.array(shapes, dtype=np.int64).reshape(-1, 2)
    return Cells(
        tensors=tensors,
        tensor=table[:, 0],
        row_lo=table[:, 1],
        row_hi=table[:, 2],
        col_lo=table[:, 3],
        col_hi=table[:, 4],
        tensor_rows=shape_table[:, 0],
        tensor_cols=shape_table[:, 1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBoxes:
    """What one layout's (tp, pp) coordinates hold: arrays ``[num_coords, num_tensors]``; an absent tensor is an empty
    box."""

    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray

    @property
    def rows(self) -> IntArray:
        return self.row_hi - self.row_lo

    @property
    def cols(self) -> IntArray:
        return self.col_hi - self.col_lo

    @property
    def numel(self) -> IntArray:
        return self.rows * self.cols


def local_boxes(tensors: tuple[LogicalTensor, ...], layout: Layout) -> LocalBoxes:
    shape = (4, layout.pp, layout.tp, len(tensors))
    boxes = np.zeros(shape, dtype=np.int64)
    for index, tensor in enumerate(tensors):
        rows, cols = matrix_shape(tensor.shape)
        for stage in layout.pipeline_stages(tensor):
            if tensor.cut is None:
                boxes[1, stage, :, index], boxes[3, stage, :, index] = rows, cols
                continue
            extent = tensor.shape[tensor.cut.dim]
            ranges = np.array([tensor.cut.interval(extent, layout.tp, r) for r in range(layout.tp)], dtype=np.int64)
            cut, whole = (0, 2) if tensor.cut.dim == 0 else (2, 0)
            boxes[cut, stage, :, index], boxes[cut + 1, stage, :, index] = ranges[:, 0], ranges[:, 1]
            boxes[whole + 1, stage, :, index] = cols if tensor.cut.dim == 0 else rows
    flat = boxes.reshape(4, layout.num_coords, len(tensors))
    return LocalBoxes(row_lo=flat[0], row_hi=flat[1], col_lo=flat[2], col_hi=flat[3])


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
class ShardRanges:
    """Ranges of one coordinate's local boxes (each in its own row-major order) that every shard holds.

    ``bounds[tensor, j] .. bounds[tensor, j + 1]`` is shard j's range of the local box of ``tensor``; it may be empty.
    """

    bounds: IntArray  # [num_tensors, num_shards + 1]


def shard_ranges(boxes: LocalBoxes, coord: int, rule: str, num_shards: int) -> ShardRanges:
    numel = boxes.numel[coord]
    if rule == SHARD_NONE:
        raise ValueError("an unsharded slot has no shard ranges")
    steps = np.arange(num_shards + 1, dtype=np.int64)
    if rule == SHARD_FLAT:
        offsets = np.concatenate(([0], np.cumsum(numel)))
        per_shard = -(-int(offsets[-1]) // num_shards)
        bounds = steps[None, :] * per_shard - offsets[:-1, None]
    elif rule == SHARD_PARAM:
        bounds = steps[None, :] * (-(-numel // num_shards))[:, None]
    elif rule == SHARD_DIM0:
        rows_per_shard = -(-boxes.rows[coord] // num_shards)
        bounds = steps[None, :] * (rows_per_shard * boxes.cols[coord])[:, None]
    else:
        raise ValueError(f"unknown shard rule {rule!r}")
    return ShardRanges(bounds=np.clip(bounds, 0, numel[:, None]))


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
