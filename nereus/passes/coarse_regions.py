"""coarse: what groups of ranks (a GPU's, a node's) want and lack, for all groups at once.

A rank's share is an interval of one long axis times a set of grid cells. The long axis is the order of the model where
a slot is cut into ranges over layers (ZeRO's flat buffers); else it is the part of every tensor that a share has
(FSDP's rows), and 0 .. 1 where nothing is sharded. Unions are exact on these: per group the intervals' ends are sorted, and
between two ends the cells of whoever covers them are or-ed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import IntArray
from nereus.passes.coarse_grid import ByteArray, FloatArray

BoolArray = npt.NDArray[np.bool_]
#: From this many groups on, equal ones are looked for first.
MANY_GROUPS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Of the ranks of one state set: ``cells[kind]`` is the bit set of rank i with ``kind = of_rank[i]``. Ranks on
    lost machines have place -1."""

    lo: FloatArray
    hi: FloatArray
    cells: ByteArray
    place: IntArray
    node: IntArray

    def alive(self) -> Shares:
        keep = self.place >= 0
        if bool(keep.all()):
            return self
        return Shares(self.lo[keep], self.hi[keep], self.cells[keep], self.place[keep], self.node[keep])

    def take(self, keep: BoolArray) -> Shares:
        return Shares(self.lo[keep], self.hi[keep], self.cells[keep], self.place[keep], self.node[keep])


@dataclass(frozen=True, slots=True, eq=False)
class Lack:
    """Elements per group: wanted, held, wanted and not held."""

    wanted: FloatArray
    held: FloatArray
    lacked: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    lo: FloatArray  # [groups, most members of one]
    hi: FloatArray
    cells: ByteArray  # [groups, members, bytes]


def lack(
    wanted: Sequence[Shares], held: Sequence[Shares], num_groups: int, weigh: FloatArray, *, by_node: bool
) -> Lack:
    """``weigh``: elements of every byte of a bit set, per unit of the long axis."""
    num_bytes = len(weigh)
    new = _pack(wanted, num_groups, num_bytes, by_node)
    old = _pack(held, num_groups, num_bytes, by_node)
    inverse: IntArray | None = None
    if num_groups >= MANY_GROUPS:
        first, inverse = _distinct(new, old)
        if 2 * len(first) <= num_groups:
            new, old = (_Packed(p.lo[first], p.hi[first], p.cells[first]) for p in (new, old))
        else:
            inverse = None
    ends = np.concatenate((new.lo, new.hi, old.lo, old.hi), axis=1)
    if ends.shape[1] and bool((ends == ends[0, 0]).all() or _two_valued(ends)):
        ends = np.broadcast_to(np.array([ends.min(), ends.max()]), (len(ends), 2))
    else:
        ends = np.sort(ends, axis=1)
    begin, length = ends[:, :-1], ends[:, 1:] - ends[:, :-1]
    want, have = _covered(new, begin, ends[:, 1:]), _covered(old, begin, ends[:, 1:])
    which = np.arange(num_bytes)

    def measure(cells: ByteArray) -> FloatArray:
        found: FloatArray = (weigh[which, cells].sum(axis=2) * length).sum(axis=1)
        return found if inverse is None else found[inverse]

    return Lack(measure(want), measure(have), measure(want & ~have))


def _two_valued(ends: FloatArray) -> bool:
    low, high = ends.min(), ends.max()
    return bool(((ends == low) | (ends == high)).all())


def _pack(shares: Sequence[Shares], num_groups: int, num_bytes: int, by_node: bool) -> _Packed:
    groups = [s.node if by_node else s.place for s in shares]
    if not groups:
        return _Packed(
            np.zeros((num_groups, 0)), np.zeros((num_groups, 0)), np.zeros((num_groups, 0, num_bytes), dtype=np.uint8)
        )
    group = groups[0] if len(groups) == 1 else np.concatenate(groups)
    lo, hi, cells = (
        np.concatenate([getattr(s, name) for s in shares]) if len(shares) > 1 else getattr(shares[0], name)
        for name in ("lo", "hi", "cells")
    )
    counts = np.bincount(group, minlength=num_groups)
    most = int(counts.max(initial=0))
    if most <= 1:
        column: IntArray = np.zeros(len(group), dtype=np.int64)
    else:
        order = np.argsort(group, kind="stable")
        column = np.empty(len(group), dtype=np.int64)
        column[order] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Where a group has fewer members than others the rest are empty sets; their ends must not make new intervals.
    filler = float(lo.min(initial=0.0)) if len(lo) else 0.0
    packed = _Packed(
        np.full((num_groups, most), filler),
        np.full((num_groups, most), filler),
        np.zeros((num_groups, most, num_bytes), dtype=np.uint8),
    )
    at = group * most + column
    packed.lo.reshape(-1)[at] = lo
    packed.hi.reshape(-1)[at] = hi
    packed.cells.reshape(-1, num_bytes)[at] = cells
    return packed


def _covered(packed: _Packed, begin: FloatArray, end: FloatArray) -> ByteArray:
    """``[groups, intervals, bytes]``: cells of all members that cover each interval."""
    num_groups, num_intervals = begin.shape
    found = np.zeros((num_groups, num_intervals, packed.cells.shape[2]), dtype=np.uint8)
    for member in range(packed.lo.shape[1]):
        covers = (packed.lo[:, member, None] <= begin) & (packed.hi[:, member, None] >= end)
        found |= packed.cells[:, member, None, :] * covers[:, :, None]
    return found


def _distinct(*sides: _Packed) -> tuple[IntArray, IntArray]:
    """First of every kind of group, and the kind of each."""
    key = np.zeros(len(sides[0].lo))
    salt = np.random.default_rng(7)
    for side in sides:
        for values in (side.lo, side.hi, side.cells.reshape(len(side.cells), -1)):
            key += values @ salt.random(values.shape[1])
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse
