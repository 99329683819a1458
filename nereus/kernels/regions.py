"""The descriptor table that every kernel reads: strided regions to move, convert and sum, in one launch.

A region is ``rows`` x ``cols`` elements at an offset of a source base and of a target base, rows a stride apart on
either side. One table packs a message, unpacks one, copies between storages, casts a master copy to weights, lays
q | k | v or gate | up into a fused tensor (several regions whose rows alternate in the target), or only sums what lies
somewhere, and any mix of these. Bases are given at launch, so a table outlives the buffers that it was made for.

Regions of a table run in any order and at the same time: no target may overlap another target or any source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

#: Columns. Offsets, strides and counts are in elements: of ``FROM`` on the source's side, of ``TO`` on the target's.
#: ``DST`` -1: nothing is written. ``SLOT``: which checksum the written elements are added to, -1 for none; ``KEY`` and
#: the two global columns say where in which logical tensor they belong (``nereus.kernels.checksum``).
SRC, SRC_OFFSET, SRC_STRIDE, DST, DST_OFFSET, DST_STRIDE, NUM_ROWS, NUM_COLS, FROM, TO = range(10)
SLOT, KEY, GLOBAL_START, GLOBAL_STRIDE = range(10, 14)
#: Filled in by ``place``: a region is cut into tiles of that many rows and columns at most.
TILE_ROWS, TILE_COLS = 14, 15
NUM_GIVEN, NUM_COLUMNS = 14, 16

#: Types: bits of 1, 2, 4 and 8 bytes, which every dtype can travel as, and numbers that can be converted.
BITS8, BITS16, BITS32, BITS64, F16, BF16, F32 = range(7)
_WIDTHS = (1, 2, 4, 8, 2, 2, 4)
WIDTHS: IntArray = np.array(_WIDTHS, dtype=np.int64)
TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
NUMBERS = {torch.float16: F16, torch.bfloat16: BF16, torch.float32: F32}
BITS_OF_WIDTH = {1: BITS8, 2: BITS16, 4: BITS32, 8: BITS64}

#: Bytes of a tile, on its wider side.
TILE_BYTES = 16 << 10
#: Kernels divide by multiplication, which is exact for this many elements of a tile.
MAX_TILE_BYTES = 32 << 10

#: Least values of the columns before FROM; those up to _NEAR are multiplied without a thought.
_LEAST: IntArray = np.array([0, 0, 0, -1, 0, 0, 0, 0], dtype=np.int64)
_NEAR, _TOO_FAR = 1 << 30, float(1 << 58)
#: Tables of so many regions are looked through one by one.
_FEW = 8


class TableError(ValueError):
    """A region that cannot be run; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A table that was checked. ``needed_bytes`` and ``alignments``: of each base, 0 and 1 where it is not used;
    ``placed``: the table and its tiles on each device where it was launched."""

    table: IntArray
    needed_bytes: tuple[int, ...]
    alignments: tuple[int, ...]
    num_slots: int
    tile_bytes: int
    placed: dict[torch.device, Placed] = field(default_factory=dict, compare=False, repr=False)

    @property
    def moved_bytes(self) -> int:
        """Bytes written, and of regions that are only summed, bytes read."""
        return int((self.table[:, NUM_ROWS] * self.table[:, NUM_COLS] * WIDTHS[self.table[:, TO]]).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """On one device. ``region_of``, ``number_of``: a tile's region, and which of the region's tiles it is."""

    table: torch.Tensor
    region_of: torch.Tensor
    number_of: torch.Tensor


def plan(table: IntArray, *, tile_bytes: int = TILE_BYTES, sound: bool = False) -> Plan:
    """``table``: int64 [n, NUM_GIVEN], in any order; regions without elements are left out. Raises TableError.

    ``sound``: the caller knows that no region is wrong in itself, and has left out empty ones."""
    table = np.asarray(table)
    if table.ndim != 2 or table.shape[1] != NUM_GIVEN or table.dtype != np.int64:
        raise TableError(f"a table is int64 [regions, {NUM_GIVEN}], not {table.dtype} {list(table.shape)}")
    if not 256 <= tile_bytes <= MAX_TILE_BYTES or tile_bytes % 256:
        raise TableError(f"tile_bytes is a multiple of 256 up to {MAX_TILE_BYTES}, not {tile_bytes}")
    if not sound:
        _refuse(table)
        empty = (table[:, NUM_ROWS] == 0) | (table[:, NUM_COLS] == 0)
        if empty.any():
            table = table[~empty]
    out = np.zeros((len(table), NUM_COLUMNS), dtype=np.int64)
    out[:, :NUM_GIVEN] = table
    needed, alignments = _extents(table)
    return Plan(
        table=out,
        needed_bytes=needed,
        alignments=alignments,
        num_slots=int(table[:, SLOT].max(initial=-1)) + 1,
        tile_bytes=tile_bytes,
    )


def place(what: Plan, device: torch.device) -> Placed:
    """The table on ``device``, cut into tiles and moved there once; the list of tiles is made there."""
    if device not in what.placed:
        table = what.table.copy()
        counts = torch.from_numpy(_cut(table, what.tile_bytes)).to(device)
        region_of = torch.repeat_interleave(torch.arange(len(table), device=device), counts)
        number_of = torch.arange(len(region_of), device=device) - (counts.cumsum(0) - counts)[region_of]
        what.placed[device] = Placed(table=torch.from_numpy(table).to(device), region_of=region_of, number_of=number_of)
    return what.placed[device]


def check_bases(what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> torch.device:
    """The one device of all bases and sums. Raises TableError where a region would leave its base."""
    devices = set()
    for number, (needed, alignment) in enumerate(zip(what.needed_bytes, what.alignments, strict=True)):
        if not needed:
            continue
        base = bases[number] if number < len(bases) else None
        if base is None:
            raise TableError(f"regions use base {number}, which was not given")
        held = base.numel() * base.element_size()
        if not base.is_contiguous():
            raise TableError(f"base {number} is not contiguous")
        if held < needed:
            raise TableError(f"base {number} has {held:,} bytes, and regions reach to byte {needed:,}")
        if base.data_ptr() % alignment:
            raise TableError(f"base {number} begins at an address that is no multiple of {alignment}")
        devices.add(base.device)
    if what.num_slots:
        if sums is None or sums.dtype != torch.int64 or not sums.is_contiguous() or sums.numel() < what.num_slots:
            raise TableError(f"checksums need a contiguous int64 tensor of {what.num_slots} elements")
        devices.add(sums.device)
    if len(devices) > 1:
        raise TableError(f"bases and sums are on {', '.join(sorted(map(str, devices)))}; a launch is on one device")
    return devices.pop() if devices else torch.device("cpu")


def addresses(bases: Sequence[torch.Tensor | None]) -> IntArray:
    return np.array([0 if base is None else base.data_ptr() for base in bases], dtype=np.int64)


def type_of(dtype: torch.dtype) -> int:
    """The type that elements of ``dtype`` travel as without conversion."""
    return BITS_OF_WIDTH[dtype.itemsize]


def interleave(
    parts: Sequence[tuple[int, int, int]],
    *,
    groups: int,
    cols: int,
    dst: int,
    dst_offset: int = 0,
    dtype: torch.dtype,
    cast_from: torch.dtype | None = None,
    key: int = 0,
    slot: int = -1,
    global_start: int = 0,
) -> IntArray:
    """Regions that fuse tensors: in each of ``groups`` groups of the target come some rows of each part in turn.

    ``parts``: (base, offset of the first element, rows of each group), each part contiguous with rows of ``cols``
    elements; so q | k | v by KV head is ``[(q, 0, heads * dim), (k, 0, dim), (v, 0, dim)]``, and gate | up of one rank
    is ``groups=1``. The target is contiguous from ``dst_offset`` on, and its elements are numbered from
    ``global_start`` on.
    """
    group = sum(rows for _, _, rows in parts) * cols
    kinds = (type_of(dtype), type_of(dtype))
    if cast_from is not None and cast_from != dtype:
        if cast_from not in NUMBERS or dtype not in NUMBERS:
            raise TableError(f"no conversion from {cast_from} to {dtype}")
        kinds = (NUMBERS[cast_from], NUMBERS[dtype])
    out, before = [], 0
    for base, offset, rows in parts:
        size = rows * cols
        where = (base, offset, size, dst, dst_offset + before, group)
        out.append((*where, groups, size, *kinds, slot, key, global_start + before, group))
        before += size
    return np.array(out, dtype=np.int64).reshape(-1, NUM_GIVEN)


def _refuse(table: IntArray) -> None:
    """TableError for the first region that is wrong in itself."""
    if not len(table):
        return
    kinds = table[:, FROM : TO + 1]
    summed_only = table[:, DST] < 0
    casts = table[:, FROM] != table[:, TO]
    faults = {
        "a negative offset, stride, count or base": (table[:, :FROM] < _LEAST).any(axis=1),
        "a type that there is not": ((kinds < 0) | (kinds >= len(WIDTHS))).any(axis=1),
        "a conversion that there is not": casts & (kinds < F16).any(axis=1),
        "a negative checksum slot": table[:, SLOT] < -1,
        "neither a target nor a checksum": summed_only & (table[:, SLOT] < 0),
        "a conversion without a target": summed_only & casts,
        "target rows that overlap": (
            ~summed_only & (table[:, NUM_ROWS] > 1) & (table[:, DST_STRIDE] < table[:, NUM_COLS])
        ),
    }
    if table[:, :FROM].max() > _NEAR:  # products may be more than 64 bits hold
        rows = table[:, NUM_ROWS].astype(np.float64)
        stride = np.maximum(table[:, SRC_STRIDE], table[:, DST_STRIDE])
        offset = np.maximum(table[:, SRC_OFFSET], table[:, DST_OFFSET])
        faults["an end beyond all memory"] = rows * stride + offset + table[:, NUM_COLS] > _TOO_FAR
    for text, wrong in faults.items():
        if wrong.any():
            raise TableError(f"region {int(np.flatnonzero(wrong)[0])} has {text}")


def _cut(table: IntArray, tile_bytes: int) -> IntArray:
    """Fill in the columns of tiles, and make regions without gaps one row; the number of tiles of each region."""
    rows, cols = table[:, NUM_ROWS], table[:, NUM_COLS]
    flat = (table[:, SRC_STRIDE] == cols) & ((table[:, DST] < 0) | (table[:, DST_STRIDE] == cols))
    flat = (flat & ((table[:, SLOT] < 0) | (table[:, GLOBAL_STRIDE] == cols))) | (rows == 1)
    table[flat, NUM_COLS] = rows[flat] * cols[flat]
    table[flat, NUM_ROWS] = 1
    table[np.ix_(flat, [SRC_STRIDE, DST_STRIDE, GLOBAL_STRIDE])] = 0
    most = tile_bytes // np.maximum(WIDTHS[table[:, FROM]], WIDTHS[table[:, TO]])
    parts = (cols - 1) // most + 1
    # Long rows are cut into equal parts that begin on 16 bytes wherever the row does.
    table[:, TILE_COLS] = np.where(parts > 1, np.minimum(((cols - 1) // parts + 16) // 16 * 16, most), cols)
    table[:, TILE_ROWS] = np.where(parts > 1, 1, np.minimum(most // cols, rows))
    tiles: IntArray = ((rows - 1) // table[:, TILE_ROWS] + 1) * ((cols - 1) // table[:, TILE_COLS] + 1)
    return tiles


def _extents(table: IntArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each base: bytes that regions reach, and the widest element there."""
    if len(table) <= _FEW:
        return _extents_of_few(table.tolist())
    num = int(max(table[:, SRC].max(initial=-1), table[:, DST].max(initial=-1))) + 1
    needed, alignments = np.zeros(num, dtype=np.int64), np.ones(num, dtype=np.int64)
    rows = table[:, NUM_ROWS] - 1
    for base, kind in ((SRC, FROM), (DST, TO)):
        width = WIDTHS[table[:, kind]]
        end = (table[:, base + 1] + rows * table[:, base + 2] + table[:, NUM_COLS]) * width
        number = table[:, base]
        if base == DST and (number < 0).any():
            used = number >= 0
            number, end, width = number[used], end[used], width[used]
        np.maximum.at(needed, number, end)
        np.maximum.at(alignments, number, width)
    return tuple(needed.tolist()), tuple(alignments.tolist())


def _extents_of_few(table: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same without arrays: most messages are a region or two, and an array costs more to make than to fill."""
    num = max((max(region[SRC], region[DST]) for region in table), default=-1) + 1
    needed, alignments = [0] * num, [1] * num
    for region in table:
        for side, kind in ((SRC, FROM), (DST, TO)):
            base, offset, stride = region[side : side + 3]
            if base >= 0:
                width = _WIDTHS[region[kind]]
                end = offset + (region[NUM_ROWS] - 1) * stride + region[NUM_COLS]
                needed[base] = max(needed[base], end * width)
                alignments[base] = max(alignments[base], width)
    return tuple(needed), tuple(alignments)
