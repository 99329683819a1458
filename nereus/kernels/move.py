"""Pieces of a message, and what is done with one: gather with its checksum, scatter, checksum where it lies.

A message is cut into pieces so that packing, transfer, unpacking and verification overlap, and so that a large run of
a storage travels from and to its place even where the message around it does not. Sender and receiver cut alike without
a word, since the cut depends only on what they share: shapes and widths of the blocks, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nereus.kernels import native
from nereus.kernels.checksum import WordArray, checksum
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
    Section,
    Storages,
    find_outside,
    in_place_bytes,
    ordered,
    pack,
    packing,
    unpack,
)

#: Bytes of a piece at most, single rows longer than that in a strided block aside.
PIECE_BYTES = 4 << 20
#: Blocks smaller than this travel together: a message of its own costs more than to copy them.
SMALL_BYTES = 256 << 10


def pieces(table: IntArray, widths: IntArray) -> tuple[Packing, ...]:
    """All blocks of ``table``, each once. ``widths``: bytes per element of every storage, by number."""
    table = ordered(table, widths)
    if not len(table):
        return ()
    width = widths[table[:, STORAGE]]
    num_bytes = table[:, NUM_ROWS] * table[:, NUM_COLS] * width
    small = num_bytes < SMALL_BYTES
    out = [
        _single(part, int(w))
        for row, w in zip(table[~small].tolist(), width[~small].tolist(), strict=True)
        for part in _cut(row, PIECE_BYTES // w)
    ]
    few, before = table[small], np.cumsum(num_bytes[small]) - num_bytes[small]
    for group in np.split(few, np.flatnonzero(np.diff(before // PIECE_BYTES)) + 1):
        if len(group):
            out.append(packing(group, widths))
    return tuple(out)


def _cut(row: list[int], most: int) -> Iterator[list[int]]:
    """Parts of one block of at most ``most`` elements, whole rows where there are several."""
    number, offset, rows, cols, stride, start, global_stride = row
    if rows == 1:
        for done in range(0, cols, most):
            yield [number, offset + done, 1, min(most, cols - done), 0, start + done, 0]
        return
    take = max(1, most // cols)
    for done in range(0, rows, take):
        count = min(take, rows - done)
        yield [number, offset + done * stride, count, cols, stride, start + done * global_stride, global_stride]


def _single(row: list[int], width: int) -> Packing:
    table = np.array([row], dtype=np.int64)
    runs = table
    if row[NUM_ROWS] > 1 and row[ROW_STRIDE] == row[NUM_COLS]:
        runs = np.array([[row[STORAGE], row[OFFSET], 1, row[NUM_ROWS] * row[NUM_COLS], 0, 0, 0]], dtype=np.int64)
    num_bytes = row[NUM_ROWS] * row[NUM_COLS] * width
    section = Section(width=width, first=0, last=1, first_run=0, last_run=1, start_byte=0, num_bytes=num_bytes)
    return Packing(table=table, runs=runs, sections=(section,), num_bytes=num_bytes)


def gather(storages: Storages, what: Packing, keys: WordArray, out: torch.Tensor) -> int:
    """``pack``, and the checksum of what was packed. ``keys``: ``tensor_key`` of every storage, by number."""
    total = _native(storages, what, keys, native.GATHER, out)
    if total is None:
        pack(storages, what, out)
        total = checksum(out, what, keys)
    return total


def scatter(storages: Storages, what: Packing, keys: WordArray, staging: torch.Tensor) -> None:
    """``unpack``."""
    if _native(storages, what, keys, native.SCATTER, staging) is None:
        unpack(storages, what, staging)


def stored(storages: Storages, what: Packing, keys: WordArray, scratch: torch.Tensor) -> int:
    """Checksum of the blocks as they lie in their storages. ``scratch``: ``what.num_bytes`` of memory to read them
    back into; not needed, and may be empty, where the packing is ``in_place``."""
    total = _native(storages, what, keys, native.SUM, None)
    if total is None and what.in_place:
        total = checksum(in_place_bytes(storages, what), what, keys)
    elif total is None:
        pack(storages, what, scratch)
        total = checksum(scratch, what, keys)
    return total


def _native(storages: Storages, what: Packing, keys: WordArray, do: int, buffer: torch.Tensor | None) -> int | None:
    """None where there is no library, or where it could not be kept inside the storages' memory."""
    blocks = native.load()
    if blocks is None or (buffer is not None and not _usable(buffer, 1, what.num_bytes)):
        return None
    table = what.table
    numbers = np.unique(table[:, STORAGE]).tolist() if len(table) > 1 else table[:, STORAGE].tolist()
    if numbers and numbers[0] < 0:
        return None
    bases = np.zeros(numbers[-1] + 1 if numbers else 0, dtype=np.int64)
    lengths = np.zeros_like(bases)
    for number in numbers:
        bases[number], lengths[number] = storages[number].data_ptr(), storages[number].numel()
    if find_outside(table, lengths) is not None:
        return None
    total = 0
    for section in what.sections:
        part = table[section.first : section.last]
        if not all(_usable(storages[n], section.width, 0) for n in set(part[:, STORAGE].tolist())):
            return None
        rows = np.empty((len(part), native.NUM_COLUMNS), dtype=np.int64)
        rows[:, 0] = bases[part[:, STORAGE]] + part[:, OFFSET] * section.width
        rows[:, 1:6] = part[:, [NUM_ROWS, NUM_COLS, ROW_STRIDE, GLOBAL_START, GLOBAL_STRIDE]]
        rows[:, 6] = keys.view(np.int64)[part[:, STORAGE]]
        at = 0 if buffer is None else buffer.data_ptr() + section.start_byte
        total += blocks(rows.ctypes.data, len(rows), section.width, do, at)
    return total & ((1 << 64) - 1)


def _usable(data: torch.Tensor, width: int, num_bytes: int) -> bool:
    return (
        data.device.type == "cpu"
        and data.is_contiguous()
        and data.element_size() == width
        and data.numel() * width >= num_bytes
    )
