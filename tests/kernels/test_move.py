from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.kernels import move, native  # noqa: E402
from nereus.kernels.checksum import checksum, tensor_key  # noqa: E402
from nereus.kernels.move import gather, pieces, scatter, stored  # noqa: E402
from nereus.kernels.pack import copy_blocks, pack, packing  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
WIDTHS = np.array([4, 2, 1, 8])
KEYS = np.array([tensor_key("actor", f"{i}.weight", "weight") for i in range(4)], dtype=np.uint64)
MASK = (1 << 64) - 1


@pytest.fixture(params=["native", "plain"])
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "plain":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C compiler here")
    yield request.param


def random_bits(dtype: Any, size: int, seed: int) -> Any:
    width = torch.empty(0, dtype=dtype).element_size()
    bits = np.random.default_rng(seed).integers(0, 256, size * width, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype)


def tables(seed: int, gap: int) -> tuple[Any, Any, int]:
    """The same blocks, rows closer together in the first than in the second, and the longest storage of either."""
    rng = np.random.default_rng(seed)
    near, far, ends = [], [], np.zeros((2, 4), dtype=np.int64)
    for _ in range(40):
        number, rows, cols = int(rng.integers(4)), int(rng.integers(1, 9)), int(rng.integers(0, 90))
        start, stride = int(rng.integers(1 << 40)), cols + int(rng.integers(3))
        for side, (out, more) in enumerate(((near, 0), (far, gap))):
            out.append((number, int(ends[side, number]), rows, cols, cols + more, start, stride))
            ends[side, number] += rows * (cols + more)
    return np.array(near), np.array(far), int(ends.max()) + 1


@pytest.mark.parametrize(("piece", "small"), [(1 << 22, 1 << 18), (256, 64), (16, 8), (4096, 300)])
@pytest.mark.parametrize("gap", [0, 3])
def test_pieces_travel_alike_between_different_strides(
    library: str, piece: int, small: int, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move, "PIECE_BYTES", piece)
    monkeypatch.setattr(move, "SMALL_BYTES", small)
    near, far, size = tables(piece + gap, gap)
    sources = [random_bits(dtype, size, i) for i, dtype in enumerate(DTYPES)]
    targets = [torch.zeros_like(s) for s in sources]
    whole = packing(near, WIDTHS)
    staging = torch.empty(whole.num_bytes, dtype=torch.uint8)
    pack(sources, whole, staging)
    out, into = pieces(near, WIDTHS), pieces(far, WIDTHS)
    assert [p.num_bytes for p in out] == [p.num_bytes for p in into]
    assert sum(p.num_bytes for p in out) == whole.num_bytes
    total = 0
    for sent, received in zip(out, into, strict=True):
        buffer, scratch = (torch.empty(sent.num_bytes, dtype=torch.uint8) for _ in range(2))
        value = gather(sources, sent, KEYS, buffer)
        assert value == stored(sources, sent, KEYS, scratch) == checksum(buffer, sent, KEYS)
        scatter(targets, received, KEYS, buffer)
        assert stored(targets, received, KEYS, scratch) == value
        total += value
    assert total & MASK == checksum(staging, whole, KEYS)
    after = packing(far, WIDTHS)
    back = torch.empty_like(staging)
    pack(targets, after, back)
    assert torch.equal(back, staging)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(range(4)), st.integers(1, 4), st.integers(1, 9000), st.integers(0, 2), st.integers(0, 1 << 40))
def test_native_and_numpy_sums_are_equal(number: int, rows: int, cols: int, gap: int, start: int) -> None:
    if native.load() is None:
        pytest.skip("no C compiler here")
    storages = [random_bits(dtype, rows * (cols + gap) + 1, i) for i, dtype in enumerate(DTYPES)]
    what = packing(np.array([(number, 1, rows, cols, cols + gap if rows > 1 else 0, start, cols + 1)]), WIDTHS)
    if gap and rows > 1:
        what = packing(np.array([(number, 0, rows, cols, cols + gap, start, cols)]), WIDTHS)
    buffer = torch.empty(what.num_bytes, dtype=torch.uint8)
    pack(storages, what, buffer)
    assert stored(storages, what, KEYS, buffer) == checksum(buffer, what, KEYS)


def test_native_never_leaves_a_storage() -> None:
    """It says no, and torch says what is wrong."""
    what = packing(np.array([(0, 5, 1, 10, 0, 0, 0)]), WIDTHS)
    with pytest.raises(RuntimeError):
        gather([torch.zeros(12)], what, KEYS, torch.empty(40, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        gather([torch.zeros(20)], what, KEYS, torch.empty(36, dtype=torch.uint8))


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "nereus").mkdir()
    os.chmod(tmp_path / "nereus", 0o777)
    assert native.load.__wrapped__() is None
    os.chmod(tmp_path / "nereus", 0o700)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    assert native.load.__wrapped__() is None
    assert list((tmp_path / "nereus").iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)]),
    st.sampled_from([1, 40, 90]),
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(0, 9),
)
def test_copies_are_those_of_torch(dtypes: Any, num: int, rows: int, cols: int, gap: int) -> None:
    """By a kernel where it pays and has the conversion, else by torch; the bits are the same."""
    source = torch.randn(num * rows * (cols + gap) + 1).to(dtypes[0])
    near = [(0, i * rows * (cols + gap) + 1, rows, cols, cols + gap, 0, 0) for i in range(num)]
    far = [(1, (num - 1 - i) * rows * cols, rows, cols, cols, 0, 0) for i in range(num)]
    src, dst = (np.array(t, dtype=np.int64).reshape(-1, 7) for t in (near, far))
    got, expected = (torch.zeros(num * rows * cols, dtype=dtypes[1]) for _ in range(2))
    move.copy([source, got], src, dst, cast=True)
    copy_blocks([source, expected], src, dst, cast=True)
    assert torch.equal(got, expected)
    same = [torch.zeros_like(source) for _ in range(2)]
    dst[:, 1] = src[:, 1]
    move.copy([source, same[0]], src, dst)
    copy_blocks([source, same[1]], src, dst)
    assert torch.equal(same[0].view(torch.uint8), same[1].view(torch.uint8))


def test_copies_of_other_widths_are_refused_as_torch_does() -> None:
    table = np.array([(0, i * 50, 1, 40, 0, 0, 0) for i in range(50)])
    other = table.copy()
    other[:, 0] = 1
    with pytest.raises(ValueError, match="a copy of bits from"):
        move.copy([torch.zeros(2500), torch.zeros(2500, dtype=torch.bfloat16)], table, other)
    with pytest.raises((RuntimeError, IndexError)):
        move.copy([torch.zeros(2500), torch.zeros(100)], table, other)
