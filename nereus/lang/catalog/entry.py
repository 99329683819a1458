"""One documented code: what ``nereusc explain`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeEntry:
    """``example`` maps file names to texts that make ``nereusc COMMAND`` report the code."""

    code: str
    title: str
    cause: str
    example: Mapping[str, str]
    command: str  # check | diff
    fix: str
