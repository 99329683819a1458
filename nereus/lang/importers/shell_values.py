"""Values in a launch script, and what bash does to their text."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A piece of a value that the script alone does not decide; ``why`` completes "NAME ..."."""

    name: str
    why: str
    start: int
    end: int
    unset: bool = False  # never assigned here: bash would take it from the environment, or as empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One argument of a command after expansion, with the place where its text is written."""

    text: str
    missing: tuple[Missing, ...] = ()
    start: int
    end: int


def merge(first: tuple[Missing, ...], second: tuple[Missing, ...]) -> tuple[Missing, ...]:
    return first if not second else tuple(dict.fromkeys(first + second))[:5]


def as_empty(value: Field) -> str:
    """The text with names that are never set taken as empty, which is what bash compares."""
    text = value.text
    for gap in value.missing:
        text = text.replace(f"${gap.name}", "")
    return text


def compare(left: str, op: str, right: str, *, pattern: bool) -> bool | None:
    if op in ("=", "=="):
        return fnmatch.fnmatchcase(left, right) if pattern else left == right
    if op == "!=":
        return not (fnmatch.fnmatchcase(left, right) if pattern else left == right)
    try:
        a, b = int(left or "0"), int(right or "0")
    except ValueError:
        return None
    return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}.get(op)


def modify(op: str, text: str, arg: str) -> str | None:
    match op:
        case ",,":
            return text.lower()
        case "^^":
            return text.upper()
        case "#" | "##":
            ends = range(len(text) + 1) if op == "#" else range(len(text), -1, -1)
            cut = next((i for i in ends if fnmatch.fnmatchcase(text[:i], arg)), 0) if len(text) <= 2000 else 0
            return text[cut:]
        case "%" | "%%":
            starts = range(len(text), -1, -1) if op == "%" else range(len(text) + 1)
            found = (i for i in starts if fnmatch.fnmatchcase(text[i:], arg))
            return text[: next(found, len(text))] if len(text) <= 2000 else text
        case "/" | "//":
            old, _, new = arg.partition("/")
            if not old or any(c in old for c in "*?["):
                return None
            return text.replace(old, new, 1 if op == "/" else -1)
        case _:
            return None
