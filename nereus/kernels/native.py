"""Builds ``blocks.c`` with the system's C compiler at first use and keeps it in the user's cache folder.

Never required: without a compiler, or where anything about the cache or the library is not as it should be, there is
none, and torch and numpy do the work. ``NEREUS_NATIVE=0`` asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

#: (table address, blocks, element width, SUM | GATHER | SCATTER, buffer address) -> checksum
Blocks = Callable[[int, int, int, int, int], int]

SUM, GATHER, SCATTER = range(3)
#: Columns of the library's block table: address, rows, columns, row stride, global start, global stride, key.
NUM_COLUMNS = 7

_BUILD_S = 60.0


@functools.cache
def load() -> Blocks | None:
    """``nereus_blocks``, or None where it cannot be had."""
    if os.environ.get("NEREUS_NATIVE") == "0" or sys.byteorder != "little" or not hasattr(os, "getuid"):
        return None
    try:
        path = _built()
        if path is None:
            return None
        function = ctypes.CDLL(str(path)).nereus_blocks
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    blocks: Blocks = function
    return blocks if all(_agrees(blocks, width) for width in (1, 2, 4, 8)) else None


def _built() -> Path | None:
    """The library for this source on this kind of machine, compiled if it is not in the cache yet."""
    source = resources.files("nereus.kernels").joinpath("blocks.c").read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nereus"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(source + platform.machine().encode() + platform.platform().encode()).hexdigest()[:16]
    path = folder / f"blocks-{name}.so"
    if not _is_ours(folder):
        return None
    if not path.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory(dir=folder) as work:
            (Path(work) / "blocks.c").write_bytes(source)
            command = [compiler, "-O3", "-shared", "-fPIC", "-o", "blocks.so", "blocks.c"]
            subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=_BUILD_S)
            os.replace(Path(work) / "blocks.so", path)  # whole, or not there, also for other processes
    return path if _is_ours(path) else None


def _is_ours(path: Path) -> bool:
    """Nobody else can have put code there."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _agrees(blocks: Blocks, width: int) -> bool:
    """Two rows of 7 elements, 9 apart, gathered and summed as the definition says."""
    data = bytes((37 * i + 11) % 256 for i in range(16 * width))
    source, buffer = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(14 * width)
    key, start, stride = 0x1234_5678_9ABC_DEF0, 1 << 33, 21
    table = (ctypes.c_int64 * NUM_COLUMNS)(ctypes.addressof(source), 2, 7, 9, start, stride, key)
    got = blocks(ctypes.addressof(table), 1, width, GATHER, ctypes.addressof(buffer))
    word = min(width, 4)
    mask, total, packed = (1 << 64) - 1, 0, b""
    for row in range(2):
        part = data[9 * row * width : (9 * row + 7) * width]
        packed += part
        for i in range(len(part) // word):
            value = (key + ((start + row * stride) * (width // word) + i) * 0x9E3779B97F4A7C15) & mask
            value ^= value >> 32
            value = value * 0xD6E8FEB86659FD93 & mask
            value ^= value >> 29
            total += (value | 1) * int.from_bytes(part[i * word : (i + 1) * word], "little")
    return got == total & mask and buffer.raw == packed
