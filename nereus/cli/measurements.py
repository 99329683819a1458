"""What ``fit`` and ``predict`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nereus.ir.diagnostic import Diagnostic, Severity

if TYPE_CHECKING:
    from nereus.planner.accuracy import Accuracy
    from nereus.planner.rows import Row


def bad_rows(rows: Sequence[Row], path: str) -> list[Diagnostic]:
    """NRS7003, a warning for each row that is of no use."""
    return [
        Diagnostic(
            code="NRS7003",
            severity=Severity.WARNING,
            headline=f"{path}, line {row.line}: {row.id} cannot be used: {row.problem}",
        )
        for row in rows
        if row.run is None
    ]


def show(of: Accuracy) -> dict[str, Any]:
    return asdict(of)


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def within_90(value: float, deviation: float) -> tuple[float, float]:
    """``deviation``: of the logarithm."""
    from math import exp

    from nereus.planner.learned import DEVIATIONS_90

    factor = exp(DEVIATIONS_90 * deviation)
    return value / factor, value * factor
