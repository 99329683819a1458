"""Interval sets against Python sets of (cell, position)."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.intervals import EMPTY, Intervals, union

Elements = set[tuple[int, int]]


def elements(region: Intervals) -> list[tuple[int, int]]:
    return [(cell, at) for cell, start, stop in region.rows() for at in range(start, stop)]


def build(rows: list[tuple[int, int, int]]) -> Intervals:
    return Intervals(*(np.array([r[i] for r in rows], dtype=np.int64) for i in range(3)))


@st.composite
def regions(draw: st.DrawFn) -> Intervals:
    """Disjoint and ascending; neighbours may touch, as they do where classes differ."""
    rows = []
    for cell in sorted(draw(st.sets(st.integers(0, 4), max_size=3))):
        points = sorted(draw(st.sets(st.integers(0, 12), max_size=6)))
        kept = draw(st.lists(st.booleans(), min_size=len(points), max_size=len(points)))
        rows += [(cell, a, b) for a, b, keep in zip(points, points[1:], kept, strict=False) if keep]
    return build(rows)


def well_formed(region: Intervals) -> bool:
    rows = list(region.rows())
    ascending = all(a[0] < b[0] or (a[0] == b[0] and a[2] <= b[1]) for a, b in itertools.pairwise(rows))
    return ascending and all(start < stop for _, start, stop in rows)


@settings(max_examples=300, deadline=None)
@given(regions(), regions())
def test_intersect_and_subtract(a: Intervals, b: Intervals) -> None:
    for result, expected in (
        (a.intersect(b), set(elements(a)) & set(elements(b))),
        (a.subtract(b), set(elements(a)) - set(elements(b))),
    ):
        assert elements(result) == sorted(expected)
        assert well_formed(result)
        assert result.numel == len(expected)


@settings(max_examples=200, deadline=None)
@given(regions(), st.integers(1, 9))
def test_split_is_even_and_complete(region: Intervals, parts: int) -> None:
    pieces = region.split(parts)
    assert [e for piece in pieces for e in elements(piece)] == elements(region)
    assert all(len(piece) and well_formed(piece) for piece in pieces)
    if region.numel >= parts:
        sizes = [piece.numel for piece in pieces]
        assert len(sizes) == parts and max(sizes) - min(sizes) <= 1
    assert len(pieces) == min(parts, region.numel)


@settings(max_examples=200, deadline=None)
@given(regions(), st.data())
def test_cut_at(region: Intervals, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.lists(st.integers(0, region.numel), max_size=6)))
    whole = elements(region)
    bounds = [0, *positions, len(whole)]
    expected = [whole[a:b] for a, b in itertools.pairwise(bounds) if a < b]
    assert [elements(piece) for piece in region.cut_at(positions)] == expected


@settings(max_examples=200, deadline=None)
@given(regions(), regions(), regions())
def test_union_of_disjoint_sets(a: Intervals, b: Intervals, c: Intervals) -> None:
    parts = [a, b.subtract(a), c.subtract(union([a, b.subtract(a)]))]
    joined = union(parts)
    assert elements(joined) == sorted({*elements(a), *elements(b), *elements(c)})
    rows = list(joined.rows())
    assert all(x[0] < y[0] or x[2] < y[1] for x, y in itertools.pairwise(rows))  # touching ones are joined


def test_empty() -> None:
    assert EMPTY.split(3) == [] and not len(EMPTY.intersect(EMPTY)) and not len(union([EMPTY]))
