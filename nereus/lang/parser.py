"""Text -> syntax tree. Recovers from errors so that one run reports all of them; never raises on any text."""

from __future__ import annotations

import re
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from nereus.ir.diagnostic import Diagnostic, Source, Span
from nereus.lang.recover import explain, repair
from nereus.lang.scan import CLOSERS, scan, without_comments
from nereus.lang.sink import Sink
from nereus.lang.syntax import (
    At,
    Block,
    Body,
    Call,
    Extends,
    File,
    Item,
    Number,
    Removal,
    Repeat,
    Sequence,
    Setting,
    Text,
    Value,
    Word,
)

#: Real plans nest three deep. The bound keeps recursion over the tree far from Python's.
MAX_DEPTH = 32
MAX_CHARS = 4 * 2**20
#: After that many the rest is noise.
MAX_SYNTAX_ERRORS = 20
#: Larger magnitudes are no count, size or rate of anything; the bound also keeps digit strings from costing time.
MAX_NUMBER = 10**18

#: A line that can only begin a statement of the file: recovery never reads an error past one.
_STATEMENT = re.compile(
    r'^(?:extends[ \t]+"|remove[ \t]+stage\b|model[ \t]+[\w-]+[ \t]*[={]|stage[ \t]+[\w.-]+[ \t]*\{'
    r"|(?:cluster|workload|checkpoint)[ \t]*\{)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseResult:
    file: File
    diagnostics: tuple[Diagnostic, ...]


def parse(source: Source) -> ParseResult:
    sink = Sink()
    text = source.text
    if len(text) > MAX_CHARS:
        headline = f"the file has {len(text):,} characters; a plan has at most {MAX_CHARS:,}"
        sink.error("NRS1001", headline, Span(source=source, start=0, end=0))
        whole = Span(source=source, start=0, end=len(text))
        return ParseResult(file=File(items=(), source=source, skipped=(whole,)), diagnostics=sink.diagnostics())
    marks = scan(text)
    comments = tuple(Span(source=source, start=a, end=b) for a, b in marks.comments)
    if marks.max_depth > MAX_DEPTH:
        at = marks.deepest
        span = Span(source=source, start=at, end=at + 1)
        sink.error("NRS1010", f"brackets nest more than {MAX_DEPTH} deep", span, "this one is too deep")
        whole = Span(source=source, start=0, end=len(text))
        file = File(items=(), source=source, comments=comments, skipped=(whole,))
        return ParseResult(file=file, diagnostics=sink.diagnostics())
    skipped: list[Span] = []
    try:
        items = _convert_start(_lark().parse(text), source, 0)
    except UnexpectedInput:
        items = _parse_pieces(source, without_comments(text, marks.comments), sink, skipped)
    file = File(items=items, source=source, comments=comments, skipped=tuple(skipped))
    return ParseResult(file=file, diagnostics=sink.diagnostics())


def grammar_text() -> str:
    """The grammar: beside this module when installed, in the repository's ``grammar/`` in a checkout."""
    packaged = resources.files("nereus.lang") / "grammar" / "plan.lark"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).resolve().parents[2] / "grammar" / "plan.lark").read_text(encoding="utf-8")


@cache
def _lark() -> Lark:
    return Lark(grammar_text(), parser="lalr", lexer="contextual", propagate_positions=True, maybe_placeholders=True)


def _parse_pieces(source: Source, text: str, sink: Sink, skipped: list[Span]) -> tuple[Item, ...]:
    """Parses statement by statement, cutting out what cannot be read, so that an error stays where it is."""
    starts = sorted({0, *(m.start() for m in _STATEMENT.finditer(text))})
    items: list[Item] = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        piece = text[start:end]
        # A block left open swallows nothing but itself: the next statement begins where its line begins.
        open_brackets = scan(piece).unclosed
        if open_brackets and end < len(text):
            piece = _close(source, piece, start, open_brackets, sink, skipped)
        items.extend(_parse_piece(source, piece, start, sink, skipped))
        if sink.num_errors >= MAX_SYNTAX_ERRORS:
            skipped.append(Span(source=source, start=0, end=len(text)))
            break
    return tuple(items)


def _close(source: Source, piece: str, base: int, open_brackets: Items[int], sink: Sink, skipped: list[Span]) -> str:
    for at in open_brackets:
        span = Span(source=source, start=base + at, end=base + at + 1)
        closer = CLOSERS[piece[at]]
        sink.error(
            "NRS1005", f"'{piece[at]}' is never closed", span, f"no '{closer}' for this one", help=f"add '{closer}'"
        )
        skipped.append(Span(source=source, start=base + at, end=base + len(piece)))
    return piece + "".join(CLOSERS[piece[at]] for at in reversed(open_brackets))


def _parse_piece(source: Source, piece: str, base: int, sink: Sink, skipped: list[Span]) -> tuple[Item, ...]:
    lines: set[int] = set()  # one syntax error a line; what follows it there is its echo
    limit = len(source.text)
    # Each repair parses the piece again, so a huge piece gets few.
    for _ in range(2 * MAX_SYNTAX_ERRORS if len(piece) < 20_000 else 3):
        try:
            return _convert_start(_lark().parse(piece), source, base)
        except UnexpectedInput as error:
            at = min(_offset(error, piece), len(piece))
            open_brackets = scan(piece).unclosed
            if at >= len(piece) and open_brackets:
                piece = _close(source, piece, base, open_brackets, sink, skipped)
                continue
            line = piece.count("\n", 0, at)
            if line not in lines:
                lines.add(line)
                sink.extend([explain(error, piece, at, source, base)])
            start, end = repair(error, piece, at)
            if not piece[start:end].strip():
                break
            piece = piece[:start] + re.sub(r"[^\n]", " ", piece[start:end]) + piece[end:]
            skipped.append(Span(source=source, start=min(base + start, limit), end=min(base + end, limit)))
            if sink.num_errors >= MAX_SYNTAX_ERRORS:
                break
    end = min(base + len(piece), limit)
    headline = f"stopped after {sink.num_errors} syntax error(s); the rest of this statement was not read"
    sink.note("NRS1014", headline, Span(source=source, start=end, end=end))
    skipped.append(Span(source=source, start=base, end=end))
    return ()


def _offset(error: UnexpectedInput, piece: str) -> int:
    token = getattr(error, "token", None)
    if token is not None and token.type == "$END":
        return len(piece)
    # Typed as int, but None for some errors at the end of the text.
    at: int | None = getattr(error, "pos_in_stream", None)
    return len(piece) if at is None else at


# -- lark's tree -> ours; recursion is bounded by MAX_DEPTH


def _convert_start(tree: Tree[Token], source: Source, base: int) -> tuple[Item, ...]:
    return _Converter(source, base).items(tree.children)


class _Converter:
    def __init__(self, source: Source, base: int) -> None:
        self._source = source
        self._base = base
        self._limit = len(source.text)

    def items(self, children: Items[Any]) -> tuple[Item, ...]:
        return tuple(self.item(c) for c in children if isinstance(c, Tree))

    def item(self, tree: Tree[Token]) -> Item:
        children: list[Any] = tree.children
        span = self._tree_span(tree)
        if tree.data == "setting":
            return Setting(
                key=self.word(children[0]), value=self.value(children[1]), body=self.body(children[2]), span=span
            )
        if tree.data == "extends":
            return Extends(path=self.text(children[0]), span=span)
        if tree.data == "removal":
            return Removal(kind=self.word(children[0]), name=self.word(children[1]), span=span)
        keyword = self.word(children[0])
        if tree.data == "definition":
            label = self.word(children[1])
            value, body = self.value(children[2]), self.body(children[3])
            return Block(keyword=keyword, label=label, value=value, body=body, span=span)
        assert tree.data == "block", tree.data
        optional = None if children[1] is None else self.word(children[1])
        return Block(keyword=keyword, label=optional, value=None, body=self.body(children[2]), span=span)

    def body(self, tree: Tree[Token] | None) -> Body | None:
        return None if tree is None else Body(items=self.items(tree.children), span=self._tree_span(tree))

    def value(self, tree: Tree[Token]) -> Value:
        children: list[Any] = tree.children
        span = self._tree_span(tree)
        match str(tree.data):
            case "number":
                return self.number(children[0], children[1], span)
            case "string":
                return self.text(children[0])
            case "word":
                return self.word(children[0])
            case "at":
                return self.at(children, span)
            case "repeat":
                count = self.number(children[0], None, self._token_span(children[0]))
                return Repeat(count=count, of=cast("Text | Word", self.value(children[1])), span=span)
            case "call":
                name = str(children[0])[:-1]
                return Call(name=name, args=tuple(self.value(c) for c in children[1:] if c is not None), span=span)
            case other:
                bracket = "(" if other == "tuple" else "["
                values = tuple(self.value(c) for c in children if c is not None)
                return Sequence(bracket=bracket, items=values, span=span)

    def at(self, children: list[Any], span: Span) -> At:
        place, share = self.word(children[1]), None
        if len(children) > 2 and children[2] is not None:  # the bracket is part of the token
            where = Span(source=self._source, start=place.span.start, end=place.span.end - 1)
            place = Word(text=place.text[:-1], span=where)
            share = self.number(children[2], None, self._token_span(children[2]))
        return At(word=self.word(children[0]), place=place, share=share, span=span)

    def word(self, token: Token) -> Word:
        return Word(text=str(token), span=self._token_span(token))

    def text(self, token: Token) -> Text:
        value = re.sub(r'\\(["\\])', r"\1", str(token)[1:-1])
        return Text(value=value, span=self._token_span(token))

    def number(self, token: Token, unit: Token | None, span: Span) -> Number:
        return Number(
            text=str(token), value=_number(str(token)), unit=None if unit is None else self.word(unit), span=span
        )

    def _token_span(self, token: Token) -> Span:
        assert token.start_pos is not None and token.end_pos is not None
        return self._span(token.start_pos, token.end_pos)

    def _tree_span(self, tree: Tree[Token]) -> Span:
        return self._span(tree.meta.start_pos, tree.meta.end_pos)

    def _span(self, start: int, end: int) -> Span:
        # Brackets added by recovery lie past the end of the text.
        start, end = start + self._base, end + self._base
        return Span(source=self._source, start=min(start, self._limit), end=min(end, self._limit))


def _number(text: str) -> int | float | None:
    if len(text) > 40:
        return None
    plain = text.replace("_", "")
    value: int | float = int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    if abs(value) > MAX_NUMBER:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() and "." not in plain else value
