"""coarse: tables that depend on a layout and a grid, not on devices. Remembered across plans: a search has few of
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from nereus.ir.arch import Arch, Lora
from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_NONE, SHARD_PARAM, Layout
from nereus.passes.coarse_grid import (
    BY_ROWS,
    EXPERTS,
    ByteArray,
    FloatArray,
    Grid,
    bit_sets,
    layer_runs,
    numel_table,
)
from nereus.passes.coarse_side import rank_coordinates

#: Arguments of ``numel_table``.
TableKey: TypeAlias = tuple[Arch, str, Lora | None, str, str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Elements of a grid. ``weigh``: of every byte of a bit set, per unit of the long axis; ``ends``: where each
    segment begins in the order of the model; ``once``: without the second place of a tied embedding."""

    weigh: FloatArray
    ends: FloatArray
    total: float
    once: float


@lru_cache(maxsize=1024)
def weights_of(grid: Grid, key: TableKey, ranged: bool) -> Weights:
    table = numel_table(*key)
    segments = grid.per_segment(table)
    elements = grid.elements(table)
    total = float(elements.sum())
    return Weights(
        weigh=grid.weigh(elements / max(total, 1.0) if ranged else elements),
        ends=np.concatenate(([0.0], np.cumsum(segments, dtype=np.float64))),
        total=total,
        once=total - float(segments[-1]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateShares:
    """Per rank: its interval of the long axis, its cells, and how many elements that is."""

    lo: FloatArray
    hi: FloatArray
    cells: ByteArray
    size: FloatArray


@lru_cache(maxsize=1024)
def coordinate_shares(
    grid: Grid, layout: Layout, rule: str, count: int, tied: bool, key: TableKey, ranged: bool
) -> CoordinateShares:
    """``count``: ranks of a shard group; ``ranged``: whether the long axis is the order of the model's layers."""
    expert = grid.component == EXPERTS
    coords = rank_coordinates(layout)
    share = coords.expert_shard if expert else coords.shard
    column = coords.expert if expert else coords.tp
    by_rows = rule in (SHARD_DIM0, SHARD_PARAM)
    lo, hi = np.zeros(layout.num_ranks), np.ones(layout.num_ranks)
    weights = weights_of(grid, key, ranged)
    if rule == SHARD_NONE:  # whoever shares other slots has this one whole
        share = np.zeros_like(share)
    if ranged:
        ends = weights.ends
        borders = np.zeros((layout.pp, 2))
        for stage, first, stop in layer_runs(layout):
            last = stop + (tied and stage == layout.pp - 1 and layout.pp > 1)
            borders[stage] = ends[first], ends[last]
        lo, hi = borders[coords.pp, 0], borders[coords.pp, 1]
        if rule == SHARD_FLAT:
            lo, hi = lo + (hi - lo) * share / count, lo + (hi - lo) * (share + 1) / count
    elif grid.component == BY_ROWS:  # all rows of the model on one axis, whatever cuts them
        parts = layout.tp * count
        lo, hi = (column * count + share) / parts, (column * count + share + 1) / parts
    elif rule != SHARD_NONE:
        lo, hi = share / count, (share + 1) / count
    row_shards = count if grid.component == BY_ROWS and by_rows and ranged else 1
    sets = bit_sets(grid, layout, tied, row_shards)
    cells = sets[coords.pp, column * row_shards + share if row_shards > 1 else column]
    size = weights.weigh[np.arange(len(weights.weigh)), cells].sum(axis=1) * (hi - lo)
    return CoordinateShares(lo, hi, cells, size)
