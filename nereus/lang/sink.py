"""Collects diagnostics while the front end keeps going."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from nereus.ir.diagnostic import Diagnostic, Fix, Label, Severity, Span


class Sink:
    """``error``, ``warning`` and ``note`` record a message; the first span is where the caret goes."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Diagnostic] = {}

    def error(self, code: str, headline: str, span: Span | None, label: str = "", **more: object) -> None:
        self._add(Severity.ERROR, code, headline, span, label, more)

    def warning(self, code: str, headline: str, span: Span | None, label: str = "", **more: object) -> None:
        self._add(Severity.WARNING, code, headline, span, label, more)

    def note(self, code: str, headline: str, span: Span | None, label: str = "", **more: object) -> None:
        self._add(Severity.NOTE, code, headline, span, label, more)

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self._store(diagnostic)

    @property
    def has_errors(self) -> bool:
        return any(d.severity is Severity.ERROR for d in self._found.values())

    @property
    def num_errors(self) -> int:
        return sum(d.severity is Severity.ERROR for d in self._found.values())

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Errors, then warnings, then notes; within each in the order of the text, file by file as they were read."""
        rank = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
        files: dict[str, int] = {}
        for d in self._found.values():
            if d.primary is not None:
                files.setdefault(d.primary.span.source.path, len(files))

        def place(d: Diagnostic) -> tuple[int, int, int]:
            if d.primary is None:
                return rank[d.severity], len(files), 0
            return rank[d.severity], files[d.primary.span.source.path], d.primary.span.start

        return tuple(sorted(self._found.values(), key=place))

    def _add(
        self, severity: Severity, code: str, headline: str, span: Span | None, label: str, more: dict[str, object]
    ) -> None:
        primary = None if span is None else Label(span=span, message=label)
        self._store(Diagnostic(code=code, severity=severity, headline=headline, primary=primary, **more))  # type: ignore[arg-type]

    def _store(self, d: Diagnostic) -> None:
        # One setting that twenty stages inherit is one mistake.
        where = None if d.primary is None else (d.primary.span.source.path, d.primary.span.start, d.primary.span.end)
        self._found.setdefault((d.code, d.headline, where), d)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The closest known word, if one is close enough to be a likely slip."""
    lower = {k.lower(): k for k in known}
    if word.lower() in lower:
        return lower[word.lower()]
    close = difflib.get_close_matches(word.lower()[:200], lower, n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def suggestion(word: str, known: Sequence[str], span: Span | None, *, quote: bool = False) -> dict[str, object]:
    """``help`` and ``fix`` for an unknown word; lists what is known where nothing is close."""
    close = did_you_mean(word, known)
    if close is not None:
        text = f'"{close}"' if quote else close
        return {"help": f"did you mean {text}?", "fix": None if span is None else Fix(span=span, text=text)}
    shown = known if len(known) <= 16 else [*known[:15], f"... ({len(known)} in all)"]
    return {"help": f"known are {', '.join(shown)}" if known else None}


def show(text: str, limit: int = 60) -> str:
    """User text inside a sentence: short, on one line, and harmless to a terminal."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listing(words: Sequence[object], last: str = "and") -> str:
    """``a, b and c``."""
    items = [str(w) for w in words]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else "none"
