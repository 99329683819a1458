from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.kernels.pack import (  # noqa: E402
    copy_blocks,
    find_outside,
    in_place_bytes,
    join_runs,
    pack,
    packing,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float16]
SIZE = 4000


def random_bits(dtype: Any, size: int, seed: int) -> Any:
    """Every bit pattern, NaN with payloads among them."""
    width = torch.empty(0, dtype=dtype).element_size()
    bits = np.random.default_rng(seed).integers(0, 256, size * width, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype)


def elements(row: Any) -> list[int]:
    _, offset, rows, cols, stride = row[:5]
    return [offset + r * stride + c for r in range(rows) for c in range(cols)]


@st.composite
def disjoint_tables(draw: Any) -> np.ndarray[Any, Any]:
    """Blocks that do not overlap inside a storage; some touch each other, so that joining has something to do."""
    table = []
    for number in range(draw(st.integers(1, len(DTYPES)))):
        offset = 0
        for _ in range(draw(st.integers(0, 25))):
            rows, cols = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(0, 6))
            stride = cols + draw(st.integers(0, 2)) if rows > 1 else 0
            offset += draw(st.sampled_from([0, 0, 1]))
            table.append((number, offset, rows, cols, stride, 0, 0))
            offset += rows * stride if rows > 1 else cols
    order = draw(st.permutations(range(len(table)))) if draw(st.booleans()) else range(len(table))
    return np.array([table[i] for i in order], dtype=np.int64).reshape(-1, 7)


@settings(max_examples=150, deadline=None)
@given(disjoint_tables())
def test_pack_and_unpack_match_element_by_element(table: np.ndarray[Any, Any]) -> None:
    sources = [random_bits(dtype, SIZE, seed) for seed, dtype in enumerate(DTYPES)]
    widths = np.array([s.element_size() for s in sources])
    what = packing(table, widths)
    staging = torch.empty(what.num_bytes, dtype=torch.uint8)
    pack(sources, what, staging)
    raw = [s.view(torch.uint8).numpy() for s in sources]
    expected = [
        raw[row[0]][e * widths[row[0]] : (e + 1) * widths[row[0]]]
        for width in (8, 4, 2, 1)
        for row in table.tolist()
        if widths[row[0]] == width
        for e in elements(row)
    ]
    assert staging.numpy().tobytes() == b"".join(part.tobytes() for part in expected)
    assert staging.numel() == sum(len(elements(row)) * widths[row[0]] for row in table.tolist())

    targets = [torch.zeros_like(s) for s in sources]
    unpack(targets, what, staging)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        touched = np.zeros(SIZE, dtype=bool)
        touched[[e for row in table.tolist() if row[0] == number for e in elements(row)]] = True
        bits = target.view(torch.uint8).numpy().reshape(SIZE, -1)
        assert (bits[touched] == source.view(torch.uint8).numpy().reshape(SIZE, -1)[touched]).all()
        assert not bits[~touched].any()


@settings(max_examples=100, deadline=None)
@given(disjoint_tables(), st.integers(0, 3))
def test_copies_between_different_strides(table: np.ndarray[Any, Any], gap: int) -> None:
    table = table[table[:, 0] == 0]
    src = table.copy()
    dst = table.copy()
    dst[:, 0] = 1
    position = 0
    for row in dst:  # the same blocks elsewhere, rows farther apart
        row[1], row[4] = position, row[3] + gap
        position += int(row[2] * row[4])
    source, target = random_bits(torch.float32, SIZE, 1), torch.zeros(max(position, 1))
    copy_blocks([source, target], src, dst)
    got = target.view(torch.int32)
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        for i, j in zip(elements(a), elements(b), strict=True):
            assert got[j] == source.view(torch.int32)[i]


def test_cast_rounds_to_nearest_even() -> None:
    master = torch.tensor([1.0, 1.00390625, 1.01171875, -3.3, 1e30])  # the second and third lie half-way
    weight = torch.zeros(5, dtype=torch.bfloat16)
    table = np.array([(0, i, 1, 1, 0, 0, 0) for i in range(5)])
    other = table.copy()
    other[:, 0] = 1
    copy_blocks([master, weight], table, other, cast=True)
    assert weight[:3].tolist() == [1.0, 1.0, 1.015625]
    with pytest.raises(ValueError, match="a copy of bits"):
        copy_blocks([master, weight], table, other)


def test_many_tiny_blocks_go_through_one_indexed_copy_and_scatter_back() -> None:
    source = random_bits(torch.bfloat16, 30_000, 3)
    table = np.array([(0, 3 * i, 1, 1 + i % 2, 0, 0, 0) for i in range(9_000)])
    what = packing(table, np.array([2]))
    staging = torch.empty(what.num_bytes, dtype=torch.uint8)
    pack([source], what, staging)
    target = torch.zeros_like(source)
    unpack([target], what, staging)
    expected = [e for row in table.tolist() for e in elements(row)]
    assert (target.view(torch.int16)[expected] == source.view(torch.int16)[expected]).all()
    assert int((target.view(torch.int16) != 0).sum()) <= len(expected)


def test_neighbours_become_one_run() -> None:
    rows = np.array([(0, 10 * i, 1, 10, 0, 0, 0) for i in range(50)] + [(0, 500, 4, 5, 5, 0, 0)])
    assert join_runs(rows)[:, 1:4].tolist() == [[0, 1, 520]]
    strided = np.array([(0, 100 * i, 10, 4, 10, 0, 0) for i in range(5)])
    assert join_runs(strided)[:, 1:5].tolist() == [[0, 50, 4, 10]]
    assert len(join_runs(np.array([(0, 0, 1, 4, 0, 0, 0), (1, 4, 1, 4, 0, 0, 0)]))) == 2


def test_a_contiguous_packing_is_the_storage_itself() -> None:
    source = torch.arange(100, dtype=torch.float32)[10:60]  # a view that does not start at its memory's beginning
    what = packing(np.array([(0, 5, 2, 10, 10, 0, 0), (0, 25, 1, 5, 0, 0, 0)]), np.array([4]))
    assert what.in_place
    assert in_place_bytes([source], what).view(torch.float32).tolist() == list(range(15, 40))
    strided = packing(np.array([(0, 5, 2, 10, 20, 0, 0)]), np.array([4]))
    assert not strided.in_place
    staging = torch.empty(80, dtype=torch.uint8)
    pack([source], strided, staging)
    assert staging.view(torch.float32).tolist() == [*range(15, 25), *range(35, 45)]


def test_blocks_outside_their_storage_are_found() -> None:
    lengths = np.array([100, 10])
    good = [(0, 0, 1, 100, 0, 0, 0), (1, 1, 3, 2, 3, 0, 0)]
    assert find_outside(np.array(good), lengths) is None
    for bad in ((1, 1, 4, 2, 3, 0, 0), (2, 0, 1, 1, 0, 0, 0), (0, -1, 1, 1, 0, 0, 0), (0, 0, 2, 5, 4, 0, 0)):
        assert find_outside(np.array([*good, bad]), lengths) == 2
