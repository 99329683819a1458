"""Intervals and segments of DTensor shards against torch.chunk itself."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.fragment import Segment, fragments_of
from nereus.runtime.adapters.base import Binding, BindingBuilder
from nereus.runtime.adapters.dtensor_box import AxisCut, held_intervals, local_segments
from nereus.runtime.adapters.whole import gather, scatter


def _chunk(values: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    parts = torch.chunk(values, size) if len(values) else ()
    return parts[rank] if rank < len(parts) else values[:0]


def _elements(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for lo, hi in intervals for i in range(lo, hi)]


def test_six_rows_on_four_ranks() -> None:
    held = [held_intervals(6, [AxisCut(size=4, rank=rank)]) for rank in range(4)]
    assert held == [((0, 2),), ((2, 4),), ((4, 6),), ()]


@given(extent=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(1, 5))
def test_fsdp_over_tensor_parallelism(extent: int, outer: int, inner: int) -> None:
    """The strided shard comes second, although its axis comes first; without a factor the axes cut in mesh order."""
    rows = torch.arange(extent)
    for first, second in product(range(outer), range(inner)):
        if inner > 1:
            strided = [AxisCut(size=outer, rank=first, factor=inner), AxisCut(size=inner, rank=second)]
            expected = _chunk(_chunk(rows, inner, second), outer, first)
            assert _elements(held_intervals(extent, strided)) == expected.tolist()
        plain = [AxisCut(size=outer, rank=first), AxisCut(size=inner, rank=second)]
        assert _elements(held_intervals(extent, plain)) == _chunk(_chunk(rows, outer, first), inner, second).tolist()


def test_packed_halves_and_fsdp_over_them() -> None:
    assert held_intervals(12, [AxisCut(size=2, rank=1, factor=2)]) == ((3, 6), (9, 12))
    over = [AxisCut(size=2, rank=1, factor=2), AxisCut(size=2, rank=1, factor=2)]
    assert held_intervals(12, over) == ((9, 12),)


def test_a_factor_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="split factor 4"):
        held_intervals(12, [AxisCut(size=2, rank=0, factor=4), AxisCut(size=3, rank=0)])


@given(data=st.data())
@settings(max_examples=150)
def test_segments_name_the_elements_that_the_local_tensor_holds(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = [
        [AxisCut(size=size, rank=data.draw(st.integers(0, size - 1)))]
        for size in (data.draw(st.integers(1, 3)) for _ in shape)
    ]
    held = [held_intervals(extent, cut) for extent, cut in zip(shape, cuts, strict=True)]
    whole = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    local = whole
    for dim, intervals in enumerate(held):
        local = local.index_select(dim, torch.tensor(_elements(intervals), dtype=torch.long))
    matrix = whole.reshape(-1, shape[-1]) if len(shape) > 1 else whole.reshape(-1, 1)
    rows = int(torch.tensor(local.shape[:-1]).prod()) if len(shape) > 1 else len(local)
    local = local.reshape(rows, local.shape[-1] if len(shape) > 1 else 1)
    split = data.draw(st.integers(0, matrix.shape[0]))
    segments = [
        Segment(tensor=name, row_lo=5, row_hi=5 + hi - lo, col_lo=0, col_hi=matrix.shape[1], at_row=lo)
        for name, lo, hi in (("a", 0, split), ("b", split, matrix.shape[0]))
        if lo < hi
    ]
    seen = torch.zeros(local.shape, dtype=torch.int32)
    for s in local_segments(segments, shape, held):
        start = (0 if s.tensor == "a" else split) - 5
        expected = matrix[start + s.row_lo : start + s.row_hi, s.col_lo : s.col_hi]
        place = (slice(s.at_row, s.at_row + s.row_hi - s.row_lo), slice(s.at_col, s.at_col + s.col_hi - s.col_lo))
        assert torch.equal(local[place], expected)
        seen[place] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("to", [1, 2, 4, 3])
def test_fused_rows_keep_their_order_over_fewer_ranks(to: int) -> None:
    """An fc1 of 4096 gate and 4096 up rows from 8 FSDP ranks: no rule of tensor parallelism applies to these cuts."""
    whole = torch.arange(8192.0).reshape(8192, 1)
    segments = (
        Segment(tensor="gate", row_lo=0, row_hi=4096, col_lo=0, col_hi=1, at_row=0),
        Segment(tensor="up", row_lo=0, row_hi=4096, col_lo=0, col_hi=1, at_row=4096),
    )

    def bindings(size: int, values: torch.Tensor) -> list[Binding]:
        found = []
        for rank in range(size):
            held = (held_intervals(8192, [AxisCut(size=size, rank=rank)]), ((0, 1),))
            builder = BindingBuilder(rank)
            storage = builder.storage("fc1", _chunk(values, size, rank).clone())
            parts = local_segments(segments, (8192, 1), held)
            builder.fragments.extend(fragments_of(parts, num_cols=1, slot="weight", storage=storage))
            found.append(builder.finish())
        return found

    moved = gather(bindings(8, whole), {"gate": (4096, 1), "up": (4096, 1)})
    assert torch.equal(moved["up", "weight"], whole[4096:])
    target = bindings(to, torch.zeros(8192, 1))
    for binding in target:
        scatter(moved, binding)
    assert torch.equal(torch.cat([binding.memory[0] for binding in target]), whole.reshape(-1))
    if to == 2:
        assert [{f.tensor for f in b.state.fragments} for b in target] == [{"gate"}, {"up"}]
