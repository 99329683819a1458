"""What ``fit``, ``predict`` and ``plan`` have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nereus.cli.files import display_name, read_text
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity

if TYPE_CHECKING:
    from nereus.planner.accuracy import Accuracy
    from nereus.planner.calibration import Calibration
    from nereus.planner.rows import Row


def read_calibration(path: str) -> Calibration:
    """Raises DiagnosticError (NRS7002)."""
    from nereus.planner.calibration import from_document, no_calibration

    try:
        document = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}: {error.msg}"
        raise DiagnosticError([no_calibration(display_name(path), why)]) from None
    except (ValueError, RecursionError):  # numbers too long, or brackets too deep, to be read
        raise DiagnosticError([no_calibration(display_name(path), "it is no JSON that could be read")]) from None
    return from_document(document, display_name(path))


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
