"""Blocks of CPU memory on their way from or to where they lie: sent to a socket, received from one, or read out of
another process, each part summed while a core still has it in its cache (``flow.c``).

What moves like this needs no staging: the system gathers and scatters the rows. Nothing waits: ``send`` and ``receive``
do what the socket lets them do now, and go on at the next call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.kernels import native
from nereus.kernels.checksum import WordArray
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
)

#: Columns of the table of ``flow.c``; the first ``NUM_PLACE`` say where rows lie.
ADDRESS, ROWS, ROW_BYTES, STRIDE, WORD, KEY, FIRST, STEP = range(8)
NUM_PLACE = 4

_MASK = (1 << 64) - 1
#: block, row and byte of what has moved and of what is summed, and the sum.
_Cursor = ctypes.c_int64 * 7


@dataclass(frozen=True, slots=True)
class Calls:
    send: Callable[..., int]
    receive: Callable[..., int]
    read: Callable[..., int]
    sum: Callable[..., None]


@functools.cache
def calls() -> Calls | None:
    """None without a C compiler: then nothing moves in this way."""
    found = native.library() if native.load() is not None else None
    if found is None:
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    for function in (found.nereus_send, found.nereus_receive):
        function.argtypes, function.restype = [number, address, number, address], number
    found.nereus_read.argtypes = [number, address, number, address, number, address]
    found.nereus_read.restype = number
    found.nereus_sum.argtypes, found.nereus_sum.restype = [address, number, address], None
    return Calls(found.nereus_send, found.nereus_receive, found.nereus_read, found.nereus_sum)


@dataclass(frozen=True, slots=True)
class Course:
    """A packing's blocks, in the order of its buffer, wherever their storages begin: ``table`` with offsets for
    addresses. ``row_bytes``: of a run that is in one piece, on average."""

    storages: IntArray
    table: IntArray
    num_bytes: int
    row_bytes: int

    @classmethod
    def of(cls, what: Packing, keys: WordArray) -> Course:
        blocks = what.table
        out = np.empty((len(blocks), 8), dtype=np.int64)
        for section in what.sections:
            part, width = slice(section.first, section.last), section.width
            word = min(width, 4)
            out[part, [ADDRESS, ROWS, ROW_BYTES, STRIDE]] = blocks[part, [OFFSET, NUM_ROWS, NUM_COLS, ROW_STRIDE]]
            out[part, [ADDRESS, ROW_BYTES, STRIDE]] *= width
            out[part, WORD] = word
            out[part, [FIRST, STEP]] = blocks[part, [GLOBAL_START, GLOBAL_STRIDE]] * (width // word)
        out[:, KEY] = keys.view(np.int64)[blocks[:, STORAGE]]
        single = out[:, ROWS] == 1
        out[single, STRIDE] = out[single, ROW_BYTES]
        runs = np.where(out[:, STRIDE] == out[:, ROW_BYTES], 1, out[:, ROWS])
        return cls(blocks[:, STORAGE].copy(), out, what.num_bytes, what.num_bytes // max(1, int(runs.sum())))

    def at(self, bases: IntArray) -> Flow:
        """``bases``: address of every storage, by number. The storages have to stay as long as it is used."""
        table = self.table.copy()
        table[:, ADDRESS] += bases[self.storages]
        return Flow(table, self.num_bytes)


class Flow:
    """``num_bytes`` on their way, once."""

    __slots__ = ("_at", "_cursor", "num_bytes", "table")

    def __init__(self, table: IntArray, num_bytes: int) -> None:
        self.table, self.num_bytes = table, num_bytes
        self._at, self._cursor = table.ctypes.data, _Cursor()

    def send(self, socket: int) -> bool:
        """Whether all has gone. Raises OSError."""
        return bool(_checked(_calls().send(socket, self._at, len(self.table), ctypes.addressof(self._cursor))))

    def receive(self, socket: int) -> bool:
        """Whether all has come. Raises OSError, EPIPE where the other side has closed."""
        return bool(_checked(_calls().receive(socket, self._at, len(self.table), ctypes.addressof(self._cursor))))

    def read(self, pid: int, places: IntArray) -> None:
        """From ``places`` (of another flow) in the memory of process ``pid``. Raises OSError."""
        there, here = places.ctypes.data, ctypes.addressof(self._cursor)
        _checked(_calls().read(pid, there, len(places), self._at, len(self.table), here))

    @property
    def left_bytes(self) -> int:
        """That have not moved."""
        block, row, byte = self._cursor[0], self._cursor[1], self._cursor[2]
        ahead = self.table[block:, ROWS] * self.table[block:, ROW_BYTES]
        return int(ahead.sum()) - (row * int(self.table[block, ROW_BYTES]) + byte if len(ahead) else 0)

    def content(self) -> bytes:
        """A copy of all that lies there now."""
        rows = (
            (each[ADDRESS] + i * each[STRIDE], each[ROW_BYTES])
            for each in self.table.tolist()
            for i in range(each[ROWS])
        )
        return b"".join(ctypes.string_at(address, size) for address, size in rows)

    @property
    def places(self) -> IntArray:
        """[blocks, NUM_PLACE]."""
        return np.ascontiguousarray(self.table[:, :NUM_PLACE])

    def total(self) -> int:
        """The checksum of all that has moved."""
        return int(self._cursor[6]) & _MASK

    def summed(self) -> int:
        """The checksum of all that lies there now."""
        cursor = _Cursor()
        _calls().sum(self._at, len(self.table), ctypes.addressof(cursor))
        return int(cursor[6]) & _MASK


def _calls() -> Any:
    found = calls()
    assert found is not None  # nobody makes a flow else
    return found


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
