"""What places lack, as columns: with ZeRO nearly every pair of ranks is a demand of its own, 135,000 of them at 16,384
GPUs, so a ``Demand`` is made only where one is looked at by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np

from nereus.ir.layout import BoolArray, IntArray
from nereus.passes.atoms import AtomTable
from nereus.passes.lists import Lists, concatenated, contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    table: int  # index into Diff.tables
    cls: int  # class of the table; the holders are Diff.holders[table][cls]
    node: int
    wanters: tuple[int, ...]  # places of the node that lack the intervals, ascending
    intervals: IntArray  # ascending interval numbers of the table
    num_bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Demands(Sequence[Demand]):
    """``need``: number of the intervals in ``needs``; what is lacked alike has one number. Demands of one class follow
    each other."""

    table: IntArray
    cls: IntArray
    node: IntArray
    num_bytes: IntArray
    wanters: Lists
    need: IntArray
    needs: tuple[IntArray, ...]

    @classmethod
    def joined(cls, parts: Iterable[Demands]) -> Demands:
        found = list(parts)
        offset = np.cumsum([0, *(len(p.needs) for p in found)])
        columns = {
            name: concatenated(getattr(p, name) for p in found) for name in ("table", "cls", "node", "num_bytes")
        }
        counts = concatenated(p.wanters.counts for p in found)
        return cls(
            **columns,
            wanters=Lists(np.concatenate(([0], np.cumsum(counts))), concatenated(p.wanters.item for p in found)),
            need=concatenated(p.need + first for p, first in zip(found, offset.tolist(), strict=False)),
            needs=tuple(need for p in found for need in p.needs),
        )

    def taken(self, chosen: IntArray) -> Demands:
        """Those, in this order."""
        at, item = self.wanters.of(chosen)
        counts = np.bincount(at, minlength=len(chosen))
        return Demands(
            table=self.table[chosen],
            cls=self.cls[chosen],
            node=self.node[chosen],
            num_bytes=self.num_bytes[chosen],
            wanters=Lists(np.concatenate(([0], np.cumsum(counts))), item),
            need=self.need[chosen],
            needs=self.needs,
        )

    @cached_property
    def classes(self) -> Lists:
        """Demands of each class, classes in the order of their first."""
        if not len(self):
            return Lists(np.zeros(1, dtype=np.int64), self.cls)
        other = (np.diff(self.table) != 0) | (np.diff(self.cls) != 0)
        first = np.concatenate(([0], np.flatnonzero(other) + 1, [len(self)]))
        return Lists(first, np.arange(len(self), dtype=np.int64))

    def by_class(self) -> Iterator[tuple[int, int, Sequence[Demand]]]:
        """(table, class, its demands)."""
        for begin, end in pairwise(self.classes.first.tolist()):
            yield int(self.table[begin]), int(self.cls[begin]), self[begin:end]

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> Demand: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Demand]: ...
    def __getitem__(self, number: int | slice) -> Demand | Sequence[Demand]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        first, last = self.wanters.first[number : number + 2].tolist()
        return Demand(
            table=int(self.table[number]),
            cls=int(self.cls[number]),
            node=int(self.node[number]),
            wanters=tuple(self.wanters.item[first:last].tolist()),
            intervals=self.needs[int(self.need[number])],
            num_bytes=int(self.num_bytes[number]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """(class, place) of everything that is wanted and not there, classes and places ascending; and how many of each
    class want it."""

    cls: IntArray
    place: IntArray
    wanted: IntArray

    @property
    def lists(self) -> Lists:
        """Places by class."""
        first = np.searchsorted(self.cls, np.arange(len(self.wanted) + 1))
        return Lists(first.astype(np.int64), self.place)


def lacking(holders: Sequence[Sequence[int]], wanters: Sequence[Sequence[int]]) -> Lacking:
    """``holders``, ``wanters``: places per class, ascending."""
    wanted = Lists.of_tuples(wanters)
    owner = wanted.owner
    missing = ~contains(Lists.of_tuples(holders), owner, wanted.item)
    return Lacking(cls=owner[missing], place=wanted.item[missing], wanted=wanted.counts)


def table_demands(number: int, table: AtomTable, lack: Lacking, node_of: IntArray) -> Demands:
    """By class, then by node. ``node_of``: of every place."""
    node = node_of[lack.place]
    order = np.lexsort((lack.place, node, lack.cls))
    cls, place, node = lack.cls[order], lack.place[order], node[order]
    fresh = np.ones(len(cls), dtype=bool)
    fresh[1:] = (np.diff(cls) != 0) | (np.diff(node) != 0)
    first = np.flatnonzero(fresh)
    rows = table.intervals_of_classes()
    sizes = table.num_bytes
    class_bytes = np.bincount(table.cls, weights=sizes, minlength=table.num_classes).astype(np.int64)
    used, need = np.unique(cls[first], return_inverse=True)
    whole = Demands(
        table=np.full(len(first), number, dtype=np.int64),
        cls=cls[first],
        node=node[first],
        num_bytes=class_bytes[cls[first]],
        wanters=Lists(np.append(first, len(cls)), place),
        need=need,
        needs=tuple(rows[i] for i in used.tolist()),
    )
    derives = _someone_derives(table, whole)
    if derives.any():
        parts = [_split_by_derived(table, whole[i], sizes) for i in np.flatnonzero(derives).tolist()]
        joined = Demands.joined((whole.taken(np.flatnonzero(~derives)), *parts))
        whole = joined.taken(np.lexsort((joined.node, joined.cls)))
    return whole.taken(np.flatnonzero(whole.num_bytes > 0))


def derived_bytes(table: AtomTable, lack: Lacking) -> int:
    """Bytes that places lack and derive."""
    if not table.derived:
        return 0
    own = concatenated(table.derived.values())
    place = np.repeat(np.fromiter(table.derived, dtype=np.int64), [len(rows) for rows in table.derived.values()])
    return int(table.num_bytes[own[contains(lack.lists, table.cls[own], place)]].sum())


def _someone_derives(table: AtomTable, demands: Demands) -> BoolArray:
    """Which demands have a wanter that derives some of what is demanded."""
    found = np.zeros(len(demands), dtype=bool)
    if not table.derived:
        return found
    cls = [np.unique(table.cls[own]) for own in table.derived.values()]
    place = np.repeat(np.fromiter(table.derived, dtype=np.int64), [len(own) for own in cls])
    deriving = Lists.of_pairs(concatenated(cls), place, table.num_classes)
    owner = demands.wanters.owner
    hit = contains(deriving, demands.cls[owner], demands.wanters.item)
    found[owner[hit]] = True
    return found


def _split_by_derived(table: AtomTable, demand: Demand, sizes: IntArray) -> Demands:
    """``demand`` cut by which of its wanters derive what."""
    places, intervals = demand.wanters, demand.intervals
    deriving: dict[int, list[int]] = {}
    for position, place in enumerate(places):
        own = table.derived.get(place, intervals[:0])
        for interval in np.intersect1d(intervals, own, assume_unique=True).tolist():
            deriving.setdefault(interval, []).append(position)
    rest = np.setdiff1d(intervals, np.fromiter(deriving, dtype=np.int64), assume_unique=True)
    by_set: dict[tuple[int, ...], list[int]] = {(): rest.tolist()} if len(rest) else {}
    for interval, positions in deriving.items():
        by_set.setdefault(tuple(positions), []).append(interval)
    found = [
        (tuple(place for i, place in enumerate(places) if i not in held), np.array(sorted(region), dtype=np.int64))
        for held, region in by_set.items()
        if len(held) < len(places)
    ]
    ones = np.ones(len(found), dtype=np.int64)
    return Demands(
        table=ones * demand.table,
        cls=ones * demand.cls,
        node=ones * demand.node,
        num_bytes=np.array([int(sizes[region].sum()) for _, region in found], dtype=np.int64),
        wanters=Lists.of_tuples([wanters for wanters, _ in found]),
        need=np.arange(len(found), dtype=np.int64),
        needs=tuple(region for _, region in found),
    )
