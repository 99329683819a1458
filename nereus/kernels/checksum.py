"""A checksum that knows where every element belongs.

Sum modulo 2^64 over words of ``word * weight(tensor, index)``; a word is an element's bits, an element of 8 bytes two
words. The weight is the product of an odd number of 32 bits for the word's place among 256, and an odd one of 64 bits
for the tensor and the group of 256. The sum is associative, so sender and receiver may cut and order the elements as
they like, and since the weight depends on tensor and index, a swapped row, a shifted range or a mixed-up tensor is
caught as a flipped bit is: one wrong word, and two of a group that changed places, always; anything else but for
chance, one in 2^40 at the worst (bytes that are shuffled inside one group).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nereus.kernels.pack import GLOBAL_START, GLOBAL_STRIDE, NUM_COLS, NUM_ROWS, STORAGE, IntArray, Packing

WordArray = npt.NDArray[np.uint64]

#: Words at one time: three arrays of 8 bytes each stay in a core's cache.
CHUNK = 1 << 15

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_ONE, _HIGH, _LOW = np.uint64(1), np.uint64(32), np.uint64(29)
_RAMP: WordArray = np.arange(CHUNK, dtype=np.uint64)
_MASK = (1 << 64) - 1

#: Words that share a factor of 64 bits.
BLOCK_WORDS = 256
_BLOCK, _PLACES = np.uint64(8), np.uint64(BLOCK_WORDS - 1)


def _place_factor(place: int) -> int:
    x = (place + 1) * 0x9E3779B1 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x85EBCA77 & 0xFFFFFFFF
    return x ^ x >> 13 | 1


#: Of a word's place among its ``BLOCK_WORDS``: all different.
PLACE_FACTORS = tuple(map(_place_factor, range(BLOCK_WORDS)))
_FACTORS: WordArray = np.array(PLACE_FACTORS, dtype=np.uint64)
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u4")}


def tensor_key(model: str, tensor: str, slot: str) -> int:
    """64 bits that stand for one logical tensor's slot."""
    digest = hashlib.blake2b("\0".join((model, tensor, slot)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def checksum(data: torch.Tensor, what: Packing, keys: WordArray) -> int:
    """Checksum of packed bytes. ``keys``: ``tensor_key`` of every storage, by number."""
    raw = data.numpy()
    total = 0
    for section in what.sections:
        part = raw[section.start_byte : section.start_byte + section.num_bytes]
        words = part.view(_WORDS[section.width])
        table = what.table[section.first : section.last]
        total += _sum_words(words, table, keys, scale=2 if section.width == 8 else 1)
    return total & _MASK


def weight_of(key: int, index: int) -> int:
    """The definition: the factor of word ``index`` of tensor ``key``."""
    x = (key + (index // BLOCK_WORDS) * int(_STEP)) & _MASK
    x ^= x >> 32
    x = x * int(_MIX) & _MASK
    x ^= x >> 29
    return (x | 1) * PLACE_FACTORS[index % BLOCK_WORDS] & _MASK


def _sum_words(words: npt.NDArray[np.unsignedinteger], table: IntArray, keys: WordArray, *, scale: int) -> int:
    total, position = 0, 0
    for number, start, rows, cols, stride in _chunks(table, scale):
        index, key = _indices(keys[number], start, rows, cols, stride)
        size = len(index)
        factors = _FACTORS[(index & _PLACES).astype(np.int64)]
        index >>= _BLOCK
        index *= _STEP
        index += key
        index ^= index >> _HIGH
        index *= _MIX
        index ^= index >> _LOW
        index |= _ONE
        index *= factors
        index *= words[position : position + size]
        total += int(index.sum(dtype=np.uint64))
        position += size
    return total


def _indices(
    keys: WordArray, start: IntArray, rows: IntArray, cols: IntArray, stride: IntArray
) -> tuple[WordArray, WordArray | np.uint64]:
    """Place in its tensor, and the tensor's key, of all words of some blocks, in order."""
    starts = start.astype(np.uint64)
    if len(starts) == 1 and rows[0] == 1:
        return starts[0] + _RAMP[: int(cols[0])], keys[0]
    if (rows != 1).any():
        row = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
        starts = np.repeat(starts, rows) + (row * np.repeat(stride, rows)).astype(np.uint64)
        keys, cols = np.repeat(keys, rows), np.repeat(cols, rows)
    before = (np.cumsum(cols) - cols).astype(np.uint64)
    index: WordArray = np.repeat(starts - before, cols)
    index += _RAMP[: len(index)]
    return index, np.repeat(keys, cols)


def _chunks(table: IntArray, scale: int) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray, IntArray]]:
    """(storage, global start, rows, columns, global stride) of pieces in order, at most ``CHUNK`` words together."""
    batch: list[tuple[int, int, int, int, int]] = []
    room = CHUNK
    for block in table.tolist():
        number, rows = block[STORAGE], block[NUM_ROWS]
        start, cols, stride = (block[i] * scale for i in (GLOBAL_START, NUM_COLS, GLOBAL_STRIDE))
        if rows == 1 or stride == cols:
            rows, cols, stride = 1, rows * cols, 0
        while rows:
            if rows > 1 and cols <= room:
                take = min(rows, room // cols)
                batch.append((number, start, take, cols, stride))
                start, rows, room = start + take * stride, rows - take, room - take * cols
            else:  # part of one row
                done = 0
                while done < cols:
                    take = min(cols - done, room)
                    batch.append((number, start + done, 1, take, 0))
                    done, room = done + take, room - take
                    if not room:
                        yield _columns(batch)
                        batch, room = [], CHUNK
                start, rows = start + stride, rows - 1
            if not room:
                yield _columns(batch)
                batch, room = [], CHUNK
    if batch:
        yield _columns(batch)


def _columns(
    batch: list[tuple[int, int, int, int, int]],
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    table = np.array(batch, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4]
