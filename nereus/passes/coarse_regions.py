"""coarse: what groups of ranks (a GPU's, a node's) want and lack, for all groups at once.

A rank's share is an interval of one long axis times a set of grid cells. The long axis is the order of the model where
a slot is cut into ranges over layers (ZeRO's flat buffers); else it is the part of every tensor that a share has
(FSDP's rows), and 0 .. 1 where nothing is sharded. Unions are exact on these: per group the intervals' ends are sorted,
and between two ends the cells of whoever covers them are or-ed. Nodes that want and hold alike are treated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import IntArray
from nereus.passes.coarse_grid import ByteArray, FloatArray

BoolArray = npt.NDArray[np.bool_]
#: From this many groups on, equal ones are looked for first.
MANY_GROUPS = 8
_SALT = np.random.default_rng(7).random(4096)


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Of the ranks of one state set: ``cells[kind]`` is the bit set of rank i with ``kind = of_rank[i]``. Ranks on
    lost machines have place -1."""

    lo: FloatArray
    hi: FloatArray
    cells: ByteArray
    size: FloatArray  # elements
    place: IntArray
    node: IntArray
    #: Where the same per node is remembered, if these are all ranks of a plan's copy: see ``joined``.
    memo: dict[object, Any] | None = None
    key: object = None

    def alive(self) -> Shares:
        if not len(self.place) or int(self.place.min()) >= 0:
            return self
        return self.take(self.place >= 0)

    def take(self, keep: BoolArray | IntArray) -> Shares:
        return Shares(
            self.lo[keep], self.hi[keep], self.cells[keep], self.size[keep], self.place[keep], self.node[keep]
        )

    def joined(self, num_nodes: int) -> Joined:
        if self.memo is None:
            return self._joined(num_nodes)
        key = (num_nodes, self.key)
        if key not in self.memo:
            self.memo[key] = self._joined(num_nodes)
        found: Joined = self.memo[key]
        return found

    def alone(self) -> bool:
        """Whether no two ranks of a node have the same cells."""
        key = ("alone", self.key)
        if self.memo is None or key not in self.memo:
            rows = np.concatenate((self.cells, self.node[:, None].view(np.uint8)), axis=1)
            whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1]))).reshape(-1)
            found = len(np.unique(whole)) == len(whole)
            if self.memo is None:
                return found
            self.memo[key] = found
        return bool(self.memo[key])

    def _joined(self, num_nodes: int) -> Joined:
        found = self._merged()
        value = found.cells @ _SALT[: found.cells.shape[1]] + found.lo * _SALT[-1] + found.hi * _SALT[-2]
        signature = np.bincount(found.node, weights=np.sqrt(value + 1.0), minlength=num_nodes).astype(np.float64)
        return Joined(found, signature)

    def _merged(self) -> Shares:
        """The same per node, in fewer rows: ranks beside each other in a node that have one interval, or intervals that
        follow each other, of the same cells."""
        if len(self.lo) < 2:
            return Shares(self.lo, self.hi, self.cells, self.size, self.node, self.node)
        new_node = self.node[1:] != self.node[:-1]
        begin = np.flatnonzero(new_node | (self.lo[1:] != self.lo[:-1]) | (self.hi[1:] != self.hi[:-1])) + 1
        first = np.concatenate(([0], begin))
        cells = np.bitwise_or.reduceat(self.cells, first, axis=0) if len(first) < len(self.lo) else self.cells
        lo, hi, node = self.lo[first], self.hi[first], self.node[first]
        follows = (node[1:] == node[:-1]) & (lo[1:] == hi[:-1]) & (cells[1:] == cells[:-1]).all(axis=1)
        if follows.any():
            begins = np.concatenate(([True], ~follows))
            ends = np.concatenate((~follows, [True]))
            lo, hi, node, cells = lo[begins], hi[ends], node[begins], cells[begins]
        return Shares(lo, hi, cells, lo, node, node)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Shares by node. ``signature``: alike for nodes whose ranks have alike shares (a sum of irrational numbers)."""

    shares: Shares
    signature: FloatArray


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


def lack_by_node(wanted: Sequence[Shares], held: Sequence[Shares], num_nodes: int, weigh: FloatArray) -> Lack:
    """``weigh``: elements of every byte of a bit set, per unit of the long axis."""
    joined = [s.joined(num_nodes) for s in (*wanted, *held)]
    new, old = [j.shares for j in joined[: len(wanted)]], [j.shares for j in joined[len(wanted) :]]
    if num_nodes < MANY_GROUPS:
        return lack(new, old, num_nodes, weigh)
    key = joined[0].signature
    for number in range(1, len(joined)):
        key = key + joined[number].signature * (1.0 + _SALT[number])
    # Rounded, so that alike are alike in whatever order their ranks were added.
    _, first, inverse = np.unique(np.round(key, 9), return_index=True, return_inverse=True)
    if 2 * len(first) > num_nodes:
        return lack(new, old, num_nodes, weigh)
    number_of = np.full(num_nodes, -1)
    number_of[first] = np.arange(len(first))

    def of_first(shares: Shares) -> Shares:
        found = shares.take(number_of[shares.node] >= 0)
        group = number_of[found.node]
        return Shares(found.lo, found.hi, found.cells, found.size, group, group)

    few = lack([of_first(s) for s in new], [of_first(s) for s in old], len(first), weigh)
    return Lack(few.wanted[inverse], few.held[inverse], few.lacked[inverse])


def lack(wanted: Sequence[Shares], held: Sequence[Shares], num_groups: int, weigh: FloatArray) -> Lack:
    """By ``place``. ``weigh`` as above."""
    num_bytes = len(weigh)
    new, old = _pack(wanted, num_groups, num_bytes), _pack(held, num_groups, num_bytes)
    ends = np.concatenate((new.lo, new.hi, old.lo, old.hi), axis=1)
    if ends.shape[1] and _two_valued(ends):
        ends = np.broadcast_to(np.array([ends.min(), ends.max()]), (len(ends), 2))
    else:
        ends = np.sort(ends, axis=1)
    begin, length = ends[:, :-1], ends[:, 1:] - ends[:, :-1]
    cells = np.empty((3, *begin.shape, num_bytes), dtype=np.uint8)
    cells[0], cells[1] = _covered(new, begin, ends[:, 1:]), _covered(old, begin, ends[:, 1:])
    np.bitwise_and(cells[0], ~cells[1], out=cells[2])
    found: FloatArray = np.einsum("kij,ij->ki", elements_of(cells, weigh), length)
    return Lack(found[0], found[1], found[2])


def overlap(new: Shares, old: Shares, source: IntArray, weigh: FloatArray) -> FloatArray:
    """Elements that rank i of ``new`` wants and rank ``source[i]`` of ``old`` has; 0 where that is -1."""
    low = np.maximum(new.lo, old.lo[source])
    length = np.where(source >= 0, np.minimum(new.hi, old.hi[source]) - low, 0.0)
    cells = new.cells & old.cells[source]
    found: FloatArray = elements_of(cells, weigh) * np.maximum(length, 0.0)
    return found


def elements_of(cells: ByteArray, weigh: FloatArray) -> FloatArray:
    """Of bit sets ``[..., bytes]``, per unit of the long axis."""
    num_bytes, values = weigh.shape
    found: FloatArray = weigh.reshape(-1).take(cells + np.arange(0, num_bytes * values, values))
    return found[..., 0] if num_bytes == 1 else found @ np.ones(num_bytes)


def _two_valued(ends: FloatArray) -> bool:
    low, high = ends.min(), ends.max()
    return bool(((ends == low) | (ends == high)).all())


def _pack(shares: Sequence[Shares], num_groups: int, num_bytes: int) -> _Packed:
    groups = [s.place for s in shares]
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
    if packed.lo.shape[1] == 1 == num_intervals:
        one: ByteArray = packed.cells * ((packed.lo <= begin) & (packed.hi >= end))[:, :, None]
        return one
    for member in range(packed.lo.shape[1]):
        covers = (packed.lo[:, member, None] <= begin) & (packed.hi[:, member, None] >= end)
        found |= packed.cells[:, member, None, :] * covers[:, :, None]
    return found
