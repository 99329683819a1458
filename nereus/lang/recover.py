"""Syntax errors: what to say about one, and what to cut out so that parsing can go on behind it."""

from __future__ import annotations

import re

from lark.exceptions import UnexpectedInput, UnexpectedToken

from nereus.ir.diagnostic import Diagnostic, Fix, Label, Severity, Source, Span
from nereus.lang import schema
from nereus.lang.scan import CLOSERS, Scan, scan
from nereus.lang.sink import show

_KEY = re.compile(r"[A-Za-z_][\w.\[\]-]*[ \t]*=(?!=)")
#: ``tp = \n pp``: what stands before the second '=' when a value was left out.
_NO_VALUE = re.compile(r"([A-Za-z_][\w.-]*)\s*(=)\s*([A-Za-z_][\w.-]*)\s*$")
_KNOWN_KEYS = {*schema.ALL_STAGE_KEYS, *schema.WORKLOAD_KEYS, *schema.NODE_KEYS, *schema.MODEL_KEYS}
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_STRAY = {
    "'": "strings stand in double quotes",
    ";": "entries are separated by white space or commas",
    ":": "a key and its value are joined by '='",
    "/": "a comment begins with '#'",
    "\u00a0": "this is a non-breaking space; use a plain one",
    "\u201c": "strings stand in plain double quotes",
    "\u201d": "strings stand in plain double quotes",
    "*": "a count and what it counts are joined by 'x': 8 x \"h100-sxm-80gb\"",
    "\u00d7": "a count and what it counts are joined by 'x': 8 x \"h100-sxm-80gb\"",
}


def explain(error: UnexpectedInput, piece: str, at: int, source: Source, base: int) -> Diagnostic:
    """One diagnostic for one parser error at offset ``at`` of ``piece``, which stands at ``base`` of the source."""

    def span(start: int, end: int) -> Span:
        limit = len(source.text)
        return Span(source=source, start=min(base + start, limit), end=min(base + end, limit))

    def diagnostic(code: str, headline: str, where: Span, label: str = "", **more: object) -> Diagnostic:
        primary = Label(span=where, message=label)
        return Diagnostic(code=code, severity=Severity.ERROR, headline=headline, primary=primary, **more)  # type: ignore[arg-type]

    before = piece[:at].rstrip()
    if at >= len(piece):
        token, end = "the end of the text", at
        # The caret of an error at the end goes behind the last thing that was read.
        here = span(max(len(before) - 1, 0), len(before))
    else:
        token, end = _token(piece, at)
        here = span(at, end)
    forgotten = _forgotten(piece, at)
    if forgotten is not None:
        opener = piece[forgotten]
        where = span(forgotten, forgotten + 1)
        headline, label = f"'{opener}' is never closed", f"no '{CLOSERS[opener]}' for this one"
        return diagnostic("NRS1005", headline, where, label, help=f"add '{CLOSERS[opener]}'")
    if token == '"':
        return diagnostic("NRS1004", "this string is not closed on its line", here, "it begins here", help="add '\"'")
    if token in ("}", ")", "]") and at in scan(piece).unopened:
        return diagnostic("NRS1006", f"'{token}' closes nothing", here, "no bracket is open here")
    missing = _left_out(before) if token == "=" else None
    if missing is not None:
        where = span(missing.start(2), missing.end(2))
        return diagnostic("NRS1007", f"'{show(missing[1])}' has no value", where, "a value should follow this '='")
    if before.endswith("=") and not (len(token) == 1 and token in _STRAY):
        key = _WORD.search(before[:-1].rstrip().rsplit(None, 1)[-1]) if before[:-1].strip() else None
        name = f"'{show(key.group())}'" if key else "the key"
        start = len(before) - 1
        return diagnostic("NRS1007", f"{name} has no value", span(start, start + 1), "a value should follow this '='")
    if not isinstance(error, UnexpectedToken) or (len(token) == 1 and not token.isalnum() and token not in "{}()[],=@"):
        headline = f"'{show(token)}' has no meaning here"
        return diagnostic("NRS1003", headline, here, "not part of the plan language", help=_STRAY.get(token[0]))
    previous = _last_word(before)
    if previous == "extends":
        help_text = f'extends "{show(token)}"' if token[0].isalpha() else 'extends "base.plan"'
        return diagnostic("NRS1009", "extends wants a file name in quotes", here, help=f"write {help_text}")
    if previous is not None and "EQUAL" in error.expected and token != "=":
        start = len(before) - len(previous)
        where = span(start, start + len(previous))
        label = "expected '=' and a value, or a block in braces, behind this"
        fix = None
        if token[0].isalnum() or token[0] == '"':
            fix = Fix(span=span(len(before), at), text=" = ")
        return diagnostic("NRS1008", f"'{show(previous)}' is followed by neither '=' nor '{{'", where, label, fix=fix)
    what = token if token == "the end of the text" else f"'{show(token)}'"
    return diagnostic("NRS1009", f"{what} cannot stand here", here, _wanted(error))


def repair(error: UnexpectedInput, piece: str, at: int) -> tuple[int, int]:
    """Half-open range to blank out: the entry that holds the error, as far as it can be told."""
    marks = scan(piece)
    if at < len(piece) and at in marks.unopened:
        return at, at + 1
    forgotten = _forgotten(piece, at)
    if forgotten is None and piece[at : at + 1] == "=":
        missing = _left_out(piece[:at])
        if missing is not None:
            return missing.start(1), missing.start(3)
    dangling = _dangling(error, piece, at) if forgotten is None else None
    at = at if forgotten is None else forgotten
    if dangling is not None:
        start = dangling
        if at >= len(piece) or piece[at] in "})]" or "\n" in piece[start:at] or _KEY.match(piece, at):
            return start, at
    else:
        start = _entry_start(marks, piece, at)
    if at < len(piece) and piece[at] in "})]":
        # The bracket closes something that is still wanted.
        return (start, at) if piece[start:at].strip() else (at, at + 1)
    end = at + max(1, len(_token(piece, at)[0])) if at < len(piece) else at
    if at in marks.partner:
        end = max(end, marks.partner[at] + 1)
    while end < len(piece) and piece[end] not in "\n}":
        if end in marks.partner:
            end = marks.partner[end] + 1
            continue
        if _KEY.match(piece, end) and not (piece[end - 1].isalnum() or piece[end - 1] in "_.-"):
            break
        end += 1
    return start, end


def _left_out(before: str) -> re.Match[str] | None:
    """``tp = pp`` before a second '=': a value was left out if the last word is a key or begins a line of its own."""
    match = _NO_VALUE.search(before)
    if match is None or not ("\n" in before[match.end(2) : match.start(3)] or match[3] in _KNOWN_KEYS):
        return None
    return match


def _entry_start(marks: Scan, piece: str, at: int) -> int:
    """Where the entry begins that reaches to ``at``, within its line and its innermost brace."""
    line_start = piece.rfind("\n", 0, min(at, len(piece))) + 1
    pairs = [(a, marks.partner.get(a, len(piece))) for a in (*marks.partner, *marks.unclosed, *marks.forgotten)]
    inside = max((a for a, b in pairs if line_start <= a < at <= b and piece[a] == "{"), default=-1)
    start = max(line_start, inside + 1)
    closed = [(a, b) for a, b in pairs if start <= a and b < at]
    keys = [m.start() for m in _KEY.finditer(piece, start, max(at, start))]
    keys = [k for k in keys if not any(a < k < b for a, b in closed)]
    if keys:
        # ``model actor = ...`` at the beginning of a line goes as a whole.
        return start if re.fullmatch(r"\s*[A-Za-z_]\w*[ \t]+", piece[start : keys[-1]]) else keys[-1]
    words = re.search(r"(?:[A-Za-z_][\w.\[\]-]*[ \t]+)*$", piece[start:at])
    return min(start + words.start() if words else at, len(piece))


def _dangling(error: UnexpectedInput, piece: str, at: int) -> int | None:
    """Start of the one or two words before ``at`` that neither '=' nor '{' follows, if that is the error."""
    expected = set(error.expected) if isinstance(error, UnexpectedToken) else set()
    if not {"EQUAL", "LBRACE"} <= expected or piece[at : at + 1] == "=":
        return None
    word = r"[A-Za-z_][\w.\[\],-]*\s*"
    match = re.search(f"{word}$" if "WORD" in expected else f"(?:{word}){{1,2}}$", piece[max(0, at - 400) : at])
    return max(0, at - 400) + match.start() if match else None


def _forgotten(piece: str, at: int) -> int | None:
    """The bracket in whose unclosed reach the error lies, if there is one."""
    before = [b for b in scan(piece).forgotten if b <= at]
    return before[-1] if before else None


def _token(piece: str, at: int) -> tuple[str, int]:
    """What stands at ``at``, as a reader would name it, and where it ends."""
    match = re.compile(r'[A-Za-z_][\w.-]*|[+-]?\d[\w.]*|"(?:[^"\\\n]|\\[^\n])*"').match(piece, at)
    if match:
        return match.group(), match.end()
    return piece[at : at + 1], at + 1


def _last_word(text: str) -> str | None:
    match = re.search(r"[A-Za-z_][\w.\[\],-]*$", text[-400:])
    return match.group() if match else None


_NAMES = {
    "WORD": "a name",
    "NUMBER": "a number",
    "STRING": "a string in quotes",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "LPAR": "'('",
    "RPAR": "')'",
    "LSQB": "'['",
    "RSQB": "']'",
    "EQUAL": "'='",
    "AT": "'@'",
    "COMMA": "','",
    "$END": "the end of the text",
}


def _wanted(error: UnexpectedInput) -> str:
    expected = getattr(error, "accepts", None) or getattr(error, "expected", None) or ()
    names = sorted({_NAMES[t] for t in expected if t in _NAMES})
    return f"expected {' or '.join(names)}" if names else ""
