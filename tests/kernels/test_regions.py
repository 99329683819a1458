"""Every kernel that a CPU can run gives the reference's answer, and the reference that of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel_support import KINDS, NUMBERS, TRICKY, answer, kernel, tables, weight  # noqa: E402

from nereus.kernels import reference  # noqa: E402
from nereus.kernels import regions as r  # noqa: E402
from nereus.kernels.checksum import tensor_key  # noqa: E402
from nereus.kernels.reference import Reference  # noqa: E402

MASK = (1 << 64) - 1
CPU_KERNELS = ["native", "source", "triton"]


def by_hand(what: r.Plan, source: Any, size: int) -> tuple[Any, list[int]]:
    """The definition, one element at a time; conversions are torch's, of one number."""
    raw = source.numpy().tobytes()
    target, sums = bytearray([0xA5] * size), [7, 7, 7]
    for region in what.table.tolist():
        kind_in, kind_out, slot = region[r.FROM], region[r.TO], region[r.SLOT]
        width_in, width_out = int(r.WIDTHS[kind_in]), int(r.WIDTHS[kind_out])
        for row in range(region[r.NUM_ROWS]):
            for col in range(region[r.NUM_COLS]):
                at = (region[r.SRC_OFFSET] + row * region[r.SRC_STRIDE] + col) * width_in
                element = raw[at : at + width_in]
                if kind_in != kind_out:
                    number = torch.frombuffer(bytearray(element), dtype=r.TYPES[kind_in]).to(r.TYPES[kind_out])
                    element = number.view(torch.uint8).numpy().tobytes()
                    if number.isnan():
                        element = {r.F16: b"\x00\x7e", r.BF16: b"\xc0\x7f", r.F32: b"\x00\x00\xc0\x7f"}[kind_out]
                if region[r.DST] >= 0:
                    at = (region[r.DST_OFFSET] + row * region[r.DST_STRIDE] + col) * width_out
                    target[at : at + width_out] = element
                if slot >= 0:
                    index = region[r.GLOBAL_START] + row * region[r.GLOBAL_STRIDE] + col
                    sums[slot] += element_sum(element, region[r.KEY], index)
    return torch.frombuffer(target, dtype=torch.uint8), [s & MASK for s in sums]


def element_sum(element: bytes, key: int, index: int) -> int:
    words = [element] if len(element) < 8 else [element[:4], element[4:]]
    total = 0
    for part, word in enumerate(words):
        total += weight(key, index * len(words) + part) * int.from_bytes(word, "little")
    return total


@settings(max_examples=60, deadline=None)
@given(tables(num=4, rows=3, cols=20))
def test_the_reference_is_the_definition(made: tuple[r.Plan, Any, int]) -> None:
    what, source, size = made
    target, sums = answer(Reference(), what, [source], size)
    expected, totals = by_hand(what, source, size)
    assert torch.equal(target, expected)
    assert [s & MASK for s in sums] == totals


@pytest.mark.parametrize("name", ["native", "source"])
def test_kernels_equal_the_reference(name: str) -> None:
    one = kernel(name)

    @settings(max_examples=80, deadline=None)
    @given(tables(num=8, cols=700))
    def check(made: tuple[r.Plan, Any, int]) -> None:
        equal(one, *made)

    check()


def test_triton_equals_the_reference() -> None:
    one = kernel("triton")  # interpreted: some milliseconds for each tile

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(tables(num=4, rows=3))
    def check(made: tuple[r.Plan, Any, int]) -> None:
        equal(one, *made)

    check()


def equal(one: Any, what: r.Plan, source: Any, size: int) -> None:
    target, sums = answer(one, what, [source], size)
    expected, totals = answer(Reference(), what, [source], size)
    assert torch.equal(target, expected)
    assert sums == totals


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("kinds", [k for k in KINDS if k[0] != k[1]])
def test_conversions_of_every_half_and_of_the_edges_of_float(name: str, kinds: tuple[int, int]) -> None:
    one, (kind_in, kind_out) = kernel(name), kinds
    if kind_in == r.F32:
        low = [0, 0x7FFF, 0x8000, 0x8001] if name != "triton" else [0x8000]
        high = np.arange(1 << 16, dtype=np.uint32)[:: 1 if name != "triton" else 16] << 16
        numbers = np.concatenate([high | np.uint32(x) for x in low] + [np.array(TRICKY, dtype=np.uint32)])
    else:
        numbers = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)[:: 1 if name != "triton" else 7]
    source = torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint8))
    table = np.array([(0, 0, 0, 1, 0, 0, 1, len(numbers), kind_in, kind_out, 0, 11, 0, 0)], dtype=np.int64)
    size = len(numbers) * int(r.WIDTHS[kind_out])
    equal(one, r.plan(table), source, size)
    if {kind_in, kind_out} == {r.F16, r.F32}:  # numpy rounds by itself
        target, _ = answer(one, r.plan(table), [source], size)
        with np.errstate(over="ignore"):
            expected = numbers.view({2: np.float16, 4: np.float32}[numbers.itemsize]).astype(
                np.float16 if kind_out == r.F16 else np.float32
            )
        got = target.numpy().view(expected.dtype)
        assert np.array_equal(got, expected, equal_nan=True)
        assert np.array_equal(np.signbit(got), np.signbit(expected) & ~np.isnan(expected))


@pytest.mark.parametrize("name", [*CPU_KERNELS, "reference"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 24), st.booleans())
def test_qkv_is_fused_by_group_with_a_cast_and_one_checksum(
    name: str, groups: int, heads: int, dim: int, cols: int, cast: bool
) -> None:
    one = Reference() if name == "reference" else kernel(name)
    dtype = torch.bfloat16
    q, k, v = (torch.randn(groups, n * dim, cols) for n in (heads, 1, 1))
    if not cast:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    fused = torch.cat((q, k, v), dim=1).to(dtype)  # [groups, (heads + 2) * dim, cols]
    key = tensor_key("actor", "qkv", "weight") - (1 << 63)
    given_ = [(0, 0, heads * dim), (1, 0, dim), (2, 0, dim)]
    kwargs: dict[str, Any] = {"groups": groups, "cols": cols, "dst": 3, "dtype": dtype, "key": key, "slot": 0}
    table = r.interleave(given_, dst_offset=4, cast_from=torch.float32 if cast else None, global_start=90, **kwargs)
    target, sums = torch.zeros(fused.numel() + 8, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    one.launch(r.plan(table), [q, k, v, target], sums)
    assert torch.equal(target[4:-4].view(torch.int16), fused.flatten().view(torch.int16))
    assert not target[:4].any() and not target[-4:].any()
    # One sum, whatever it was put together from: the fused tensor's own.
    whole = np.array([(0, 0, 0, -1, 0, 0, 1, fused.numel(), r.BITS16, r.BITS16, 0, key, 90, 0)], dtype=np.int64)
    own = torch.zeros(1, dtype=torch.int64)
    Reference().launch(r.plan(whole), [fused.flatten()], own)
    assert own == sums


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_swapped_rows_shifts_and_flips_change_the_sum(name: str, dtype: Any) -> None:
    one, kind = kernel(name), r.type_of(dtype)
    data = torch.from_numpy(np.random.default_rng(4).integers(1, 256, (12, 40 * dtype.itemsize), dtype=np.uint8))
    table = np.array([(0, 0, 40, -1, 0, 0, 12, 40, kind, kind, 0, 99, 1000, 64)], dtype=np.int64)

    def total(changed: Any, start: int = 1000, stride: int = 64) -> int:
        table[0, r.GLOBAL_START], table[0, r.GLOBAL_STRIDE] = start, stride
        sums = torch.zeros(1, dtype=torch.int64)
        one.launch(r.plan(table), [changed.contiguous()], sums)
        return int(sums)

    swapped, flipped = data.clone(), data.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    flipped[5, 7] ^= 0x40
    sums = {total(data), total(swapped), total(flipped), total(data.roll(dtype.itemsize, 1)), total(data, 1001)}
    assert len(sums | {total(data, 1000, 65)}) == 6
    assert total(data) == int(reference.checksum(data.view(dtype), 99, 1000, 64))


GOOD = (0, 0, 8, 1, 0, 8, 4, 8, r.BITS16, r.BITS16, 0, 5, 0, 8)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (r.SRC_OFFSET, -1, "negative offset"),
        (r.NUM_ROWS, -2, "negative offset"),
        (r.DST, -2, "negative offset"),
        (r.FROM, 7, "type that there is not"),
        (r.TO, r.F32, "conversion that there is not"),
        (r.SLOT, -2, "checksum slot"),
        (r.DST_STRIDE, 7, "overlap"),
        (r.SRC_STRIDE, 1 << 60, "beyond all memory"),
    ],
)
def test_a_wrong_region_is_named(column: int, value: int, text: str) -> None:
    bad = list(GOOD)
    bad[column] = value
    with pytest.raises(r.TableError, match=f"region 1 has .*{text}"):
        r.plan(np.array([GOOD, bad], dtype=np.int64))


def test_regions_that_do_nothing_and_tables_that_are_none() -> None:
    idle = [*GOOD[: r.DST], -1, *GOOD[r.DST + 1 : r.SLOT], -1, *GOOD[r.SLOT + 1 :]]
    with pytest.raises(r.TableError, match="neither a target nor a checksum"):
        r.plan(np.array([idle], dtype=np.int64))
    with pytest.raises(r.TableError, match="a table is int64"):
        r.plan(np.zeros((3, 5), dtype=np.int64))
    with pytest.raises(r.TableError, match="tile_bytes"):
        r.plan(np.array([GOOD], dtype=np.int64), tile_bytes=100)
    with pytest.raises(r.TableError, match=r"torch\.int8"):
        r.interleave([(0, 0, 1)], groups=1, cols=1, dst=1, dtype=torch.int8, cast_from=torch.float32)


def test_tiles_cover_every_element_once() -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from(NUMBERS), st.sampled_from([256, 4096, 32768]))
    def check(rows: int, cols: int, kind: int, tile_bytes: int) -> None:
        region = (0, 0, cols + 1, 1, 0, cols, rows, cols, kind, kind, -1, 0, 0, 0)
        at = r.place(r.plan(np.array([region], dtype=np.int64), tile_bytes=tile_bytes), torch.device("cpu"))
        tile_rows, tile_cols = at.table[0, r.TILE_ROWS : r.TILE_COLS + 1].tolist()
        num_rows, num_cols = at.table[0, r.NUM_ROWS : r.NUM_COLS + 1].tolist()
        assert num_rows * num_cols == rows * cols and tile_rows * tile_cols * int(r.WIDTHS[kind]) <= tile_bytes
        assert at.number_of.tolist() == list(range(-(-num_rows // tile_rows) * -(-num_cols // tile_cols)))
        assert num_cols <= tile_cols or tile_rows == 1

    check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables())
def test_what_regions_reach_is_the_same_one_by_one_and_all_at_once(
    monkeypatch: pytest.MonkeyPatch, made: tuple[r.Plan, Any, int]
) -> None:
    table = made[0].table[:, : r.NUM_GIVEN]
    found = []
    for few in (0, 1000):
        monkeypatch.setattr(r, "_FEW", few)
        what = r.plan(table)
        found.append((what.needed_bytes, what.alignments))
    assert found[0] == found[1]
    assert len(found[0][0]) == (int(table[:, [r.SRC, r.DST]].max()) + 1 if len(table) else 0)
