"""Gather blocks of 1-D tensors into one contiguous byte buffer, scatter them back, and copy blocks on one device.

A block table is int64 ``[n, 7]``: storage number, offset, rows, columns, row stride, and two columns that only
checksums use. Elements travel as integers of their width, so every bit pattern survives, NaN payloads included. In the
buffer wide elements come before narrow ones (8, 4, 2, 1 bytes; inside a width in table order), so that every element is
aligned without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
Storages = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]

STORAGE, OFFSET, NUM_ROWS, NUM_COLS, ROW_STRIDE, GLOBAL_START, GLOBAL_STRIDE = range(7)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: From this many blocks of one storage on, blocks smaller than ``_TINY`` elements go through one indexed copy.
_MANY, _TINY = 16, 512
#: Elements whose indices are in memory at one time (8 bytes each).
_INDEX_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks ``first..last`` of a packing, all of elements of ``width`` bytes, at ``start_byte`` of the buffer."""

    width: int
    first: int
    last: int
    first_run: int
    last_run: int
    start_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """``table``: blocks in buffer order; ``runs``: the same elements in the same order, neighbours joined."""

    table: IntArray
    runs: IntArray
    sections: tuple[Section, ...]
    num_bytes: int

    @property
    def in_place(self) -> bool:
        """All of it is one contiguous run of one storage, so it needs no buffer."""
        return len(self.runs) == 1 and int(self.runs[0, NUM_ROWS]) == 1


def packing(table: IntArray, widths: IntArray) -> Packing:
    """Where each block of ``table`` lies in the buffer. ``widths``: bytes per element of every storage, by number."""
    table = ordered(table, widths)
    width = widths[table[:, STORAGE]]
    sections: list[Section] = []
    runs: list[IntArray] = []
    start = num_runs = 0
    for value in (8, 4, 2, 1):
        first, last = np.searchsorted(-width, (-value, -value + 1)).tolist()
        if first == last:
            continue
        part = table[first:last]
        joined = join_runs(part)
        num_bytes = int((part[:, NUM_ROWS] * part[:, NUM_COLS]).sum()) * value
        sections.append(
            Section(
                width=value,
                first=first,
                last=last,
                first_run=num_runs,
                last_run=num_runs + len(joined),
                start_byte=start,
                num_bytes=num_bytes,
            )
        )
        runs.append(joined)
        num_runs += len(joined)
        start += num_bytes
    all_runs = np.concatenate(runs) if runs else np.zeros((0, 7), dtype=np.int64)
    return Packing(table=table, runs=all_runs, sections=tuple(sections), num_bytes=start)


def ordered(table: IntArray, widths: IntArray) -> IntArray:
    """The blocks that are not empty, wide elements first, else in order."""
    table = table[(table[:, NUM_ROWS] > 0) & (table[:, NUM_COLS] > 0)]
    return table[np.argsort(-widths[table[:, STORAGE]], kind="stable")]


def join_runs(table: IntArray) -> IntArray:
    """The same elements in the same order in fewer blocks; the two global columns of the result mean nothing."""
    out = table.copy()
    whole = (out[:, NUM_ROWS] == 1) | (out[:, ROW_STRIDE] == out[:, NUM_COLS])
    out[whole, NUM_COLS] *= out[whole, NUM_ROWS]
    out[whole, NUM_ROWS] = 1
    out[whole, ROW_STRIDE] = 0
    if len(out) < 2:
        return out
    left, right = out[:-1], out[1:]
    flat = (left[:, NUM_ROWS] == 1) & (right[:, NUM_ROWS] == 1)
    flat &= left[:, OFFSET] + left[:, NUM_COLS] == right[:, OFFSET]
    rows = (left[:, NUM_ROWS] > 1) & (right[:, NUM_ROWS] > 1) & (left[:, NUM_COLS] == right[:, NUM_COLS])
    rows &= left[:, ROW_STRIDE] == right[:, ROW_STRIDE]
    rows &= left[:, OFFSET] + left[:, NUM_ROWS] * left[:, ROW_STRIDE] == right[:, OFFSET]
    joins = (left[:, STORAGE] == right[:, STORAGE]) & (flat | rows)
    if not joins.any():
        return out
    firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
    joined = out[firsts]
    by_rows = joined[:, NUM_ROWS] > 1
    num_rows = np.add.reduceat(out[:, NUM_ROWS], firsts)
    num_cols = np.add.reduceat(out[:, NUM_COLS], firsts)
    joined[by_rows, NUM_ROWS] = num_rows[by_rows]
    joined[~by_rows, NUM_COLS] = num_cols[~by_rows]
    return joined


def pack(storages: Storages, what: Packing, out: torch.Tensor) -> None:
    """Fill ``out`` (uint8, ``what.num_bytes`` long, 8-byte aligned) with the blocks."""
    for runs, buffer in _sections(what, out):
        _exchange(storages, runs, buffer, gather=True)


def unpack(storages: Storages, what: Packing, staging: torch.Tensor) -> None:
    """Write ``staging`` to the blocks; the reverse of ``pack``."""
    for runs, buffer in _sections(what, staging):
        _exchange(storages, runs, buffer, gather=False)


def in_place_bytes(storages: Storages, what: Packing) -> torch.Tensor:
    """The bytes of a packing that is ``in_place``, as a view of its storage."""
    run = what.runs[0]
    data = as_integers(storages[int(run[STORAGE])])
    return data.narrow(0, int(run[OFFSET]), int(run[NUM_COLS])).view(torch.uint8)


def copy_blocks(storages: Storages, src: IntArray, dst: IntArray, *, cast: bool = False) -> None:
    """``dst[i] = src[i]``, block by block; ``cast`` converts numbers (round to nearest even), else bits are copied."""
    src, dst = join_pairs(src, dst)
    for first, last in _same_storages(np.stack((src[:, STORAGE], dst[:, STORAGE]), axis=1)):
        source, target = storages[int(src[first, STORAGE])], storages[int(dst[first, STORAGE])]
        if not cast:
            source, target = as_integers(source), as_integers(target)
            if source.dtype != target.dtype:
                raise ValueError(f"a copy of bits from {source.dtype} to {target.dtype}")
        if _is_tiny(src[first:last]):
            for a, b in _index_chunks(src[first:last]):
                values = source.index_select(0, _indices(src[first + a : first + b]))
                target.index_copy_(0, _indices(dst[first + a : first + b]), values.to(target.dtype))
            continue
        for row_src, row_dst in zip(src[first:last].tolist(), dst[first:last].tolist(), strict=True):
            _view(target, row_dst).copy_(_view(source, row_src))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def find_outside(table: IntArray, lengths: IntArray) -> int | None:
    """Number of the first block that leaves its storage or has rows that overlap; None if all lie inside."""
    if not len(table):
        return None
    number = table[:, STORAGE]
    bad = (number < 0) | (number >= len(lengths))
    length = lengths[np.where(bad, 0, number)] if len(lengths) else np.zeros(len(table), dtype=np.int64)
    end = table[:, OFFSET] + np.maximum(table[:, NUM_ROWS] - 1, 0) * table[:, ROW_STRIDE] + table[:, NUM_COLS]
    bad |= (table[:, [OFFSET, NUM_ROWS, NUM_COLS, ROW_STRIDE]] < 0).any(axis=1) | (end > length)
    bad |= (table[:, NUM_ROWS] > 1) & (table[:, ROW_STRIDE] < table[:, NUM_COLS])
    found = np.flatnonzero(bad)
    return int(found[0]) if len(found) else None


def _sections(what: Packing, buffer: torch.Tensor) -> Iterator[tuple[IntArray, torch.Tensor]]:
    for section in what.sections:
        data = buffer.narrow(0, section.start_byte, section.num_bytes).view(_INTEGERS[section.width])
        yield what.runs[section.first_run : section.last_run], data


def _exchange(storages: Storages, runs: IntArray, buffer: torch.Tensor, *, gather: bool) -> None:
    position = 0
    for first, last in _same_storages(runs[:, STORAGE : STORAGE + 1]):
        data = as_integers(storages[int(runs[first, STORAGE])])
        if _is_tiny(runs[first:last]):
            for a, b in _index_chunks(runs[first:last]):
                index = _indices(runs[first + a : first + b])
                part = buffer.narrow(0, position, len(index))
                position += len(index)
                if gather:
                    torch.index_select(data, 0, index, out=part)
                else:
                    data.index_copy_(0, index, part)
            continue
        for row in runs[first:last].tolist():
            numel = row[NUM_ROWS] * row[NUM_COLS]
            part = buffer.narrow(0, position, numel)
            position += numel
            view = _view(data, row)
            part = part.view(view.shape)
            if gather:
                part.copy_(view)
            else:
                view.copy_(part)


def _view(data: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
    if row[NUM_ROWS] == 1:
        return data.narrow(0, row[OFFSET], row[NUM_COLS])
    start = data.storage_offset() + row[OFFSET]
    return data.as_strided((row[NUM_ROWS], row[NUM_COLS]), (row[ROW_STRIDE], 1), start)


def _same_storages(keys: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive rows with equal keys."""
    if not len(keys):
        return
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    bounds = [0, *cuts.tolist(), len(keys)]
    yield from pairwise(bounds)


def _is_tiny(table: IntArray) -> bool:
    return len(table) >= _MANY and int((table[:, NUM_ROWS] * table[:, NUM_COLS]).sum()) < _TINY * len(table)


def _index_chunks(table: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of blocks with about ``_INDEX_CHUNK`` elements each (one larger block is a range of its own)."""
    total = np.cumsum(table[:, NUM_ROWS] * table[:, NUM_COLS])
    first = 0
    while first < len(table):
        before = int(total[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(total, before + _INDEX_CHUNK, side="right")))
        yield first, last
        first = last


def _indices(table: IntArray) -> torch.Tensor:
    """Element numbers in the storage, block after block, row after row."""
    rows = table[:, NUM_ROWS]
    row_in_block = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    starts = np.repeat(table[:, OFFSET], rows) + row_in_block * np.repeat(table[:, ROW_STRIDE], rows)
    lengths = np.repeat(table[:, NUM_COLS], rows)
    first = np.cumsum(lengths) - lengths
    index = np.repeat(starts - first, lengths) + np.arange(int(lengths.sum()))
    return torch.from_numpy(index)


def join_pairs(src: IntArray, dst: IntArray) -> tuple[IntArray, IntArray]:
    """Both tables with blocks that are single runs on both sides, and neighbours on both sides, joined."""
    shapes = [NUM_ROWS, NUM_COLS]
    if src.shape != dst.shape or (src[:, shapes] != dst[:, shapes]).any():
        raise ValueError("source and target blocks differ in shape")
    used = (src[:, NUM_ROWS] > 0) & (src[:, NUM_COLS] > 0)
    src, dst = src[used].copy(), dst[used].copy()
    whole = src[:, NUM_ROWS] == 1
    whole |= (src[:, ROW_STRIDE] == src[:, NUM_COLS]) & (dst[:, ROW_STRIDE] == dst[:, NUM_COLS])
    for table in (src, dst):
        table[whole, NUM_COLS] *= table[whole, NUM_ROWS]
        table[whole, NUM_ROWS] = 1
        table[whole, ROW_STRIDE] = 0
    if len(src) < 2:
        return src, dst
    joins = (src[:-1, NUM_ROWS] == 1) & (src[1:, NUM_ROWS] == 1)
    for table in (src, dst):
        joins &= table[:-1, STORAGE] == table[1:, STORAGE]
        joins &= table[:-1, OFFSET] + table[:-1, NUM_COLS] == table[1:, OFFSET]
    firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
    num_cols = np.where(src[firsts, NUM_ROWS] == 1, np.add.reduceat(src[:, NUM_COLS], firsts), src[firsts, NUM_COLS])
    src, dst = src[firsts], dst[firsts]
    src[:, NUM_COLS] = dst[:, NUM_COLS] = num_cols
    return src, dst
