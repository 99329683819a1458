"""Block tables of messages and copies as descriptor tables of ``regions.py``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from nereus.kernels import regions as r
from nereus.kernels.pack import (
    GLOBAL_START,
    GLOBAL_STRIDE,
    NUM_COLS,
    NUM_ROWS,
    OFFSET,
    ROW_STRIDE,
    STORAGE,
    IntArray,
    Packing,
    Storages,
)


class Do(Enum):
    """Into a buffer with a checksum, out of a buffer, out of it with a checksum, or a checksum of what lies there."""

    GATHER = auto()
    SCATTER = auto()
    LAND = auto()
    SUM = auto()


def of_packing(what: Packing, do: Do, keys: npt.NDArray[np.uint64]) -> tuple[IntArray, list[tuple[int, int]]]:
    """The table, and of its first bases each storage's number and its bytes per element; the buffer is the last
    base."""
    # Without a checksum a block needs no place in a logical tensor, so neighbours are one region.
    blocks = what.runs if do is Do.SCATTER else what.table
    number = blocks[:, STORAGE]
    if len(blocks) == 1:
        numbers, place = number, np.zeros(1, dtype=np.int64)
    else:
        numbers, place = np.unique(number, return_inverse=True)
    widths = np.zeros(len(numbers), dtype=np.int64)
    table = np.zeros((len(blocks), r.NUM_GIVEN), dtype=np.int64)
    storage, buffer = (r.DST, r.SRC) if do in (Do.SCATTER, Do.LAND) else (r.SRC, r.DST)
    table[:, storage] = place
    table[:, storage + 1] = blocks[:, OFFSET]
    table[:, storage + 2] = blocks[:, ROW_STRIDE]
    table[:, buffer] = -1 if do is Do.SUM else len(numbers)
    table[:, buffer + 2] = blocks[:, NUM_COLS]
    table[:, r.NUM_ROWS : r.NUM_COLS + 1] = blocks[:, NUM_ROWS : NUM_COLS + 1]
    for section in what.sections:
        first, last = (section.first_run, section.last_run) if do is Do.SCATTER else (section.first, section.last)
        widths[place[first:last]] = section.width
        table[first:last, [r.FROM, r.TO]] = r.BITS_OF_WIDTH[section.width]
        if do is not Do.SUM:
            size = blocks[first:last, NUM_ROWS] * blocks[first:last, NUM_COLS]
            table[first:last, buffer + 1] = section.start_byte // section.width + np.cumsum(size) - size
    if do is Do.SCATTER:
        table[:, r.SLOT] = -1
    else:
        table[:, r.KEY] = keys.view(np.int64)[number]
        table[:, r.GLOBAL_START : r.GLOBAL_STRIDE + 1] = blocks[:, GLOBAL_START : GLOBAL_STRIDE + 1]
    return table, list(zip(numbers.tolist(), widths.tolist(), strict=True))


def of_copies(storages: Storages, src: IntArray, dst: IntArray, *, cast: bool) -> tuple[IntArray, list[int]] | None:
    """``dst[i] = src[i]``. The table, and the numbers of the storages that are its bases. None where torch knows the
    conversion and kernels do not."""
    numbers = np.unique(np.concatenate((src[:, STORAGE], dst[:, STORAGE])))
    dtypes = [storages[number].dtype for number in numbers.tolist()]
    table = np.zeros((len(src), r.NUM_GIVEN), dtype=np.int64)
    for base, blocks in ((r.SRC, src), (r.DST, dst)):
        table[:, base] = np.searchsorted(numbers, blocks[:, STORAGE])
        table[:, base + 1] = blocks[:, OFFSET]
        table[:, base + 2] = blocks[:, ROW_STRIDE]
    table[:, r.NUM_ROWS] = src[:, NUM_ROWS]
    table[:, r.NUM_COLS] = src[:, NUM_COLS]
    table[:, r.SLOT] = -1
    pairs = table[:, r.SRC] * len(numbers) + table[:, r.DST]
    for pair in np.unique(pairs).tolist():
        kinds = _kinds(dtypes, pair // len(numbers), pair % len(numbers), cast=cast)
        if kinds is None:
            return None
        table[np.ix_(pairs == pair, [r.FROM, r.TO])] = kinds
    return table, numbers.tolist()


def _kinds(dtypes: Sequence[torch.dtype], source: int, target: int, *, cast: bool) -> tuple[int, int] | None:
    a, b = dtypes[source], dtypes[target]
    if a == b or (not cast and a.itemsize == b.itemsize):
        return r.type_of(a), r.type_of(b)
    if cast and a in r.NUMBERS and b in r.NUMBERS:
        return r.NUMBERS[a], r.NUMBERS[b]
    return None
