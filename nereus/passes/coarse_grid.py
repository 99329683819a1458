"""coarse, one model: its elements as a small grid of layers x columns, and a coordinate's share of it as a bit set.

Rows of the grid are runs of layers that no pipeline border cuts; columns are equal parts of what tensor parallelism
cuts (as many as all degrees divide), of the kv heads where a degree exceeds them, and one for what every rank has. All
layers of a kind are alike, so a cell's weight is a count of elements in closed form.

A grid is of one *component* of a model. Where experts have coordinates of their own they are one. Where FSDP or ZeRO-3
cut every tensor by rows, tensors that tensor parallelism cuts by rows too are one: there both cuts lie on one axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt

from nereus.ir.arch import Arch, Lora
from nereus.ir.layout import IntArray, Layout
from nereus.models.slots import slot_applies
from nereus.models.tensors import logical_tensors

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]

ROWS, COLS, KV, WHOLE, EXPERT_ROWS, EXPERT_COLS = range(6)
#: Components.
ALL, BY_ROWS, REST, EXPERTS = "all", "by rows", "rest", "experts"
#: More columns than this are merged: degrees without a common multiple (tp 6 and 8 and 7) would make thousands.
MOST_COLUMNS = 256
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float64)


@lru_cache(maxsize=256)
def numel_table(arch: Arch, head: str, lora: Lora | None, slot: str, optimizer: str | None) -> IntArray:
    """Elements that have ``slot``: ``[kind of column, segment]``. Segments: embedding, every layer, the end, and a tied
    embedding's second place. Counted on one layer of each kind."""
    first_dense = 0 if arch.moe is None else min(arch.moe.first_dense_layers, arch.num_layers)
    few = min(arch.num_layers, first_dense + 1)
    table = np.zeros((6, arch.num_layers + 3), dtype=np.int64)
    for tensor in logical_tensors(replace(arch, num_layers=few), head, lora):
        if not slot_applies(slot, tensor, optimizer):
            continue
        if tensor.cut is None:
            kind = WHOLE
        elif tensor.expert is not None:
            kind = EXPERT_COLS if tensor.cut.dim else EXPERT_ROWS
        elif tensor.cut.replicate:
            kind = KV
        else:
            kind = COLS if tensor.cut.dim else ROWS
        if tensor.layer is not None:
            table[kind, tensor.layer + 1] += tensor.numel
            continue
        table[kind, 0 if tensor.first else -2] += tensor.numel
        if tensor.first and tensor.last:
            table[kind, -1] += tensor.numel
    table[:, few + 1 : -2] = table[:, few : few + 1]
    return table


@lru_cache(maxsize=1024)
def layer_runs(layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """(pipeline stage, first segment, end) of every run of layers, ends of the model included."""
    split = layout.chunks or layout.pp_split
    last = len(split) - 1
    found, first = [], 1
    for number, count in enumerate(split):
        begin, stop = first, first + count
        first = stop
        found.append((number % layout.pp, 0 if number == 0 else begin, stop + 1 if number == last else stop))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of one component of a model under some layouts."""

    component: str
    merged: bool  # experts are cut like everything else
    borders: tuple[int, ...]  # segments at which runs begin, and the end
    columns: tuple[int, int, int]  # of what is cut (experts: their numbers), of KV (inside an expert), of WHOLE

    @property
    def num_columns(self) -> int:
        return self.columns[0] * self.columns[1] if self.component == EXPERTS else sum(self.columns)

    @property
    def num_bytes(self) -> int:
        return -(-(len(self.borders) - 1) * self.num_columns // 8)

    def kinds(self, table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Elements per segment of each kind of column: cut, by kv head, whole."""
        rows, cols = table[ROWS], table[COLS]
        if self.component == EXPERTS:
            return table[EXPERT_ROWS] + table[EXPERT_COLS], table[EXPERT_ROWS] * 0, table[EXPERT_ROWS] * 0
        if self.merged:
            rows, cols = rows + table[EXPERT_ROWS], cols + table[EXPERT_COLS]
        whole, heads = table[WHOLE], table[KV]
        if not self.columns[1]:
            rows, heads = rows + heads, heads * 0
        if self.component == BY_ROWS:
            return rows, heads * 0, whole * 0
        return (cols if self.component == REST else rows + cols), heads, whole

    def per_segment(self, table: IntArray) -> IntArray:
        cut, heads, whole = self.kinds(table)
        return cut + heads + whole

    def elements(self, table: IntArray) -> FloatArray:
        """Elements of each cell."""
        starts = np.array(self.borders[:-1])
        kinds = [np.add.reduceat(kind, starts).astype(np.float64) for kind in self.kinds(table)]
        if self.component == EXPERTS:
            return np.repeat(kinds[0] / self.num_columns, self.num_columns)
        each = [np.repeat((k / n)[:, None], n, axis=1) for k, n in zip(kinds, self.columns, strict=True) if n]
        return np.concatenate(each, axis=1).reshape(-1)

    def weigh(self, elements: FloatArray) -> FloatArray:
        """``[num_bytes, 256]``: elements of every byte of a bit set."""
        padded = np.zeros(self.num_bytes * 8)
        padded[: len(elements)] = elements
        return padded.reshape(self.num_bytes, 8) @ _BITS.T


@lru_cache(maxsize=1024)
def grid_of(
    layouts: tuple[Layout, ...],
    row_shards: tuple[int, ...],
    kv_heads: int,
    num_segments: int,
    component: str,
    *,
    merged: bool,
    rows: bool,
) -> Grid:
    """``rows``: whether pipeline borders make rows (where shares are ranges of layers, they do not). ``row_shards``:
    with component BY_ROWS and not ``rows``, how many shares each layout's columns are cut into."""
    borders = {0, num_segments}
    if rows:
        for layout in layouts:
            borders |= {first for _, first, _ in layer_runs(layout)}
        borders.add(num_segments - 1)
    copied = component != EXPERTS and any(x.tp > kv_heads for x in layouts)
    if component == EXPERTS:
        inside = lcm(*(x.expert_tp for x in layouts))
        columns = (min(lcm(*(x.ep for x in layouts)), max(1, MOST_COLUMNS // inside)), inside, 0)
    elif component == BY_ROWS:
        degrees = [x.tp * n for x, n in zip(layouts, row_shards, strict=True)]
        columns = (1 if rows else min(lcm(*degrees), MOST_COLUMNS), 0, 0)
    else:
        columns = (min(lcm(*(x.tp for x in layouts)), MOST_COLUMNS), kv_heads if copied else 0, 1)
    return Grid(component, merged, tuple(sorted(borders)), columns)


@lru_cache(maxsize=1024)
def bit_sets(grid: Grid, layout: Layout, second_embedding: bool, row_shards: int = 1) -> ByteArray:
    """``[pp, columns of the layout, num_bytes]``: cells of each coordinate. ``second_embedding``: whether the last
    pipeline stage has one (a tied embedding). With ``row_shards``, columns of the layout are tp * row_shards."""
    columns = _columns(grid, layout, row_shards)
    rows = np.zeros((layout.pp, len(grid.borders) - 1), dtype=bool)
    starts = np.array(grid.borders[:-1])
    if len(starts) == 1:
        rows[:] = True
    else:
        for stage, first, stop in layer_runs(layout):
            rows[stage] |= (starts >= first) & (starts < stop)
        rows[-1, -1] = second_embedding
    cells = rows[:, None, :, None] & columns[None, :, None, :]
    return np.packbits(cells.reshape(layout.pp, len(columns), -1), axis=2)


def _columns(grid: Grid, layout: Layout, row_shards: int) -> npt.NDArray[np.bool_]:
    if grid.component == EXPERTS:
        outer = _equal(layout.ep, grid.columns[0])
        inner = _equal(layout.expert_tp, grid.columns[1])
        both = outer[:, None, :, None] & inner[None, :, None, :]
        return both.reshape(layout.ep * layout.expert_tp, -1)
    if grid.component == BY_ROWS:
        if grid.columns[0] == 1:
            return np.ones((layout.tp * row_shards, 1), dtype=bool)
        return _equal(layout.tp * row_shards, grid.columns[0])
    parts = [_equal(layout.tp, grid.columns[0])]
    if grid.columns[1]:
        parts.append(_equal(layout.tp, grid.columns[1]))
    parts.append(np.ones((layout.tp, 1), dtype=bool))
    return np.concatenate(parts, axis=1)


def _equal(degree: int, columns: int) -> npt.NDArray[np.bool_]:
    """``[degree, columns]``: which columns each rank of ``degree`` has; with more ranks than columns they share."""
    rank, column = np.arange(degree)[:, None], np.arange(columns)[None, :]
    if degree > columns:
        return np.asarray(rank * columns // degree == column)
    return np.asarray(column * degree // columns == rank)
