"""What a move would lose: by element against painted matrices, and in moves whose namings have holes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.fragment import Fragment, Segment
from nereus.ir.tensor import LogicalTensor
from nereus.models.naming.explicit import ExplicitNaming
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.leftover import boxes, outside
from nereus.runtime.live import MoveError, move_here

ROWS, COLS = 5, 4


@st.composite
def _fragments(draw: st.DrawFn) -> list[Fragment]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        row_lo, col_lo = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, COLS - 1))
        row_hi, col_hi = draw(st.integers(row_lo + 1, ROWS)), draw(st.integers(col_lo + 1, COLS))
        area = (row_hi - row_lo) * (col_hi - col_lo)
        start = draw(st.integers(0, area - 1))
        stop = draw(st.integers(start + 1, area))
        place: dict[str, Any] = {"tensor": "a", "slot": "weight", "storage": 0, "origin": 0, "stride": COLS}
        found.append(
            Fragment(row_lo=row_lo, row_hi=row_hi, col_lo=col_lo, col_hi=col_hi, start=start, stop=stop, **place)
        )
    return found


def _painted(fragments: list[Fragment]) -> np.ndarray:
    matrix = np.zeros((ROWS, COLS), dtype=bool)
    for f in fragments:
        for position in range(f.start, f.stop):
            row, col = divmod(position, f.num_cols)
            matrix[f.row_lo + row, f.col_lo + col] = True
    return matrix


@given(inner=_fragments(), outer=_fragments())
@settings(max_examples=300, deadline=None)
def test_counts_are_those_of_painted_elements(inner: list[Fragment], outer: list[Fragment]) -> None:
    rest = _painted(inner) & ~_painted(outer)
    count, where = outside(boxes(inner), boxes(outer))
    assert count == rest.sum()
    if count:
        r, c = np.flatnonzero(rest.any(axis=1)), np.flatnonzero(rest.any(axis=0))
        assert where == f"rows {r[0]}..{r[-1] + 1}, columns {c[0]}..{c[-1] + 1}"


def _linear(rows: int = 4) -> torch.nn.Linear:
    return torch.nn.Linear(8, rows, bias=False)


def _part(row_hi: int, col_hi: int = 8) -> dict[str, tuple[Segment, ...]]:
    return {"weight": (Segment(tensor="weight", row_lo=0, row_hi=row_hi, col_lo=0, col_hi=col_hi, at_row=0),)}


WHOLE = ExplicitNaming.identity({"weight": (4, 8)})


@pytest.mark.parametrize(
    ("row_hi", "col_hi", "words"),
    [(3, 8, r"8 elements: rows 3\.\.4, columns 0\.\.8"), (4, 7, r"4 elements: rows 0\.\.4, columns 7\.\.8")],
)
def test_a_hole_in_a_naming_is_refused_and_nothing_is_written(row_hi: int, col_hi: int, words: str) -> None:
    old, new = _linear(), _linear()
    before, tensors = new.weight.clone(), (LogicalTensor(name="weight", shape=(4, 8)),)
    sides = [PlainTorch(old, naming=WHOLE).bind()], [PlainTorch(new, naming=_part(row_hi, col_hi)).bind()]
    with pytest.raises(MoveError, match=rf"wanted by none of the new: parts of weight of weight \({words}\)"):
        move_here(*sides, tensors)
    assert torch.equal(new.weight, before)
    assert move_here(*sides, tensors, drop=("weight",)).dropped == (("weight", 1),)
    assert torch.equal(new.weight[:row_hi, :col_hi], old.weight[:row_hi, :col_hi])


def test_a_hole_on_both_sides_and_a_longer_tensor_of_the_model_are_refused() -> None:
    old, new = _linear(), _linear()
    for naming, rows in ((_part(3), 4), (WHOLE, 5)):
        sides = [PlainTorch(old, naming=naming).bind()], [PlainTorch(new, naming=naming).bind()]
        with pytest.raises(MoveError, match=rf"in no description .* \(8 of {rows * 8} elements: rows {rows - 1}"):
            move_here(*sides, (LogicalTensor(name="weight", shape=(rows, 8)),))


def test_processes_that_take_a_part_each_want_all_of_it() -> None:
    old, new = _linear(), [_linear(3), _linear(1)]
    last = {"weight": (Segment(tensor="weight", row_lo=3, row_hi=4, col_lo=0, col_hi=8, at_row=0),)}
    wanted = [PlainTorch(new[0], naming=_part(3)).bind(), PlainTorch(new[1], naming=last, rank=1).bind()]
    tensors = (LogicalTensor(name="weight", shape=(4, 8)),)
    held = PlainTorch(old, naming=WHOLE).bind()
    with pytest.raises(MoveError, match=r"rows 3\.\.4"):
        move_here([held, None], [wanted[0], None], tensors)
    move_here([held, None], wanted, tensors)
    assert torch.equal(torch.cat([m.weight for m in new]), old.weight)


@pytest.mark.parametrize(("num_old", "num_new"), [(1, 0), (0, 0), (1, 2)])
def test_participants_without_an_entry_are_refused(num_old: int, num_new: int) -> None:
    bound = PlainTorch(_linear(), naming=WHOLE).bind()
    with pytest.raises(MoveError, match=f"{num_old} old and {num_new} new: every participant"):
        move_here([bound] * num_old, [bound] * num_new, ())
