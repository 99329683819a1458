"""A naming that is written down: for modules of no known family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod

from nereus.ir.fragment import Segment
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.hf import unwrapped


class ExplicitNaming:
    """Parameter name -> its segments, the same on every rank. What is not named is refused."""

    def __init__(self, parameters: Mapping[str, Sequence[Segment]]) -> None:
        self._parameters = {unwrapped(name): tuple(segments) for name, segments in parameters.items()}

    @classmethod
    def identity(cls, shapes: Mapping[str, Sequence[int]]) -> ExplicitNaming:
        """Every parameter is a logical tensor of its own name, a matrix of all its dims but the last by the last."""
        found: dict[str, tuple[Segment, ...]] = {}
        for name, shape in shapes.items():
            rows, cols = _matrix(shape)
            logical = unwrapped(name)
            found[name] = (Segment(tensor=logical, row_lo=0, row_hi=rows, col_lo=0, col_hi=cols, at_row=0),)
        return cls(found)

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        """Raises UnknownParameter for a name that is not declared, or a part that lies outside of ``shape``."""
        name, size = unwrapped(parameter), _matrix(shape)
        segments = self._parameters.get(name)
        if segments is None:
            raise UnknownParameter(self._advice(name, shape))
        for s in segments:
            if wrong := _misfit(s, size):
                raise UnknownParameter(
                    f"parameter '{name}' is {list(shape)}, {_words(shape)}: {_line(s)} {wrong}; "
                    f"write {_line(_clipped(s, size))} for what lies there"
                )
        return segments

    def _advice(self, name: str, shape: Sequence[int]) -> str:
        """What to write for a parameter that is not declared."""
        text = f"parameter '{name}' {list(shape)} is not in the naming"
        if close := get_close_matches(name, self._parameters, n=1):
            text += f", which has '{close[0]}'"
        rows, cols = _matrix(shape)
        whole = Segment(tensor=name, row_lo=0, row_hi=rows, col_lo=0, col_hi=cols, at_row=0)
        return (
            f"{text}; if it is a whole tensor, write {name!r}: ({_line(whole)},), or {name!r}: {tuple(shape)} in "
            "ExplicitNaming.identity; if it is a part, tensor, rows and columns are those of the whole"
        )


def _misfit(s: Segment, size: tuple[int, int]) -> str:
    """Why a segment cannot lie in a parameter of ``size``; empty where it can."""
    rows, cols = size
    if not (0 <= s.row_lo < s.row_hi and 0 <= s.col_lo < s.col_hi):
        return "is empty or upside down"
    if s.at_row < 0 or s.at_col < 0 or s.at_row >= rows or s.at_col >= cols:
        return f"begins outside, at row {s.at_row}, column {s.at_col}"
    if s.at_row + s.num_rows > rows:
        return f"does not fit: {s.num_rows} rows from row {s.at_row} on"
    if s.at_col + s.num_cols > cols:
        return f"does not fit: {s.num_cols} columns from column {s.at_col} on"
    return ""


def _clipped(s: Segment, size: tuple[int, int]) -> Segment:
    """The nearest segment that fits."""
    rows, cols = size
    at_row = s.at_row if 0 <= s.at_row < rows else 0
    at_col = s.at_col if 0 <= s.at_col < cols else 0
    row_lo, col_lo = max(s.row_lo, 0), max(s.col_lo, 0)
    num_rows = s.row_hi - row_lo if 0 < s.row_hi - row_lo <= rows - at_row else rows - at_row
    num_cols = s.col_hi - col_lo if 0 < s.col_hi - col_lo <= cols - at_col else cols - at_col
    return replace(
        s,
        row_lo=row_lo,
        row_hi=row_lo + num_rows,
        col_lo=col_lo,
        col_hi=col_lo + num_cols,
        at_row=at_row,
        at_col=at_col,
    )


def _line(s: Segment) -> str:
    """As it is written in a naming."""
    at_col = f", at_col={s.at_col}" if s.at_col else ""
    rows, cols = f"row_lo={s.row_lo}, row_hi={s.row_hi}", f"col_lo={s.col_lo}, col_hi={s.col_hi}"
    return f"Segment(tensor={s.tensor!r}, {rows}, {cols}, at_row={s.at_row}{at_col})"


def _words(shape: Sequence[int]) -> str:
    rows, cols = _matrix(shape)
    return f"{rows} rows of {cols} column{'' if cols == 1 else 's'}"


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)
