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
from nereus.kernels.dispatch import run
from nereus.kernels.pack import (
    NUM_COLS,
    NUM_ROWS,
    OFFSET,
    ROW_STRIDE,
    STORAGE,
    IntArray,
    Packing,
    Section,
    Storages,
    copy_blocks,
    in_place_bytes,
    join_pairs,
    ordered,
    pack,
    packing,
    unpack,
)
from nereus.kernels.regions import BITS_OF_WIDTH, TableError, plan
from nereus.kernels.tables import Do, of_copies, of_packing

#: Bytes of a piece at most, single rows longer than that in a strided block aside.
PIECE_BYTES = 4 << 20
#: Blocks smaller than this travel together: a message of its own costs more than to copy them.
SMALL_BYTES = 256 << 10

#: On a CPU the kernel copies tables of at least so many blocks, of so many elements on average.
_MANY, _TINY, _LARGE = 32, 32, 1 << 18


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
    total = _by_kernel(storages, what, keys, Do.GATHER, out)
    if total is None:
        pack(storages, what, out)
        total = checksum(out, what, keys)
    return total


def scatter(storages: Storages, what: Packing, keys: WordArray, staging: torch.Tensor) -> None:
    """``unpack``."""
    if _by_kernel(storages, what, keys, Do.SCATTER, staging) is None:
        unpack(storages, what, staging)


def land(storages: Storages, what: Packing, keys: WordArray, staging: torch.Tensor) -> int:
    """``scatter``, and the checksum of the blocks read back from their storages: on a CPU in one pass, so that what is
    read back was written a moment ago and lies in the core's cache."""
    total = None
    if staging.device.type == "cpu":
        total = _by_kernel(storages, what, keys, Do.LAND, staging)
    if total is None:
        scatter(storages, what, keys, staging)
        total = stored(storages, what, keys, staging)
    return total


def stored(storages: Storages, what: Packing, keys: WordArray, scratch: torch.Tensor | None = None) -> int:
    """Checksum of the blocks as they lie in their storages. ``scratch``: ``what.num_bytes`` of memory that they may be
    read back into."""
    total = _by_kernel(storages, what, keys, Do.SUM, None)
    if total is None and what.in_place:
        total = checksum(in_place_bytes(storages, what), what, keys)
    elif total is None:
        data = storages[int(what.table[0, STORAGE])]
        back = torch.empty(what.num_bytes, dtype=torch.uint8, device=data.device) if scratch is None else scratch
        pack(storages, what, back)
        total = checksum(back, what, keys)
    return total


def copy(storages: Storages, src: IntArray, dst: IntArray, *, cast: bool = False) -> None:
    """``copy_blocks``: ``dst[i] = src[i]``, block by block; ``cast`` converts numbers, else bits are copied."""
    few = len(src) < _MANY and all(storages[n].device.type == "cpu" for n in np.unique(src[:, STORAGE]).tolist())
    if few or not _copied_by_kernel(storages, *join_pairs(src, dst), cast=cast):
        copy_blocks(storages, src, dst, cast=cast)


def _copied_by_kernel(storages: Storages, src: IntArray, dst: IntArray, *, cast: bool) -> bool:
    if not len(src):
        return True
    device = storages[int(src[0, STORAGE])].device
    wrong = (src[:, : ROW_STRIDE + 1] < 0).any() or (dst[:, : ROW_STRIDE + 1] < 0).any()
    if wrong or not _has_kernel(device) or (device.type == "cpu" and not _pays_on_cpu(src)):
        return False
    made = of_copies(storages, src, dst, cast=cast)
    if made is None:
        return False
    table, numbers = made
    try:
        run(plan(table, sound=True), [storages[number] for number in numbers])
    except TableError:
        return False  # torch can do it, or says what is wrong
    return True


def _pays_on_cpu(blocks: IntArray) -> bool:
    """torch copies few or large blocks as fast and may use several threads, and tiny ones all at once."""
    elements = int((blocks[:, NUM_ROWS] * blocks[:, NUM_COLS]).sum()) // len(blocks)
    return len(blocks) >= _MANY and _TINY <= elements <= _LARGE


def _by_kernel(storages: Storages, what: Packing, keys: WordArray, do: Do, buffer: torch.Tensor | None) -> int | None:
    """None where there is no kernel, or where it could not be kept inside the storages' memory."""
    if not len(what.table):
        return 0
    if (what.table[:, : ROW_STRIDE + 1] < 0).any() or not _has_kernel(storages[int(what.table[0, STORAGE])].device):
        return None
    if len(what.table) == 1 and (total := _one_block(storages, what, keys, do, buffer)) is not None:
        return total
    table, used = of_packing(what, do, keys)
    bases = [storages[number] for number, _ in used]
    if any(base.element_size() != width for base, (_, width) in zip(bases, used, strict=True)):
        return None
    if buffer is not None:
        bases.append(buffer)
    sums = None if do is Do.SCATTER else torch.zeros(1, dtype=torch.int64, device=bases[0].device)
    try:
        run(plan(table, sound=True), bases, sums)
    except TableError:
        return None
    return 0 if sums is None else int(sums) & ((1 << 64) - 1)


def _one_block(storages: Storages, what: Packing, keys: WordArray, do: Do, buffer: torch.Tensor | None) -> int | None:
    """The same for a single block on a CPU, as pieces of large tensors are, without arrays: those take as long to make
    as the kernel takes for a megabyte. None where it is another case, or anything is not as it should be."""
    number, offset, rows, cols, stride, start, global_stride = what.table[0].tolist()
    data, regions = storages[number], native.load()
    width = data.element_size()
    inside = offset + (rows - 1) * stride + cols <= data.numel() and (rows == 1 or stride >= cols)
    room = buffer is None or (len(buffer) >= what.num_bytes and buffer.is_contiguous() and buffer.device == data.device)
    aligned = buffer is None or buffer.data_ptr() % width == 0
    if regions is None or data.device.type != "cpu" or not (data.is_contiguous() and inside and room and aligned):
        return None
    if width != what.sections[0].width:
        return None
    kind, there = BITS_OF_WIDTH[width], -1 if buffer is None else 1
    store, other = (0, offset, stride), (there, 0, cols)
    source, target = (other, store) if do in (Do.SCATTER, Do.LAND) else (store, other)
    slot = -1 if do is Do.SCATTER else 0
    return native.one(
        (*source, *target, rows, cols, kind, kind, slot, int(keys[number]), start, global_stride),
        (data.data_ptr(), 0 if buffer is None else buffer.data_ptr()),
    )


def _has_kernel(device: torch.device) -> bool:
    """On a CPU without a compiler, torch and numpy in bulk are faster than region by region."""
    return device.type != "cpu" or native.load() is not None
