"""Descriptor tables made by hypothesis, and the kernels that a CPU can run."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from nereus.kernels import native
from nereus.kernels import regions as r
from nereus.kernels.cache import source

NUMBERS = (r.F16, r.BF16, r.F32)
KINDS = [(kind, kind) for kind in range(len(r.WIDTHS))] + [(a, b) for a in NUMBERS for b in NUMBERS if a != b]
NUM_SLOTS = 3
#: Bits of floats at which a conversion changes its mind.
TRICKY = (
    0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x00800000, 0x33000000,
    0x33000001, 0x32FFFFFF, 0x33800000, 0x33C00000, 0x387FFFFF, 0x387FE000, 0x387FF000, 0x38800000, 0x477FEFFF,
    0x477FF000, 0xC77FFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000,
)  # fmt: skip


def weight(key: int, index: int) -> int:
    """The checksum's factor of word ``index``, as docs/kernels.md defines it."""
    x = (key + (index >> 8) * 0x9E3779B97F4A7C15) % 2**64
    x ^= x >> 32
    x = x * 0xD6E8FEB86659FD93 % 2**64
    place = (index % 256 + 1) * 0x9E3779B1 % 2**32
    place ^= place >> 15
    place = place * 0x85EBCA77 % 2**32
    return ((x ^ x >> 29) | 1) * ((place ^ place >> 13) | 1)


@st.composite
def tables(draw: Any, *, num: int = 6, rows: int = 5, cols: int = 90) -> tuple[r.Plan, Any, int]:
    """(plan, source bytes, bytes of the target): regions that do not overlap, at any alignment that their types allow,
    of two sources' worth of gaps, some empty, some without target, some without checksum."""
    table, ends = [], [0, 0]
    for _ in range(draw(st.integers(1, num))):
        kinds = draw(st.sampled_from(KINDS))
        shape = (draw(st.integers(0, rows)), draw(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 33, 64, cols])))
        align = draw(st.sampled_from([1, 1, 4, 16]))
        strides, begins = [], []
        for side, kind in enumerate(kinds):
            width = int(r.WIDTHS[kind])
            strides.append(shape[1] + draw(st.sampled_from([0, 0, 1, 4, 8])))
            step = max(align, width)
            begins.append(-(-ends[side] // step) * step // width)
            ends[side] = (begins[-1] + shape[0] * strides[-1]) * width
        slot = draw(st.integers(-1, NUM_SLOTS - 1))
        target = draw(st.sampled_from([1, 1, 1, -1])) if kinds[0] == kinds[1] and slot >= 0 else 1
        key = draw(st.integers(-(1 << 63), (1 << 63) - 1))
        where = (0, begins[0], strides[0], target, begins[1], strides[1])
        numbered = (slot, key, draw(st.integers(0, 1 << 40)), shape[1] + draw(st.integers(0, 3)))
        table.append((*where, *shape, *kinds, *numbered))
    order = draw(st.permutations(table))
    data = tricky_bytes(ends[0] + 64, draw(st.integers(0, 1000)))
    what = r.plan(np.array(order, dtype=np.int64), tile_bytes=draw(st.sampled_from([256, 512, r.TILE_BYTES])))
    return what, data, ends[1] + 64


def tricky_bytes(size: int, seed: int) -> Any:
    """Random bits, among them numbers at the edges of every format."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, size // 4 + 1, dtype=np.uint64).astype(np.uint32)
    chosen = rng.random(len(words)) < 0.2
    words[chosen] = rng.choice(np.array(TRICKY, dtype=np.uint32), int(chosen.sum()))
    return torch.from_numpy(words.view(np.uint8)[:size].copy())


def answer(kernel: Any, what: r.Plan, bases: list[Any], size: int) -> tuple[Any, list[int]]:
    """What a launch leaves in a target of ``size`` bytes, and the sums, which begin at 7."""
    target, sums = torch.full((size,), 0xA5, dtype=torch.uint8), torch.full((NUM_SLOTS,), 7)
    kernel.launch(what, [*bases, target], sums)
    return target, sums.tolist()


class SourceOnHost:
    """``regions.cu``, compiled as C++, lane after lane."""

    name = "source on a CPU"

    def __init__(self, function: Any) -> None:
        self.function = function

    def launch(self, what: r.Plan, bases: Any, sums: Any) -> None:
        at, pointers = r.place(what, torch.device("cpu")), r.addresses(bases)
        self.function(
            *(ctypes.c_void_p(t.data_ptr()) for t in (at.table, at.region_of, at.number_of)),
            ctypes.c_int64(len(at.region_of)),
            ctypes.c_void_p(pointers.ctypes.data),
            ctypes.c_void_p(sums.data_ptr()),
        )


@functools.cache
def kernel(name: str) -> Any:
    """A kernel that runs on this CPU; skips the test where it cannot be had."""
    if name == "native":
        if native.load() is None:
            pytest.skip("no C compiler here")
        return native.Native()
    if name == "source":
        if shutil.which("c++") is None:
            pytest.skip("no C++ compiler here")
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "regions.cpp"
            path.write_bytes(source("regions.cu"))
            command = ["c++", "-O1", "-std=c++17", "-DNEREUS_HOST", "-shared", "-fPIC", "-o", "regions.so", path.name]
            subprocess.run(command, cwd=work, check=True, timeout=100)
            return SourceOnHost(ctypes.CDLL(str(Path(work) / "regions.so")).nereus_regions)
    pytest.importorskip("triton")
    from nereus.kernels.triton_regions import Triton  # tests/kernels/conftest.py has it interpreted

    return Triton()
