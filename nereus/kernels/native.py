"""The kernel for CPUs: builds ``regions.c`` and ``flow.c`` with the system's C compiler at first use.

Never required: without a compiler, or where anything about the cache or the library is not as it should be, there is
none, and torch and numpy do the work. ``NEREUS_NATIVE=0`` asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nereus.kernels.cache import cached, source
from nereus.kernels.checksum import weight_of
from nereus.kernels.regions import NUM_COLUMNS, Plan, addresses

#: (table address, regions, addresses of bases, address of sums)
Regions = Callable[[int, int, int, int], None]

_BUILD_S = 60.0


class Native:
    """``launch`` adds the checksums to ``sums``; arguments were checked, and ``load()`` has something."""

    name = "native"

    def launch(self, what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None:
        regions = load()
        assert regions is not None
        table, at = what.table, addresses(bases)
        regions(table.ctypes.data, len(table), at.ctypes.data, 0 if sums is None else sums.data_ptr())


def one(region: tuple[int, ...], bases: tuple[int, int]) -> int:
    """A single region, checked by the caller; its checksum. ``load()`` has something."""
    regions = load()
    assert regions is not None
    table = (ctypes.c_int64 * NUM_COLUMNS)(*(v - (1 << 64) if v >> 63 > 0 else v for v in region))
    at, sums = (ctypes.c_int64 * 2)(*bases), ctypes.c_uint64(0)
    regions(ctypes.addressof(table), 1, ctypes.addressof(at), ctypes.addressof(sums))
    return sums.value


@functools.cache
def load() -> Regions | None:
    """``nereus_regions``, or None where it cannot be had."""
    found = library()
    if found is None:
        return None
    function = found.nereus_regions
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    regions: Regions = function
    return regions if all(_agrees(regions, width) for width in (1, 2, 4, 8)) else None


def library() -> ctypes.CDLL | None:
    """All that was built, or None where it cannot be had."""
    if os.environ.get("NEREUS_NATIVE") == "0" or sys.byteorder != "little" or not hasattr(os, "getuid"):
        return None
    try:
        path = _built()
        return None if path is None else ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _built() -> Path | None:
    """The library for these sources on this kind of machine, compiled if it is not in the cache yet."""
    texts, compiler = {name: source(name) for name in ("regions.c", "flow.c")}, shutil.which("cc")

    def make(work: Path) -> Path:
        if compiler is None:
            raise FileNotFoundError("no C compiler")
        for name, text in texts.items():
            (work / name).write_bytes(text)
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", "native.so", *texts]
        subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=_BUILD_S)
        return work / "native.so"

    return cached("native", ".so", b"".join(texts.values()), make)


def _agrees(regions: Regions, width: int) -> bool:
    """Two rows of 7 elements, 9 apart, moved and summed as the definition says."""
    data = bytes((37 * i + 11) % 256 for i in range(16 * width))
    source, buffer = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(14 * width)
    key, start, stride = 0x1234_5678_9ABC_DEF0, 1 << 33, 21
    kind = {1: 0, 2: 1, 4: 2, 8: 3}[width]
    table = (ctypes.c_int64 * NUM_COLUMNS)(0, 0, 9, 1, 0, 7, 2, 7, kind, kind, 0, key, start, stride, 2, 7)
    bases = (ctypes.c_int64 * 2)(ctypes.addressof(source), ctypes.addressof(buffer))
    sums = (ctypes.c_uint64 * 1)(5)
    regions(ctypes.addressof(table), 1, ctypes.addressof(bases), ctypes.addressof(sums))
    word = min(width, 4)
    mask, total, packed = (1 << 64) - 1, 5, b""
    for row in range(2):
        part = data[9 * row * width : (9 * row + 7) * width]
        packed += part
        for i in range(len(part) // word):
            weight = weight_of(key, (start + row * stride) * (width // word) + i)
            total += weight * int.from_bytes(part[i * word : (i + 1) * word], "little")
    return sums[0] == total & mask and buffer.raw == packed
