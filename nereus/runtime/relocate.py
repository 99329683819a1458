"""Programs speak of logical storages; frameworks have their own. Relocation points a program's blocks into them.

Every block lies inside one cell, and the cells of an exchange are cut wherever a fragment of either side ends, so a
block never crosses fragments: it keeps its shape and its place in the order, and only its offset and row stride change.
Both ends of a message therefore still agree without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.fragment import Fragment
from nereus.ir.layout import IntArray
from nereus.ir.program import (
    GLOBAL_START,
    NUM_COLS,
    NUM_ROWS,
    OFFSET,
    ROW_STRIDE,
    STORAGE,
    Blocks,
    LocalCopy,
    Message,
    Program,
    StorageSpec,
    Wave,
)


@dataclass(frozen=True, slots=True)
class Home:
    """Where the fragments of one logical storage lie: all in one framework storage of ``numel`` elements."""

    storage: int
    numel: int
    fragments: tuple[Fragment, ...]  # by first row


class RelocationError(ValueError):
    """A block does not lie in the fragments that were described: the description changed after it was compiled."""


def homes(fragments: Iterable[Fragment], numel: Sequence[int]) -> dict[tuple[str, str], Home]:
    """(tensor, slot) -> home. ``numel``: elements of every framework storage. RelocationError where a part is spread
    over several storages."""
    grouped: dict[tuple[str, str], list[Fragment]] = {}
    for fragment in fragments:
        grouped.setdefault((fragment.tensor, fragment.slot), []).append(fragment)
    found = {}
    for key, parts in grouped.items():
        numbers = {f.storage for f in parts}
        if len(numbers) > 1:
            raise RelocationError(f"{key[0]} {key[1]} lies in {len(numbers)} storages of one process")
        number = numbers.pop()
        found[key] = Home(number, numel[number], tuple(sorted(parts, key=lambda f: (f.row_lo, f.start))))
    return found


def relocate(program: Program, home_of: dict[int, Home]) -> Program:
    """``program`` on the framework's storages. ``home_of``: by storage id, for every storage of the program."""
    specs = tuple(_spec(spec, home_of[spec.id]) for spec in program.storages)

    def moved(blocks: Blocks) -> Blocks:
        return relocated(blocks, home_of, program.storages)

    waves = tuple(
        Wave(
            acquire=wave.acquire,
            copies=tuple(LocalCopy(src=moved(c.src), dst=moved(c.dst), cast=c.cast) for c in wave.copies),
            sends=tuple(Message(tag=m.tag, peer=m.peer, blocks=moved(m.blocks)) for m in wave.sends),
            receives=tuple(Message(tag=m.tag, peer=m.peer, blocks=moved(m.blocks)) for m in wave.receives),
            derives=tuple(LocalCopy(src=moved(c.src), dst=moved(c.dst), cast=c.cast) for c in wave.derives),
            release=wave.release,
        )
        for wave in program.waves
    )
    return replace(program, storages=specs, waves=waves)


def _spec(spec: StorageSpec, home: Home) -> StorageSpec:
    return replace(spec, extent=home.numel)


def relocated(blocks: Blocks, home_of: dict[int, Home], specs: Sequence[StorageSpec]) -> Blocks:
    """``blocks`` where the framework has them. ``specs``: by storage number, as compiled."""
    if not len(blocks):
        return blocks
    table = blocks.table.copy()
    order = np.argsort(table[:, STORAGE], kind="stable")
    bounds = np.flatnonzero(np.diff(table[order, STORAGE])) + 1
    for rows in np.split(order, bounds):
        spec = specs[int(table[rows[0], STORAGE])]
        _one_storage(table, rows, home_of[spec.id], spec)
    return Blocks(table)


def _one_storage(table: IntArray, rows: IntArray, home: Home, spec: StorageSpec) -> None:
    part = table[rows]
    # A row's stride in the logical tensor is its number of columns; blocks of one row leave it out.
    total = 1
    for extent in spec.tensor_shape[1:]:
        total *= extent
    first, col = part[:, GLOBAL_START] // total, part[:, GLOBAL_START] % total
    last = first + part[:, NUM_ROWS]
    starts = np.array([f.row_lo for f in home.fragments], dtype=np.int64)
    which = np.searchsorted(starts, first, side="right") - 1
    columns = np.array(
        [(f.row_lo, f.row_hi, f.col_lo, f.col_hi, f.start, f.stop, f.origin, f.stride) for f in home.fragments],
        dtype=np.int64,
    )
    row_lo, row_hi, col_lo, col_hi, start, stop, origin, stride = columns[np.maximum(which, 0)].T
    width = col_hi - col_lo
    begin = (first - row_lo) * width + col - col_lo
    end = (last - 1 - row_lo) * width + col - col_lo + part[:, NUM_COLS]
    inside = (which >= 0) & (last <= row_hi) & (col >= col_lo) & (col + part[:, NUM_COLS] <= col_hi)
    inside &= (begin >= start) & (end <= stop)
    if not inside.all():
        raise RelocationError(f"{spec.stage}: a block of {spec.tensor} {spec.slot} lies outside what was described")
    table[rows, OFFSET] = origin + (first - row_lo) * stride + col - col_lo
    table[rows, ROW_STRIDE] = stride
