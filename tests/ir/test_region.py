"""Boxes against boolean masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.region import Box, covers, disjoint, flat_range_to_boxes, subtract_all

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    boxes = []
    for _ in range(count):
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(e[0] for e in ends), tuple(e[1] for e in ends)))
    return shape, boxes


def mask(shape: tuple[int, ...], *boxes: Box) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))] += 1
    return found


@settings(max_examples=150, deadline=None)
@given(shape_and_boxes(2))
def test_intersect_and_subtract(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    common = a.intersect(b)
    both = (mask(shape, a) > 0) & (mask(shape, b) > 0)
    assert (mask(shape, *([common] if common else [])) == both).all()
    assert common is None or common.numel == both.sum() > 0
    pieces = a.subtract(b)
    assert (mask(shape, *pieces) == ((mask(shape, a) > 0) & ~(mask(shape, b) > 0))).all()  # exactly once
    assert len(pieces) <= 2 * len(shape)
    assert disjoint(pieces) and all(p.numel for p in pieces)


@settings(max_examples=150, deadline=None)
@given(shape_and_boxes(5))
def test_subtract_all_and_covers(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box, *others) = case
    rest = (mask(shape, box) > 0) & ~(mask(shape, *others) > 0)
    assert (mask(shape, *subtract_all(box, others)) == rest).all()
    assert covers(box, others) == (not rest.any())
    assert disjoint(others) == bool((mask(shape, *others) <= 1).all())


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.data())
def test_flat_range_to_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    boxes = flat_range_to_boxes(shape, start, stop)
    index = np.arange(size).reshape(shape)
    parts = [index[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))].reshape(-1) for box in boxes]
    # In flat order, every element once: box after box is the range itself.
    assert [int(i) for part in parts for i in part] == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_bad_boxes_and_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="not a box"):
        Box((1,), (0,))
    with pytest.raises(ValueError, match="not a box"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="outside"):
        flat_range_to_boxes((2, 3), 0, 7)
