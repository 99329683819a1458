"""What an importer hands back, and the one way in which importers collect diagnostics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from nereus.ir.diagnostic import Diagnostic, Label, Severity, Source, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    #: None where the input does not describe a plan; the diagnostics then say why.
    plan_text: str | None
    diagnostics: tuple[Diagnostic, ...]


@dataclass(slots=True)
class Reports:
    """Diagnostics about one input text, each said once."""

    source: Source
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def span(self, start: int, end: int) -> Span:
        size = len(self.source.text)
        start = max(0, min(start, size))
        return Span(source=self.source, start=start, end=max(start, min(end, size)))

    def line(self, offset: int) -> int:
        return self.source.line_column(offset)[0]

    def add(
        self,
        code: str,
        severity: Severity,
        headline: str,
        at: tuple[int, int] | None = None,
        *,
        label: str = "",
        secondary: Iterable[tuple[tuple[int, int], str]] = (),
        notes: Iterable[str] = (),
        help: str | None = None,
    ) -> None:
        diagnostic = Diagnostic(
            code=code,
            severity=severity,
            headline=headline,
            primary=None if at is None else Label(span=self.span(*at), message=label),
            secondary=tuple(Label(span=self.span(*where), message=message) for where, message in secondary),
            notes=tuple(notes),
            help=help,
        )
        if diagnostic not in self.diagnostics:
            self.diagnostics.append(diagnostic)


def closest(name: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name.lower()[:200], list(known), n=count, cutoff=0.5))
