"""Stripes: what route decides, as ranges of a region's elements, and their translation into moves.

A relay sends on, slice by slice, what it receives; so it must carry exactly what one move brought. Where a relay wants
only a part of a stripe, the stripe is cut there, and with it whatever else relays it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nereus.ir.intervals import Intervals
from nereus.ir.transition import Move


class Stripe(NamedTuple):
    """Elements ``lo..hi`` of region ``region`` (in its own order) from place ``src`` to place ``dst``; ``parent``:
    the earlier stripe that brought (at least) them to ``src``, -1 where ``src`` holds them."""

    src: int
    dst: int
    table: int
    region: int
    lo: int
    hi: int
    link: str
    parent: int


def to_moves(stripes: Sequence[Stripe], regions: Sequence[Intervals], widths: Sequence[int]) -> list[Move]:
    """``widths``: bytes per element of each table."""
    cuts = _cuts(stripes)
    by_region: dict[int, set[int]] = {}
    for stripe, inner in zip(stripes, cuts, strict=True):
        by_region.setdefault(stripe.region, set()).update((stripe.lo, stripe.hi, *inner))
    parts = {region: _Parts(regions[region], sorted(points)) for region, points in by_region.items()}
    moves: list[Move] = []
    first: list[int] = []  # per stripe: its first move; the others follow
    for stripe, inner in zip(stripes, cuts, strict=True):
        first.append(len(moves))
        points = (stripe.lo, *inner, stripe.hi)
        above = -1
        if stripe.parent >= 0:
            # The parent is cut at least where this stripe begins: count its cuts up to there.
            above = first[stripe.parent] + bisect_right(cuts[stripe.parent], stripe.lo)
        for offset in range(len(points) - 1):
            lo, hi = points[offset], points[offset + 1]
            intervals = parts[stripe.region].between(lo, hi)
            after = (above + offset,) if above >= 0 else ()
            num_bytes = (hi - lo) * widths[stripe.table]
            moves.append(Move(stripe.src, stripe.dst, stripe.table, intervals, num_bytes, stripe.link, after))
    return moves


def _cuts(stripes: Sequence[Stripe]) -> list[Sequence[int]]:
    """Where each stripe is cut inside, ascending: at the borders and cuts of whatever relays it, and where its own
    parent is cut."""
    found: dict[int, set[int]] = {}
    for number in range(len(stripes) - 1, -1, -1):
        stripe = stripes[number]
        if stripe.parent >= 0:
            above = stripes[stripe.parent]
            inner = found.get(number)
            if inner is not None or stripe.lo != above.lo or stripe.hi != above.hi:
                points = (stripe.lo, stripe.hi, *(inner or ()))
                found.setdefault(stripe.parent, set()).update(p for p in points if above.lo < p < above.hi)
    result: list[Sequence[int]] = []
    for number, stripe in enumerate(stripes):
        cuts: Sequence[int] = sorted(found[number]) if number in found else ()
        above_cuts = result[stripe.parent] if stripe.parent >= 0 else ()
        if above_cuts:
            inside = above_cuts[bisect_right(above_cuts, stripe.lo) : bisect_left(above_cuts, stripe.hi)]
            if inside:
                cuts = sorted({*cuts, *inside})
        result.append(cuts)
    return result


class _Parts:
    """A region cut at all points that its stripes need; whatever lies between two of them is one object, however many
    moves carry it."""

    def __init__(self, region: Intervals, points: list[int]) -> None:
        numel = region.numel
        inner = [p for p in points if 0 < p < numel]
        self.region = region
        self.begin = [0, *inner]
        self.pieces = region.cut_at(inner) if inner else [region]
        self.known: dict[tuple[int, int], Intervals] = {}

    def between(self, lo: int, hi: int) -> Intervals:
        key = (lo, hi)
        if key not in self.known:
            first, last = bisect_left(self.begin, lo), bisect_left(self.begin, hi)
            whole = last - first == len(self.pieces)
            if whole:
                self.known[key] = _ascending(self.region)
            elif last - first == 1:
                self.known[key] = _ascending(self.pieces[first])
            else:
                piece = self.region.cut_at([p for p in (lo, hi) if 0 < p < self.region.numel])[lo > 0]
                self.known[key] = _ascending(piece)
        return self.known[key]


def _ascending(part: Intervals) -> Intervals:
    """Sorted by place: a region may be laid out in another order."""
    if bool((np.diff(part.cell) > 0).all()):
        return part
    order = np.lexsort((part.start, part.cell))
    return Intervals(part.cell[order], part.start[order], part.stop[order])


def cut_moves(moves: Sequence[Move], most_bytes: int) -> list[Move]:
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
    return result
