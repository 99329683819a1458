"""Diagnostics -> text for people (source lines with carets), one line each, or JSON. All from the same object."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from nereus.ir.diagnostic import Diagnostic, Label, Severity, Source, Span

_STYLE = {Severity.ERROR: "1;31", Severity.WARNING: "1;33", Severity.NOTE: "1;36"}
_TAB = "    "
#: A line longer than this is shown around the caret only.
_MIN_WINDOW = 40


def render(diagnostics: Iterable[Diagnostic], *, color: bool, width: int = 100, mode: str = "full") -> str:
    """``mode``: ``full`` or ``concise`` (else ValueError). Escape codes only with ``color``; no trailing newline."""
    if mode not in ("full", "concise"):
        raise ValueError(f"mode must be full or concise, not {mode!r}")
    painter = _Painter(color=color, width=max(width, 40))
    if mode == "concise":
        return "\n".join(painter.concise(d) for d in diagnostics)
    return "\n\n".join(painter.full(d) for d in diagnostics)


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """Plain dicts and lists. Lines and columns count characters from 1, offsets from 0; ends are exclusive."""
    d = diagnostic
    return {
        "code": d.code,
        "severity": d.severity.value,
        "headline": d.headline,
        "primary": None if d.primary is None else _label_json(d.primary),
        "secondary": [_label_json(label) for label in d.secondary],
        "notes": list(d.notes),
        "help": d.help,
        "fix": None if d.fix is None else {"span": _span_json(d.fix.span), "text": d.fix.text},
        "data": dict(d.data),
    }


def _label_json(label: Label) -> dict[str, Any]:
    return {"span": _span_json(label.span), "message": label.message}


def _span_json(span: Span) -> dict[str, Any]:
    def position(offset: int) -> dict[str, int]:
        line, column = span.source.line_column(offset)
        return {"line": line, "column": column, "offset": offset}

    return {"path": span.source.path, "start": position(span.start), "end": position(span.end)}


class _Painter:
    def __init__(self, *, color: bool, width: int) -> None:
        self._color = color
        self._width = width

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._color and text else text

    def concise(self, d: Diagnostic) -> str:
        where = "" if d.primary is None else f"{_place(d.primary.span)}: "
        head = self._paint(f"{d.severity.value}[{d.code}]", _STYLE[d.severity])
        return f"{where}{head}: {_clean(d.headline)}"

    def full(self, d: Diagnostic) -> str:
        style = _STYLE[d.severity]
        head = self._paint(f"{d.severity.value}[{d.code}]", style)
        lines = [*self._wrap(f"{head}: ", len(f"{d.severity.value}[{d.code}]: "), d.headline, bold=True)]
        groups = _by_source(d)
        numbers = [source.line_column(label.span.start)[0] for source, labels in groups for label, _ in labels]
        gutter = max((len(str(n)) for n in numbers), default=1)
        for i, (source, labels) in enumerate(groups):
            arrow = self._paint("-->" if i == 0 else ":::", "34")
            lines.append(f"{' ' * gutter}{arrow} {_place(labels[0][0].span)}")
            lines.append(self._bar(gutter))
            shown = -1
            by_line: dict[int, list[tuple[Label, bool]]] = {}
            for label, primary in labels:
                by_line.setdefault(source.line_column(label.span.start)[0], []).append((label, primary))
            for number in sorted(by_line):
                if shown >= 0 and number > shown + 1:
                    lines.append(self._paint("...", "34"))
                shown = number
                # Labels of one line share it, unless a long line shows another part for each.
                row = ""
                for label, primary in by_line[number]:
                    snippet = self._snippet(source, number, label, gutter, style if primary else "34", primary)
                    lines += snippet if snippet[0] != row else snippet[1:]
                    row = snippet[0]
        for kind, text in [*(("note", n) for n in d.notes), *([("help", d.help)] if d.help else [])]:
            prefix = f"{' ' * gutter} = {kind}: "
            painted = f"{' ' * gutter} {self._paint('=', '34')} {self._paint(kind, '1')}: "
            lines += self._wrap(painted, len(prefix), text)
        return "\n".join(lines)

    def _bar(self, gutter: int, text: str = "") -> str:
        return f"{' ' * gutter} {self._paint('|', '34')}{' ' + text if text else ''}"

    def _snippet(self, source: Source, number: int, label: Label, gutter: int, style: str, primary: bool) -> list[str]:
        start = min(label.span.start, len(source.text))
        line_start = source.text.rfind("\n", 0, start) + 1
        line_end = source.text.find("\n", start)
        line = source.text[line_start : len(source.text) if line_end < 0 else line_end].rstrip("\r")
        # A span over several lines is marked on its first.
        first, last = start - line_start, min(max(label.span.end - line_start, start - line_start + 1), len(line) + 1)
        room = max(self._width - gutter - 3, _MIN_WINDOW)
        cells = [_cell(c) for c in line]
        left, right = _window([_columns(c) for c in cells], first, last, room)
        shown = "".join(cells[left:right])
        before = ("..." if left else "") + "".join(cells[left:first])
        text = ("..." if left else "") + shown + ("..." if right < len(cells) else "")
        pad = _columns(before)
        marked = _columns("".join(cells[first : min(last, right)]))
        mark = self._paint(("^" if primary else "-") * max(1, marked), style)
        number_text = self._paint(str(number).rjust(gutter), "34")
        row = f"{number_text} {self._paint('|', '34')} {text}".rstrip()
        message = _clean(label.message)
        if not message or pad + max(1, marked) + 1 + len(message) <= room:
            caret = f"{' ' * pad}{mark}{' ' if message else ''}{self._paint(message, style)}"
            return [row, self._bar(gutter, caret)]
        # A message that has no room beside its caret goes below.
        below = textwrap.wrap(message, max(room - 2, 20))
        return [row, self._bar(gutter, " " * pad + mark), *(self._bar(gutter, self._paint(t, style)) for t in below)]

    def _wrap(self, prefix: str, prefix_width: int, text: str, *, bold: bool = False) -> list[str]:
        parts = textwrap.wrap(
            _clean(text), max(self._width - prefix_width, 30), break_on_hyphens=False, break_long_words=False
        ) or [""]
        style = "1" if bold else "0"
        painted = [self._paint(p, style) if bold else p for p in parts]
        return [prefix + painted[0], *(" " * prefix_width + p for p in painted[1:])]


def _by_source(d: Diagnostic) -> list[tuple[Source, list[tuple[Label, bool]]]]:
    """Labels by file; the primary's file first, the primary first in it."""
    if d.primary is None:
        labels: list[tuple[Label, bool]] = []
    else:
        labels = [(d.primary, True)]
    labels += [(label, False) for label in d.secondary]
    groups: list[tuple[Source, list[tuple[Label, bool]]]] = []
    for label, primary in labels:
        for source, found in groups:
            if source.path == label.span.source.path:
                found.append((label, primary))
                break
        else:
            groups.append((label.span.source, [(label, primary)]))
    return groups


def _place(span: Span) -> str:
    line, column = span.source.line_column(span.start)
    return f"{_clean(span.source.path)}:{line}:{column}"


def _window(widths: Sequence[int], first: int, last: int, room: int) -> tuple[int, int]:
    """Half-open range of characters to show of a line, so that it fits and the caret is in it."""
    if sum(widths) <= room:
        return 0, len(widths)
    room -= 6  # dots on both sides
    left, used = first, 0
    right = first
    while right < len(widths) and right < last and used + widths[right] <= room:
        used += widths[right]
        right += 1
    while left > 0 and used + widths[left - 1] <= room - room // 3:
        left -= 1
        used += widths[left]
    while right < len(widths) and used + widths[right] <= room:
        used += widths[right]
        right += 1
    while left > 0 and used + widths[left - 1] <= room:
        left -= 1
        used += widths[left]
    return left, right


def _cell(char: str) -> str:
    """How a character of the source is shown: tabs as blanks, what a terminal would act on as '?'."""
    if char == "\t":
        return _TAB
    if char.isprintable() or unicodedata.combining(char):
        return char
    return "?"


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "?" for c in text)


def _columns(text: str) -> int:
    """Terminal columns of shown text."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )
