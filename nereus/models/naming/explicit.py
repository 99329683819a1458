"""A naming that is written down: for modules of no known family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        segments = self._parameters.get(unwrapped(parameter))
        if segments is None:
            raise UnknownParameter(f"parameter '{parameter}' is not declared")
        rows, cols = _matrix(shape)
        for s in segments:
            if s.at_row + s.row_hi - s.row_lo > rows or s.at_col + s.col_hi - s.col_lo > cols:
                part = f"{s.tensor} [{s.row_lo}:{s.row_hi}, {s.col_lo}:{s.col_hi}]"
                place = f"row {s.at_row}, column {s.at_col}"
                raise UnknownParameter(f"parameter '{parameter}' is {list(shape)}: {part} does not fit at {place}")
        return segments


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)
