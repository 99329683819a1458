"""What a check says: the property, whether it holds, and the evidence or the first violation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``evidence``: what was counted where the property holds; what, where and how much where it does not."""

    name: str
    holds: bool
    evidence: str


class Violation(Exception):
    """A property that does not hold: ``str`` says what, where, with numbers."""


class DamagedDocument(ValueError):
    """The document lacks an entry, or an entry is of a wrong kind: it cannot be judged."""
