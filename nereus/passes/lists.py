"""Lists of integers laid end to end, and sparse tables: set algebra over classes, groups and devices in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.layout import BoolArray, IntArray

#: A table of up to so many entries is kept dense: reading it is then one gather.
DENSE_ENTRIES = 1 << 20
#: Pairs that a join looks at in one go.
JOINED_AT_ONCE = 1 << 22


def distinct(keys: IntArray) -> IntArray:
    """Sorted, each once. As ``np.unique``, without its overhead."""
    keys = np.sort(keys)
    return keys[_fresh(keys)]


def _fresh(ordered: IntArray) -> BoolArray:
    fresh = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return fresh


def summed(keys: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
    """(sorted distinct keys, sum of the values of each)."""
    if not len(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(_fresh(keys))
    return keys[first], np.add.reduceat(values[order], first)


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """List i is ``item[first[i]:first[i + 1]]``."""

    first: IntArray
    item: IntArray

    @classmethod
    def of_tuples(cls, lists: Sequence[Sequence[int]]) -> Lists:
        counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        first = np.concatenate(([0], np.cumsum(counts)))
        item = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(first[-1]))
        return cls(first, item)

    @classmethod
    def of_arrays(cls, lists: Sequence[IntArray]) -> Lists:
        counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        return cls(np.concatenate(([0], np.cumsum(counts))), concatenated(lists))

    @classmethod
    def of_pairs(cls, owner: IntArray, item: IntArray, num_lists: int) -> Lists:
        """Ascending lists without repetitions."""
        scale = int(item.max(initial=0)) + 1
        keys = distinct(owner * scale + item)
        first = np.searchsorted(keys, np.arange(num_lists + 1, dtype=np.int64) * scale)
        return cls(first.astype(np.int64), keys % scale)

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def counts(self) -> IntArray:
        return np.diff(self.first)

    @property
    def owner(self) -> IntArray:
        """The list of every item."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.counts)

    def of(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """(position in ``numbers``, item) of all items of these lists."""
        at, within = runs(self.counts[numbers])
        return at, self.item[self.first[numbers][at] + within]

    def tuples(self, numbers: IntArray) -> tuple[tuple[int, ...], ...]:
        """These lists as tuples."""
        first, item = self.first.tolist(), self.item.tolist()
        return tuple(tuple(item[first[i] : first[i + 1]]) for i in numbers.tolist())

    def sums(self, weights: IntArray) -> IntArray:
        """Per list, the sum of its items' weights (exact below 2**53)."""
        total: IntArray = np.bincount(self.owner, weights=weights[self.item], minlength=len(self)).astype(np.int64)
        return total

    def inverse(self, num_items: int) -> Lists:
        return Lists.of_pairs(self.item, self.owner, num_items)

    def through(self, other: Lists) -> Lists:
        """Per list the union of what ``other`` lists for its items."""
        at, item = other.of(self.item)
        return Lists.of_pairs(self.owner[at], item, len(self))


def combinations(lists: Lists) -> tuple[IntArray, Lists]:
    """(number of every list's content, the distinct contents). Lists are sets: ascending."""
    counts = lists.counts
    # Most lists have one member, which stands for them (-1: none); the others are looked up one by one.
    code = np.full(len(lists), -1, dtype=np.int64)
    alone = np.flatnonzero(counts == 1)
    code[alone] = lists.item[lists.first[alone]]
    several = np.flatnonzero(counts > 1)
    known: dict[bytes, int] = {}
    data, size = lists.item.tobytes(), lists.item.itemsize
    begins, ends = (lists.first[several] * size).tolist(), (lists.first[several + 1] * size).tolist()
    number = [known.setdefault(data[a:b], len(known)) for a, b in zip(begins, ends, strict=True)]
    code[several] = int(lists.item.max(initial=0)) + 1 + np.array(number, dtype=np.int64)
    # Numbered as they come.
    _, example, number_of = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(example)
    of_list, example = np.argsort(order)[number_of], example[order]
    at, item = lists.of(example)
    return of_list, Lists(np.concatenate(([0], np.cumsum(np.bincount(at, minlength=len(example))))), item)


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A table rows x cols that is 0 but for sorted ``keys`` (row * cols + col)."""

    num_rows: int
    num_cols: int
    keys: IntArray
    values: IntArray
    dense: IntArray | None

    @classmethod
    def summing(cls, num_rows: int, num_cols: int, row: IntArray, col: IntArray, values: IntArray) -> Sparse:
        """Values of one place add up."""
        keys, values = summed(row * num_cols + col, values)
        dense = None
        if num_rows * num_cols <= DENSE_ENTRIES:
            dense = np.zeros(num_rows * num_cols, dtype=np.int64)
            dense[keys] = values
        return cls(num_rows, num_cols, keys, values, dense)

    def at(self, row: IntArray, col: IntArray) -> IntArray:
        """Broadcasts."""
        wanted = row * self.num_cols + col
        if self.dense is not None:
            found: IntArray = self.dense[wanted]
            return found
        if not len(self.keys):
            return np.zeros(wanted.shape, dtype=np.int64)
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.values[place], 0)

    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """(row, col, value) of everything that was put in."""
        return self.keys // self.num_cols, self.keys % self.num_cols, self.values


def common(held: Lists, wanted: Lists, row: IntArray, col: IntArray, weights: IntArray) -> IntArray:
    """Per pair: weights of the items that lists ``held[row]`` and ``wanted[col]`` share. Walks the shorter side."""
    by_held = int(held.counts[row].sum()) <= int(wanted.counts[col].sum())
    walked, other, walked_at, other_at = (held, wanted, row, col) if by_held else (wanted, held, col, row)
    at, item = walked.of(walked_at)
    hit = contains(other, other_at[at], item)
    total: IntArray = np.bincount(at[hit], weights=weights[item[hit]], minlength=len(row)).astype(np.int64)
    return total


def contains(lists: Lists, number: IntArray, item: IntArray) -> BoolArray:
    """Whether list ``number[i]`` (ascending) has ``item[i]``."""
    scale = int(max(lists.item.max(initial=0), item.max(initial=0))) + 1
    known, asked = lists.owner * scale + lists.item, number * scale + item
    if not len(known):
        return np.zeros(len(asked), dtype=bool)
    hit: BoolArray = known[np.minimum(np.searchsorted(known, asked), len(known) - 1)] == asked
    return hit


def concatenated(parts: Iterable[IntArray]) -> IntArray:
    found = list(parts)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def join(held: Lists, wanted: Lists, weights: IntArray) -> Sparse:
    """[list of ``held``, list of ``wanted``]: summed weights of what both contain."""
    held_by, wanted_by = held.inverse(len(weights)), wanted.inverse(len(weights))
    pairs = held_by.counts * wanted_by.counts
    both = np.flatnonzero((pairs > 0) & (weights > 0))
    chunk = np.cumsum(pairs[both]) // JOINED_AT_ONCE
    keys, values = [], []
    for number in range(int(chunk[-1]) + 1 if len(both) else 0):
        part = both[chunk == number]
        left, left_list = held_by.of(part)
        at, right_list = wanted_by.of(part[left])
        found, total = summed(left_list[at] * len(wanted) + right_list, weights[part[left[at]]])
        keys.append(found)
        values.append(total)
    key = concatenated(keys)
    width = max(len(wanted), 1)
    return Sparse.summing(len(held), width, key // width, key % width, concatenated(values))
