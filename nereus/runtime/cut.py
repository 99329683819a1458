"""A program's work, cut and checked: all of it that does not depend on where storages lie, so it is done once for a
program that runs again and again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.program import Message, Program
from nereus.ir.units import DTYPE_BYTES
from nereus.kernels import flow
from nereus.kernels.checksum import tensor_key
from nereus.kernels.flow import Course
from nereus.kernels.move import pieces
from nereus.kernels.pack import Packing
from nereus.runtime.account import promised_peak
from nereus.runtime.validate import validate


@dataclass(frozen=True, slots=True)
class Piece:
    """``course``: how it can flow, where there is a C compiler."""

    what: Packing
    course: Course | None

    @property
    def num_bytes(self) -> int:
        return self.what.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Arrays are by storage number; ``sizes`` in bytes; ``pieces`` by the message's blocks. ``promised``: peak."""

    widths: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    sizes: tuple[int, ...]
    pieces: dict[int, tuple[Piece, ...]]
    promised: int

    def of(self, message: Message) -> tuple[Piece, ...]:
        return self.pieces[id(message)]


_cuts: weakref.WeakKeyDictionary[Program, Cut] = weakref.WeakKeyDictionary()


def cut(program: Program) -> Cut:
    """Raises Fault where the program is wrong in itself."""
    found = _cuts.get(program)
    if found is None:
        found = _cuts[program] = _cut(program)
    return found


def _cut(program: Program) -> Cut:
    validate(program)
    widths = np.array([DTYPE_BYTES[s.dtype] for s in program.storages], dtype=np.int64)
    keys = np.array([tensor_key(s.model, s.tensor, s.slot) for s in program.storages], dtype=np.uint64)
    flows = flow.calls() is not None
    made = {
        id(message): tuple(
            Piece(what, Course.of(what, keys) if flows else None) for what in pieces(message.blocks.table, widths)
        )
        for wave in program.waves
        for message in (*wave.sends, *wave.receives)
    }
    return Cut(
        widths=widths,
        keys=keys,
        sizes=tuple(spec.numel * DTYPE_BYTES[spec.dtype] for spec in program.storages),
        pieces=made,
        promised=promised_peak(program),
    )
