"""Stripes: what route decides, as ranges of a region's elements, and their translation into moves.

A relay sends on, slice by slice, what it receives; so it must carry exactly what one move brought. Where a relay wants
only a part of a stripe, the stripe is cut there, and with it whatever else relays it. Most stripes are carried on as
they are: only the families (a stripe and all that relays it, directly or not) in which one is not are looked at one by
one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.intervals import Intervals
from nereus.ir.layout import IntArray
from nereus.ir.moves import Moves, Regions
from nereus.ir.transition import Move
from nereus.passes.atoms import AtomTable
from nereus.passes.lists import concatenated


class Stripe(NamedTuple):
    """Elements ``lo..hi`` of region ``region`` (in its own order) from place ``src`` to place ``dst``; ``parent``:
    the earlier stripe that brought (at least) them to ``src``, -1 where ``src`` holds them. ``link``: position in
    ``LINKS``."""

    src: int
    dst: int
    table: int
    region: int
    lo: int
    hi: int
    link: int
    parent: int


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Stripes as columns."""

    src: IntArray
    dst: IntArray
    table: IntArray
    region: IntArray
    lo: IntArray
    hi: IntArray
    link: IntArray
    parent: IntArray


class Stripes:
    """Those that were decided so far, one by one or many at once."""

    def __init__(self) -> None:
        self._blocks: list[IntArray] = []  # [stripes, fields]
        self._before = 0  # stripes in blocks
        self._last: list[Stripe] = []

    def __len__(self) -> int:
        return self._before + len(self._last)

    def add(self, stripe: Stripe) -> int:
        """Its number."""
        self._last.append(stripe)
        return self._before + len(self._last) - 1

    def extend(self, *fields: IntArray | int) -> int:
        """Many, as the fields of ``Stripe``; the number of the first."""
        self._close()
        first = self._before
        self._append(np.stack(np.broadcast_arrays(*fields), axis=1))
        return first

    def since(self, number: int) -> list[Stripe]:
        """From ``number`` on, all of which were added one by one."""
        return self._last[number - self._before :]

    def columns(self) -> Columns:
        self._close()
        empty = np.zeros((0, len(Stripe._fields)), dtype=np.int64)
        return Columns(*np.concatenate([empty, *self._blocks]).T.copy())

    def _close(self) -> None:
        width = len(Stripe._fields)
        flat = np.fromiter(chain.from_iterable(self._last), dtype=np.int64, count=width * len(self._last))
        self._append(flat.reshape(-1, width))
        self._last = []

    def _append(self, block: IntArray) -> None:
        self._blocks.append(block)
        self._before += len(block)


def to_moves(columns: Columns, regions: Sequence[tuple[int, IntArray]], tables: Sequence[AtomTable]) -> Moves:
    """``regions``: (table, interval numbers of it) in the region's own order."""
    cuts, above = _cuts(columns)
    pieces = np.ones(len(columns.src), dtype=np.int64)
    for number, points in cuts.items():
        pieces[number] += len(points)
    owner, within = runs(pieces)
    first = np.cumsum(pieces) - pieces
    lo, hi = columns.lo[owner], columns.hi[owner]
    for number, points in cuts.items():
        at = int(first[number])
        lo[at + 1 : at + 1 + len(points)] = hi[at : at + len(points)] = points
    # The parent may be cut before this stripe begins.
    skipped = np.zeros(len(pieces), dtype=np.int64)
    for number, count in above.items():
        skipped[number] = count
    parent = columns.parent[owner]
    after = (first[parent] + skipped[owner] + within)[parent >= 0]
    region, carried = _cut_out(_laid_out(regions, tables), columns.region[owner], lo, hi)
    widths = np.array([of.element_bytes for of in tables], dtype=np.int64)
    table = columns.table[owner]
    return Moves(
        src=columns.src[owner],
        dst=columns.dst[owner],
        table=table,
        region=region,
        num_bytes=(hi - lo) * widths[table],
        link=columns.link[owner],
        slots=np.full(len(owner), -1, dtype=np.int64),
        after_first=np.concatenate(([0], np.cumsum(parent >= 0))),
        after=after,
        regions=carried,
    )


def _cuts(stripes: Columns) -> tuple[dict[int, Sequence[int]], dict[int, int]]:
    """Where stripes are cut inside, ascending: at the borders and cuts of whatever relays them, and where their own
    parent is cut. And how many cuts of its parent lie before a stripe. Only where there are any."""
    parent = stripes.parent
    relays = parent >= 0
    differs = relays & ((stripes.lo != stripes.lo[parent]) | (stripes.hi != stripes.hi[parent]))
    if not differs.any():
        return {}, {}
    root = np.where(relays, parent, np.arange(len(parent)))
    while not np.array_equal(root, root[root]):
        root = root[root]
    apart = np.zeros(len(parent), dtype=bool)
    apart[root[differs]] = True
    family = np.flatnonzero(apart[root]).tolist()
    lows, highs, parents = stripes.lo.tolist(), stripes.hi.tolist(), parent.tolist()
    found: dict[int, set[int]] = {}
    for number in reversed(family):
        up, lo, hi = parents[number], lows[number], highs[number]
        if up >= 0:
            inner = found.get(number)
            if inner is not None or lo != lows[up] or hi != highs[up]:
                points = (lo, hi, *(inner or ()))
                found.setdefault(up, set()).update(p for p in points if lows[up] < p < highs[up])
    cuts: dict[int, Sequence[int]] = {}
    above: dict[int, int] = {}
    for number in family:
        own = found.get(number, set())
        up_cuts = cuts.get(parents[number], ())
        if up_cuts:
            before = bisect_right(up_cuts, lows[number])
            above[number] = before
            own |= {*up_cuts[before : bisect_left(up_cuts, highs[number])]}
        if own:
            cuts[number] = sorted(own)
    return cuts, above


def _laid_out(regions: Sequence[tuple[int, IntArray]], tables: Sequence[AtomTable]) -> Regions:
    offset = np.cumsum([0, *(len(table.cell) for table in tables)])
    counts = np.array([len(rows) for _, rows in regions], dtype=np.int64)
    of_table = offset[[table for table, _ in regions]] if regions else counts
    row = concatenated(rows for _, rows in regions) + np.repeat(of_table, counts)
    columns = (concatenated(getattr(table, name) for table in tables)[row] for name in ("cell", "start", "stop"))
    return Regions(np.concatenate(([0], np.cumsum(counts))), *columns)


def _cut_out(regions: Regions, region: IntArray, lo: IntArray, hi: IntArray) -> tuple[IntArray, Regions]:
    """Elements ``lo..hi`` of each ``region``: the number of each result, and the results, equal ones once, each
    sorted by place (a region may be laid out in another order)."""
    # Positions in all regions laid end to end: a pair of them names a result.
    begin = np.concatenate(([0], np.cumsum(regions.numel)))
    lows, low = np.unique(begin[region] + lo, return_inverse=True)
    highs, high = np.unique(begin[region] + hi, return_inverse=True)
    _, example, number = np.unique(low * len(highs) + high, return_index=True, return_inverse=True)
    at, to = lows[low[example]], highs[high[example]]
    size = regions.stop - regions.start
    ends = np.cumsum(size)
    first = np.searchsorted(ends, at, side="right")
    last = np.searchsorted(ends - size, to, side="left")
    owner, within = runs(last - first)
    row = first[owner] + within
    cell = regions.cell[row]
    start = regions.start[row] + np.maximum(at[owner] - (ends - size)[row], 0)
    stop = regions.stop[row] - np.maximum(ends[row] - to[owner], 0)
    order = np.lexsort((start, cell, owner))
    bounds = np.concatenate(([0], np.cumsum(last - first)))
    return number, Regions(bounds, cell[order], start[order], stop[order])


def cut_moves(moves: Moves, most_bytes: int) -> Moves:
    """The same moves cut into equal parts of at most ``most_bytes``. A relay is cut as what it relays."""
    result: list[Move] = []
    parts: dict[tuple[int, int], list[Intervals]] = {}
    children: list[range] = []
    for move in moves:
        count = max(1, -(-move.num_bytes // most_bytes))
        if count == 1:
            pieces = [move.intervals]
        else:
            key = (id(move.intervals), count)
            if key not in parts:
                parts[key] = move.intervals.split(count)
            pieces = parts[key]
        width = move.num_bytes // move.intervals.numel
        first = len(result)
        for number, piece in enumerate(pieces):
            if len(move.after) == 1 and len(children[move.after[0]]) == len(pieces):
                after: tuple[int, ...] = (children[move.after[0]][number],)
            else:
                after = tuple(child for before in move.after for child in children[before])
            result.append(
                Move(move.src, move.dst, move.table, piece, piece.numel * width, move.link, after, move.slots)
            )
        children.append(range(first, len(result)))
    return Moves.of(result)
