from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel_support import weight  # noqa: E402

from nereus.kernels import checksum as module  # noqa: E402
from nereus.kernels.checksum import checksum, tensor_key  # noqa: E402
from nereus.kernels.pack import pack, packing  # noqa: E402

KEYS = np.array([tensor_key("actor", "a.weight", "weight"), tensor_key("actor", "b.weight", "weight")], dtype=np.uint64)


def packed_sum(storages: list[Any], table: Any, keys: Any = KEYS) -> int:
    what = packing(np.array(table, dtype=np.int64), np.array([s.element_size() for s in storages]))
    staging = torch.empty(what.num_bytes, dtype=torch.uint8)
    pack(storages, what, staging)
    return checksum(staging, what, keys)


def plain_sum(storage: Any, row: Any, key: int) -> int:
    """The definition, one element at a time."""
    mask = (1 << 64) - 1
    raw = storage.view(torch.uint8).numpy().tobytes()
    width = storage.element_size()
    word = min(width, 4)
    total = 0
    _, offset, rows, cols, stride, start, global_stride = row
    for r in range(rows):
        for c in range(cols):
            at, index = (offset + r * stride + c) * width, start + r * global_stride + c
            for part in range(width // word):
                bits = int.from_bytes(raw[at + part * word : at + (part + 1) * word], "little")
                total += bits * weight(key, index * (width // word) + part)
    return total & mask


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int8]),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(0, 1 << 40),
    st.integers(2, 16),
)
def test_equals_its_definition_in_any_chunks(
    dtype: Any, rows: int, cols: int, gap: int, start: int, chunk: int
) -> None:
    data = torch.from_numpy(np.random.default_rng(rows).integers(0, 256, 800, dtype=np.uint8)).view(dtype)
    row = (0, 3, rows, cols, cols, start, cols + gap)
    expected = plain_sum(data, row, int(KEYS[0]))
    assert packed_sum([data], [row]) == expected
    whole = module.CHUNK
    try:
        module.CHUNK = chunk
        assert packed_sum([data], [row]) == expected
    finally:
        module.CHUNK = whole


def test_any_cut_of_the_elements_gives_the_same_sum() -> None:
    data = [torch.randn(50_000), torch.randn(700).bfloat16()]
    whole = packed_sum(data, [(0, 0, 1, 50_000, 0, 7, 0), (1, 0, 70, 10, 10, 5, 40)])
    pieces = [(1, 10 * r, 1, 10, 0, 5 + 40 * r, 0) for r in reversed(range(70))]
    pieces += [(0, a, 1, 1_000, 0, 7 + a, 0) for a in range(0, 50_000, 1_000)]
    assert packed_sum(data, pieces) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_faults_are_caught(dtype: Any) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(640).to(dtype), torch.randn(640).to(dtype)
    table = [(0, 0, 32, 20, 20, 100, 50), (1, 0, 32, 20, 20, 100, 50)]
    right = packed_sum([a, b], table)
    other_slot = tensor_key("actor", "a.weight", "master")
    swapped = a.view(32, 20).clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    faults = {
        "two rows swapped": packed_sum([swapped.reshape(-1), b], table),
        "two tensors swapped": packed_sum([b, a], table),
        "index shifted": packed_sum([a, b], [(0, 0, 32, 20, 20, 101, 50), table[1]]),
        "rows one column further": packed_sum([a.roll(1), b], table),
        "another row distance": packed_sum([a, b], [(0, 0, 32, 20, 20, 100, 51), table[1]]),
        "another slot": packed_sum([a, b], table, np.array([other_slot, KEYS[1]], dtype=np.uint64)),
    }
    raw = a.view(torch.uint8)
    for byte in range(0, raw.numel(), 37):
        for bit in range(8):
            flipped = raw.clone()
            flipped[byte] ^= 1 << bit
            faults[f"bit {bit} of byte {byte} flipped"] = packed_sum([flipped.view(dtype), b], table)
    assert [name for name, value in faults.items() if value == right] == []


def test_memory_stays_bounded() -> None:
    data = torch.zeros(8_000_000, dtype=torch.bfloat16)
    what = packing(np.array([(0, 0, 4_000_000, 2, 2, 0, 6)]), np.array([2]))
    staging = data.view(torch.uint8)
    tracemalloc.start()
    checksum(staging, what, KEYS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
