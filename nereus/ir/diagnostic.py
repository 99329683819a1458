"""What the compiler says to people: one type for every message, from a typo to a plan that does not fit.

Text and JSON are both derived from ``Diagnostic``; rendering lives in ``nereus.lang.render``.
Codes: NRS1xxx syntax, 2xxx names and values, 3xxx layout, 4xxx memory and pool, 5xxx transition and schedule, 6xxx
runtime, 7xxx cost model and search, 9xxx internal. A code is never reused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.Enum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One input text; ``path`` is what the user typed (or ``<stdin>``)."""

    path: str
    text: str

    def line_column(self, offset: int) -> tuple[int, int]:
        """1-based line and column (in characters) of ``offset``."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Half-open character range ``[start, end)`` of a source."""

    source: Source
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    span: Span
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Replace ``span`` by ``text``; what an editor may apply."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    code: str
    severity: Severity
    headline: str
    primary: Label | None = None
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str | None = None
    fix: Fix | None = None
    #: Exact numbers behind the sentence, for JSON (need_bytes, have_bytes, device, ...).
    data: tuple[tuple[str, int | float | str], ...] = ()


class DiagnosticError(Exception):
    """Raised by library code on bad input; carries everything that was found, errors first."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("; ".join(f"{d.code}: {d.headline}" for d in self.diagnostics))


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in diagnostics)
