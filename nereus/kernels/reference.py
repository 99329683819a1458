"""The definition of what kernels do with a descriptor table, in torch on any device; every kernel equals it to the bit.

Also what runs where nothing else can: one region after another, so correct and slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nereus.kernels.checksum import BLOCK_WORDS, PLACE_FACTORS
from nereus.kernels.regions import (
    DST,
    DST_OFFSET,
    DST_STRIDE,
    FROM,
    GLOBAL_START,
    GLOBAL_STRIDE,
    KEY,
    NUM_COLS,
    NUM_ROWS,
    SLOT,
    SRC,
    SRC_OFFSET,
    SRC_STRIDE,
    TO,
    TYPES,
    Plan,
)

#: Elements whose checksum inputs (8 bytes each, several arrays) are in memory at one time.
CHUNK = 1 << 20

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xD6E8FEB86659FD93 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}


class Reference:
    """``launch`` adds the checksums to ``sums``; arguments were checked."""

    name = "reference"

    def launch(self, what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None:
        for region in what.table.tolist():
            source = _rectangle(bases[region[SRC]], TYPES[region[FROM]], region, SRC_OFFSET, SRC_STRIDE)
            written = source
            if region[FROM] != region[TO]:
                written = converted(source, TYPES[region[TO]])
            if region[DST] >= 0:
                target = _rectangle(bases[region[DST]], TYPES[region[TO]], region, DST_OFFSET, DST_STRIDE)
                _bits(target).copy_(_bits(written))
            if sums is not None and region[SLOT] >= 0:
                for part, start in _rows(written, region):
                    sums[region[SLOT]] += checksum(part, region[KEY], start, region[GLOBAL_STRIDE])


def converted(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to nearest even, overflow to infinity, subnormals kept; every NaN becomes the one of ``dtype``."""
    out = numbers.to(dtype)
    _bits(out)[numbers.isnan()] = _NAN[dtype]
    return out


def checksum(elements: torch.Tensor, key: int, start: int, row_stride: int) -> torch.Tensor:
    """Sum modulo 2^64, as int64, of elements [rows, cols] that are number ``start + row * row_stride + col`` of the
    logical tensor ``key``."""
    rows, cols = elements.shape
    width = elements.element_size()
    words = _bits(elements).contiguous()
    if width == 8:  # two words of 4 bytes
        words = words.view(torch.int32)
    scale = 2 if width == 8 else 1
    device = elements.device
    row = torch.arange(rows, device=device).unsqueeze(1) * (row_stride * scale)
    index = row + torch.arange(cols * scale, device=device) + start * scale
    x = _shifted(index, 8) * _STEP + key
    x = x ^ _shifted(x, 32)
    x = x * _MIX
    x = ((x ^ _shifted(x, 29)) | 1) * torch.tensor(PLACE_FACTORS, device=device)[index & (BLOCK_WORDS - 1)]
    values = words.to(torch.int64)
    if width < 8:
        values = values & ((1 << 8 * width) - 1)
    else:
        values = values & 0xFFFFFFFF
    return (x * values).sum()


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _rectangle(
    base: torch.Tensor | None, dtype: torch.dtype, region: list[int], offset: int, stride: int
) -> torch.Tensor:
    """A view of ``base``'s memory from its first byte on."""
    assert base is not None
    start = base.storage_offset() * base.element_size() // dtype.itemsize + region[offset]
    memory = torch.empty(0, dtype=dtype, device=base.device)
    return memory.set_(base.untyped_storage(), start, (region[NUM_ROWS], region[NUM_COLS]), (region[stride], 1))


def _rows(elements: torch.Tensor, region: list[int]) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts of at most ``CHUNK`` elements, and the number of the first one."""
    take = max(1, CHUNK // elements.shape[1])
    for row in range(0, elements.shape[0], take):
        for col in range(0, elements.shape[1], CHUNK):
            start = region[GLOBAL_START] + row * region[GLOBAL_STRIDE] + col
            yield elements[row : row + take, col : col + CHUNK], start
