"""Every element of a model as a number: what ranks hold and what moves carry become segments of one line.

The document's cells are taken as coordinates only after they were shown to tile every tensor and to be cut by no rank's
box: then walking a box row by row visits each cell's elements in the cell's own order, so a range of a box is a few
segments, one a cell.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.tensor import LogicalTensor, matrix_shape
from nereus.verify.copies import SlotKind, StateCopy
from nereus.verify.document import Grid
from nereus.verify.finding import Violation
from nereus.verify.parts import Boxes, RankClass
from nereus.verify.segments import BoolArray, IntArray, Segments, ints
from nereus.verify.world import World


class Ground:
    """Cells of one model. ``first``: number of each cell's first element; ``stride``: one more than all elements, so
    that segments of two places never touch."""

    def __init__(self, model: str, grid: Grid, tensors: tuple[LogicalTensor, ...]) -> None:
        self.model, self.grid = model, grid
        if grid.tensors != tuple(t.name for t in tensors):
            raise Violation(f"{model}: the document's tensors are not the model's")
        _check_tiling(model, grid, tensors)
        numel = grid.numel
        self.first: IntArray = np.cumsum(numel) - numel
        self.total = int(numel.sum())
        self.stride = self.total + 1
        self._inside: dict[int, tuple[Boxes, IntArray]] = {}

    def cells_in(self, boxes: Boxes) -> IntArray:
        """Numbers of the cells inside ``boxes``. Violation where one lies across a border."""
        known = self._inside.get(id(boxes))
        if known is not None:
            return known[1]
        grid, t = self.grid, self.grid.tensor
        inside = (grid.row_lo >= boxes.row_lo[t]) & (grid.row_hi <= boxes.row_hi[t])
        inside &= (grid.col_lo >= boxes.col_lo[t]) & (grid.col_hi <= boxes.col_hi[t])
        cells = np.flatnonzero(inside)
        covered = np.bincount(t[cells], weights=grid.numel[cells], minlength=len(boxes.row_lo)).astype(np.int64)
        wrong = np.flatnonzero(covered != boxes.numel)
        if len(wrong):
            raise Violation(
                f"{self.model} {grid.tensors[int(wrong[0])]}: a cell lies across the border of a rank's part"
            )
        self._inside[id(boxes)] = (boxes, cells)
        return cells

    def segments_of(self, boxes: Boxes, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(tensor, lo, hi) of ranges ``start .. stop`` of every tensor's box."""
        cells = self.cells_in(boxes)
        tensor = self.grid.tensor[cells]
        some = stop[tensor] > start[tensor]
        cells, tensor = cells[some], tensor[some]
        lo, hi = (self.first[cells] + self._before(cells, tensor, boxes, bound[tensor]) for bound in (start, stop))
        some = hi > lo
        return tensor[some], lo[some], hi[some]

    def _before(self, cells: IntArray, tensor: IntArray, boxes: Boxes, position: IntArray) -> IntArray:
        """Elements of each cell that come before ``position`` of the box."""
        grid = self.grid
        row, col = np.divmod(position, boxes.cols[tensor])
        row += boxes.row_lo[tensor]
        col += boxes.col_lo[tensor]
        width = grid.col_hi[cells] - grid.col_lo[cells]
        above = np.clip(row, grid.row_lo[cells], grid.row_hi[cells]) - grid.row_lo[cells]
        left = np.clip(col, grid.col_lo[cells], grid.col_hi[cells]) - grid.col_lo[cells]
        return above * width + np.where((row >= grid.row_lo[cells]) & (row < grid.row_hi[cells]), left, 0)

    def name(self, element: int) -> str:
        """Tensor and position of an element."""
        cell = int(np.searchsorted(self.first, element, side="right")) - 1
        grid = self.grid
        row, col = divmod(element - int(self.first[cell]), int(grid.col_hi[cell] - grid.col_lo[cell]))
        at = f"[{int(grid.row_lo[cell]) + row}, {int(grid.col_lo[cell]) + col}]"
        return f"{self.model} {grid.tensors[int(grid.tensor[cell])]}{at}"


def _check_tiling(model: str, grid: Grid, tensors: tuple[LogicalTensor, ...]) -> None:
    """Cells come in bands of rows from the first to the last, each band from the first column to the last."""
    shapes = ints([matrix_shape(t.shape) for t in tensors]).reshape(-1, 2)
    t = grid.tensor
    new_tensor = np.concatenate(([True], t[1:] != t[:-1], [True]))
    full = grid.col_hi == shapes[t, 1]
    new_band = np.concatenate(([True], full))  # before each cell, and at the end
    first_row = np.where(new_tensor[:-1], 0, np.concatenate(([0], grid.row_hi[:-1])))
    same_row = np.concatenate(([0], grid.row_lo[:-1]))
    same_end = np.concatenate(([0], grid.row_hi[:-1]))
    before = np.concatenate(([0], grid.col_hi[:-1]))
    band = new_band[:-1] | new_tensor[:-1]
    good = (grid.row_hi > grid.row_lo) & (grid.col_hi > grid.col_lo)
    good &= np.where(band, (grid.row_lo == first_row) & (grid.col_lo == 0), grid.col_lo == before)
    good &= band | ((grid.row_lo == same_row) & (grid.row_hi == same_end))
    good &= ~new_tensor[1:] | (full & (grid.row_hi == shapes[t, 0]))
    whole = np.array_equal(t[new_tensor[:-1]], np.arange(len(tensors)))
    if not bool(good.all()) or not whole:
        at = 0 if bool(good.all()) else int(np.flatnonzero(~good)[0])
        raise Violation(f"{model}: cells do not tile the tensors (at cell {at})")


class Holding:
    """Segments of one slot of one copy, place by place: rows (place, tensor, lo, hi) without places that are lost."""

    __slots__ = ("hi", "lo", "place", "tensor")

    def __init__(self, place: IntArray, tensor: IntArray, lo: IntArray, hi: IntArray) -> None:
        self.place, self.tensor, self.lo, self.hi = place, tensor, lo, hi

    def keys(self, stride: int) -> tuple[IntArray, IntArray]:
        return self.place * stride + self.lo, self.place * stride + self.hi


class Holdings:
    """What all copies of one plan hold, worked out once per copy and kind of share."""

    def __init__(self, copies: tuple[StateCopy, ...], world: World, grounds: dict[str, Ground]) -> None:
        self.copies, self.world, self.grounds = copies, world, grounds
        self._found: dict[tuple[object, ...], Holding] = {}
        self._shares: dict[tuple[object, ...], tuple[IntArray, IntArray]] = {}

    def of_model(self, model: str) -> tuple[StateCopy, ...]:
        return tuple(copy for copy in self.copies if copy.model == model)

    def alike(self, copy: StateCopy, slot: str) -> tuple[object, ...]:
        """Equal for slots of a copy that are spread alike."""
        return (id(copy), copy.parts.rule(slot), copy.present[slot].tobytes())

    def share(self, copy: StateCopy, rank_class: RankClass, slot: str) -> tuple[IntArray, IntArray]:
        key = (id(rank_class), *self.alike(copy, slot))
        if key not in self._shares:
            self._shares[key] = copy.parts.share(rank_class, slot, copy.present[slot])
        return self._shares[key]

    def in_host(self, copy: StateCopy, rank_class: RankClass, kind: SlotKind) -> BoolArray:
        """Per tensor: whether the class's part lies in host memory."""
        start, stop = self.share(copy, rank_class, kind.name)
        return copy.parts.in_host(stop - start, copy.slots[kind])

    def holding(self, copy: StateCopy, kind: SlotKind) -> Holding:
        key = (*self.alike(copy, kind.name), copy.slots[kind])
        if key not in self._found:
            self._found[key] = self._holding(copy, kind)
        return self._found[key]

    def _holding(self, copy: StateCopy, kind: SlotKind) -> Holding:
        ground = self.grounds[copy.model]
        columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        for rank_class in copy.parts.classes:
            devices = copy.device_of_rank[rank_class.ranks]
            devices = devices[self.world.alive[devices]]
            if not len(devices):
                continue
            start, stop = self.share(copy, rank_class, kind.name)
            tensor, lo, hi = ground.segments_of(rank_class.boxes, start, stop)
            offset = np.where(self.in_host(copy, rank_class, kind), self.world.num_devices, 0)[tensor]
            place = np.repeat(devices, len(lo)) + np.tile(offset, len(devices))
            tensor, lo, hi = (np.tile(column, len(devices)) for column in (tensor, lo, hi))
            columns.append((place, tensor, lo, hi))
        if not columns:
            empty = np.zeros(0, dtype=np.int64)
            return Holding(empty, empty, empty, empty)
        return Holding(*(np.concatenate([c[i] for c in columns]) for i in range(4)))

    def line(self, model: str, kind: SlotKind, *, only: tuple[StateCopy, ...] | None = None) -> Segments:
        """All places' segments of a slot on one line: element e at place p is ``p * stride + e``."""
        chosen = [c for c in (self.of_model(model) if only is None else only) if kind in c.slots]
        stride = self.grounds[model].stride
        keys = [self.holding(copy, kind).keys(stride) for copy in chosen]
        if not keys:
            empty = np.zeros(0, dtype=np.int64)
            return Segments(empty, empty)
        return Segments.union(np.concatenate([k[0] for k in keys]), np.concatenate([k[1] for k in keys]))
