# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The kernel in Triton: one program a tile. Imported only where triton is installed.

Bits travel as words of 4 bytes wherever addresses and row lengths allow, else element by element; numbers are converted
element by element. The tile's rectangle is walked flat, so that rows of any length fill the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nereus.kernels import regions
from nereus.kernels.regions import Plan, addresses, place

#: Lanes of a program, each with one word or element at a time.
BLOCK = 1024
NUM_WARPS = 4

# Triton wants what a kernel refers to as constants of its own kind.
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MIX = tl.constexpr(0xD6E8FEB86659FD93)
_SRC = tl.constexpr(regions.SRC)
_SRC_OFFSET = tl.constexpr(regions.SRC_OFFSET)
_SRC_STRIDE = tl.constexpr(regions.SRC_STRIDE)
_DST = tl.constexpr(regions.DST)
_DST_OFFSET = tl.constexpr(regions.DST_OFFSET)
_DST_STRIDE = tl.constexpr(regions.DST_STRIDE)
_NUM_ROWS = tl.constexpr(regions.NUM_ROWS)
_NUM_COLS = tl.constexpr(regions.NUM_COLS)
_FROM = tl.constexpr(regions.FROM)
_TO = tl.constexpr(regions.TO)
_SLOT = tl.constexpr(regions.SLOT)
_KEY = tl.constexpr(regions.KEY)
_GLOBAL_START = tl.constexpr(regions.GLOBAL_START)
_GLOBAL_STRIDE = tl.constexpr(regions.GLOBAL_STRIDE)
_TILE_ROWS = tl.constexpr(regions.TILE_ROWS)
_TILE_COLS = tl.constexpr(regions.TILE_COLS)
_NUM_COLUMNS = tl.constexpr(regions.NUM_COLUMNS)
_BITS8 = tl.constexpr(regions.BITS8)
_BITS16 = tl.constexpr(regions.BITS16)
_BITS64 = tl.constexpr(regions.BITS64)
_BITS32 = tl.constexpr(regions.BITS32)
_F16 = tl.constexpr(regions.F16)
_BF16 = tl.constexpr(regions.BF16)
_F32 = tl.constexpr(regions.F32)


class Triton:
    """``launch`` adds the checksums to ``sums``; arguments were checked."""

    name = "triton"

    def launch(self, what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None:
        device = next(base.device for base in bases if base is not None)
        at = place(what, device)
        if not len(at.region_of):
            return
        pointers = torch.from_numpy(addresses(bases)).to(device)
        totals = pointers if sums is None else sums  # without slots nothing is written there
        grid = (len(at.region_of),)
        run_tile[grid](at.table, at.region_of, at.number_of, pointers, totals, BLOCK=BLOCK, num_warps=NUM_WARPS)


@triton.jit
def _place_factor(index):
    x = (index.to(tl.uint32) & 255) * 0x9E3779B1 + 0x9E3779B1
    x = x ^ (x >> 15)
    x = x * 0x85EBCA77
    x = x ^ (x >> 13)
    return x | 1


@triton.jit
def _block_factor(key, block):
    x = key + block * _STEP
    x = x ^ (x >> 32)
    x = x * _MIX
    x = x ^ (x >> 29)
    return x | 1


@triton.jit
def _places(first, magic, cols, BLOCK: tl.constexpr):
    """The lanes' numbers in the rectangle, rows and columns, uint32: a division without dividing, exact up to 2^15."""
    number = (first + tl.arange(0, BLOCK)).to(tl.uint32)
    row = tl.where(cols == 1, number, tl.umulhi(number, magic))
    return number, row, number - row * cols


@triton.jit
def _words(rectangle, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Words of 4 bytes, ``cols`` a row, each PARTS elements."""
    src, dst, src_stride, dst_stride, rows, cols, key, start, row_step, writes, sums = rectangle
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    magic = (((1 << 32) + cols - 1) // cols).to(tl.uint32)
    source, target = src.to(tl.pointer_type(tl.uint32)), dst.to(tl.pointer_type(tl.uint32))
    cols = cols.to(tl.uint32)
    num = rows.to(tl.uint32) * cols
    num_out = tl.where(writes, num, 0)
    for first in range(0, num.to(tl.int32), BLOCK):
        number, row, col = _places(first, magic, cols, BLOCK)
        row = row.to(tl.int64)
        value = tl.load(source + row * src_stride + col, mask=number < num, other=0)
        tl.store(target + row * dst_stride + col, value, mask=number < num_out)
        if sums:
            index = start + row.to(tl.uint64) * row_step + (col * PARTS).to(tl.uint64)
            # The parts of a word may lie in two blocks; the sums of each are multiplied by its factor once.
            here = tl.zeros((BLOCK,), dtype=tl.uint64)
            beyond = tl.zeros((BLOCK,), dtype=tl.uint64)
            for part in tl.static_range(PARTS):
                bits = value
                if PARTS == 2:
                    bits = (value >> (16 * part)) & 0xFFFF
                if PARTS == 4:
                    bits = (value >> (8 * part)) & 0xFF
                product = _place_factor(index + part).to(tl.uint64) * bits.to(tl.uint64)
                if PARTS == 1:
                    here += product
                else:
                    inside = ((index & 255) + part) < 256
                    here += tl.where(inside, product, 0)
                    beyond += tl.where(inside, 0, product)
            total += here * _block_factor(key, index >> 8)
            if PARTS > 1:
                total += beyond * _block_factor(key, (index >> 8) + 1)
    return tl.sum(total.to(tl.int64), axis=0)


@triton.jit
def _converted(value, kind_in, kind_out):
    """Bits of numbers, in uint32, to bits of other numbers: rounded to nearest even, one NaN a type."""
    half = value.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    wide = tl.where(kind_in == _F16, half, tl.where(kind_in == _BF16, value << 16, value))
    f16 = wide.to(tl.float32, bitcast=True).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    bf16 = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    out = tl.where(kind_out == _F16, f16, tl.where(kind_out == _BF16, bf16, wide))
    nan = tl.where(kind_out == _F16, 0x7E00, tl.where(kind_out == _BF16, 0x7FC0, 0x7FC00000)).to(tl.uint32)
    return tl.where((wide & 0x7FFFFFFF) > 0x7F800000, nan, out)


@triton.jit
def _elements(rectangle, kind_in, kind_out, BLOCK: tl.constexpr):
    """Elements of at most 4 bytes, one a lane; of any kinds, so that this loop is compiled once."""
    src, dst, src_stride, dst_stride, rows, cols, key, start, row_step, writes, sums = rectangle
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    magic = (((1 << 32) + cols - 1) // cols).to(tl.uint32)
    width_in, width_out = _width(kind_in), _width(kind_out)
    cols = cols.to(tl.uint32)
    num = rows.to(tl.uint32) * cols
    num_out = tl.where(writes, num, 0)
    for first in range(0, num.to(tl.int32), BLOCK):
        number, row, col = _places(first, magic, cols, BLOCK)
        row = row.to(tl.int64)
        at = row * src_stride + col
        one = tl.load(src.to(tl.pointer_type(tl.uint8)) + at, mask=number < tl.where(width_in == 1, num, 0), other=0)
        two = tl.load(src.to(tl.pointer_type(tl.uint16)) + at, mask=number < tl.where(width_in == 2, num, 0), other=0)
        four = tl.load(src.to(tl.pointer_type(tl.uint32)) + at, mask=number < tl.where(width_in == 4, num, 0), other=0)
        value = one.to(tl.uint32) | two.to(tl.uint32) | four
        if kind_in != kind_out:
            value = _converted(value, kind_in, kind_out)
        at = row * dst_stride + col
        ends = number < tl.where(width_out == 1, num_out, 0)
        tl.store(dst.to(tl.pointer_type(tl.uint8)) + at, value.to(tl.uint8), mask=ends)
        ends = number < tl.where(width_out == 2, num_out, 0)
        tl.store(dst.to(tl.pointer_type(tl.uint16)) + at, value.to(tl.uint16), mask=ends)
        ends = number < tl.where(width_out == 4, num_out, 0)
        tl.store(dst.to(tl.pointer_type(tl.uint32)) + at, value, mask=ends)
        if sums:
            index = start + row.to(tl.uint64) * row_step + col.to(tl.uint64)
            product = _place_factor(index).to(tl.uint64) * value.to(tl.uint64)
            total += tl.where(number < num, product * _block_factor(key, index >> 8), 0)
    return tl.sum(total.to(tl.int64), axis=0)


@triton.jit
def run_tile(table, region_of, number_of, bases, sums, BLOCK: tl.constexpr):
    """``table`` [regions, NUM_COLUMNS], ``region_of`` and ``number_of`` [tiles], ``bases``, ``sums``: int64."""
    tile = tl.program_id(0)
    region = table + tl.load(region_of + tile) * _NUM_COLUMNS
    number = tl.load(number_of + tile)
    kind_in = tl.load(region + _FROM)
    kind_out = tl.load(region + _TO)
    width_in, width_out = _width(kind_in), _width(kind_out)
    num_rows, num_cols = tl.load(region + _NUM_ROWS), tl.load(region + _NUM_COLS)
    tile_rows, tile_cols = tl.load(region + _TILE_ROWS), tl.load(region + _TILE_COLS)
    across = (num_cols - 1) // tile_cols + 1
    row, col = number // across * tile_rows, number % across * tile_cols
    rows, cols = tl.minimum(tile_rows, num_rows - row), tl.minimum(tile_cols, num_cols - col)
    src_stride, dst_stride = tl.load(region + _SRC_STRIDE), tl.load(region + _DST_STRIDE)
    src = tl.load(bases + tl.load(region + _SRC))
    src += (tl.load(region + _SRC_OFFSET) + row * src_stride + col) * width_in
    into = tl.load(region + _DST)
    writes = into >= 0
    dst = tl.load(bases + tl.maximum(into, 0))
    dst += (tl.load(region + _DST_OFFSET) + row * dst_stride + col) * width_out
    dst = tl.where(writes, dst, src)
    slot = tl.load(region + _SLOT)
    summed = slot >= 0
    scale = tl.where(width_out == 8, 2, 1).to(tl.int64)
    global_stride = tl.load(region + _GLOBAL_STRIDE)
    row_step = (global_stride * scale).to(tl.uint64)
    start = ((tl.load(region + _GLOBAL_START) + row * global_stride + col) * scale).to(tl.uint64)
    key = tl.load(region + _KEY).to(tl.uint64)
    total = tl.zeros((), dtype=tl.int64)
    ways = src | dst | (cols * width_out)
    if rows > 1:
        ways = ways | (src_stride * width_out) | tl.where(writes, dst_stride * width_out, 0)
    if (kind_in == kind_out) & (ways % 4 == 0):
        # The same rectangle in words.
        cols = cols * width_out // 4
        src_stride = src_stride * width_out // 4
        dst_stride = dst_stride * width_out // 4
        rectangle = (src, dst, src_stride, dst_stride, rows, cols, key, start, row_step, writes, summed)
        if width_out == 2:
            total = _words(rectangle, 2, BLOCK)
        elif width_out == 1:
            total = _words(rectangle, 4, BLOCK)
        else:
            total = _words(rectangle, 1, BLOCK)
    else:
        rectangle = (src, dst, src_stride, dst_stride, rows, cols, key, start, row_step, writes, summed)
        total = _elements(rectangle, kind_in, kind_out, BLOCK)
    if summed:
        tl.atomic_add(sums + slot, total, sem="relaxed")


@triton.jit
def _width(kind):
    """Bytes of an element, int64."""
    width = tl.where((kind == _BITS32) | (kind == _F32), 4, 2)
    width = tl.where(kind == _BITS8, 1, width)
    return tl.where(kind == _BITS64, 8, width).to(tl.int64)
