"""``nereusc fmt``: canonical text of a syntax tree with the comments of its source. Idempotent.

Every decision (what stays on one line, where lines break) depends on the tree and on where the source has line ends,
never on the widths after alignment; so formatting twice gives the same text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from nereus.lang.printer import body_text, comma_after, head_text, item_text, value_text
from nereus.lang.syntax import Block, Body, File, Item, Sequence, Setting

WIDTH = 120
#: What its author put on one line may be somewhat longer: neighbours should look alike.
ONE_LINE_WIDTH = 150
_INDENT = "  "
_GAP = "  "


@dataclass(slots=True, kw_only=True)
class _Cell:
    """A setting as ``key`` and the text behind '='; any other item has no key."""

    key: str | None
    text: str

    def plain(self) -> str:
        return self.text if self.key is None else f"{self.key} = {self.text}"


@dataclass(slots=True, kw_only=True)
class _Row:
    """One line: a comment, a blank, cells, a block on one line, or the first or last line of a longer block."""

    kind: str  # comment | blank | cells | block | open | close
    depth: int
    cells: list[_Cell] = field(default_factory=list)
    block: Block | None = None
    text: str = ""
    comment: str = ""


def format_file(file: File) -> str:
    """The file must have parsed without errors."""
    return _Formatter(file).run()


class _Formatter:
    def __init__(self, file: File) -> None:
        self._file = file
        self._text = file.source.text
        self._starts = [c.start for c in file.comments]

    def run(self) -> str:
        rows: list[_Row] = []
        self._body(self._file.items, 0, len(self._text), 0, rows)
        _align(rows)
        lines = []
        for row in rows:
            lines.append((row.text + row.comment).rstrip() if row.kind != "blank" else "")
        return "\n".join(lines) + "\n" if lines else ""

    # -- rows

    def _comments(self, start: int, end: int) -> list[tuple[int, int]]:
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        return [(c.start, c.end) for c in self._file.comments[first:last]]

    def _body(self, items: tuple[Item, ...], start: int, end: int, depth: int, rows: list[_Row]) -> None:
        """Rows of what stands between two offsets. A comment right behind '{' joins the row of the brace."""
        loose = self._comments(start, end)
        inside = [(item.span.start, item.span.end) for item in items]
        elements: list[tuple[int, int, int | None]] = [(a, b, i) for i, (a, b) in enumerate(inside)]
        k = 0
        for a, b in loose:
            while k < len(inside) and inside[k][1] <= a:
                k += 1
            if k == len(inside) or a < inside[k][0]:
                elements.append((a, b, None))
        last, first_row = start, len(rows)
        for a, b, index in sorted(elements):
            newlines = self._text.count("\n", last, a)
            if newlines > 1 and len(rows) > first_row:
                rows.append(_Row(kind="blank", depth=depth))
            if index is None:
                comment = self._text[a:b].rstrip()
                joins = newlines == 0 and rows and rows[-1].kind not in ("comment", "blank") and not rows[-1].comment
                if joins:
                    rows[-1].comment = _GAP + comment
                else:
                    rows.append(_Row(kind="comment", depth=depth, text=_INDENT * depth + comment))
            else:
                comma = comma_after(items, index)
                self._item(items[index], depth, rows, same_line=newlines == 0 and len(rows) > first_row, comma=comma)
            last = b

    def _item(self, item: Item, depth: int, rows: list[_Row], *, same_line: bool, comma: str) -> None:
        body = item.body if isinstance(item, Setting | Block) else None
        bodies = [] if body is None else [body]
        hoisted = [
            (a, b)
            for a, b in self._comments(item.span.start, item.span.end)
            if not any(x.span.start < a < x.span.end for x in bodies)
        ]
        for a, b in hoisted:
            text = _INDENT * depth + self._text[a:b].rstrip()
            rows.append(_Row(kind="comment", depth=depth, text=text))
        if body is not None and not self._fits(item, body, depth):
            self._long(item, body, depth, rows)
            return
        if isinstance(item, Block):
            rows.append(_Row(kind="block", depth=depth, block=item))
            return
        if not isinstance(item, Setting):
            rows.append(_Row(kind="cells", depth=depth, cells=[_Cell(key=None, text=item_text(item))]))
            return
        suffix = "" if body is None else f" {body_text(body)}"
        cell = _Cell(key=item.key.text, text=self._value(item, depth) + suffix + comma)
        if same_line and not hoisted and depth and rows[-1].kind == "cells" and not rows[-1].comment:
            row = rows[-1]
            width = len(_INDENT) * depth + sum(len(c.plain()) + 2 for c in row.cells) + len(cell.plain())
            if width <= WIDTH and "\n" not in cell.text and "\n" not in row.cells[-1].text:
                row.cells.append(cell)
                return
        rows.append(_Row(kind="cells", depth=depth, cells=[cell]))

    def _fits(self, item: Item, body: Body, depth: int) -> bool:
        """Written on one line, and short enough to stay there."""
        if self._comments(body.span.start, body.span.end):
            return False
        if not body.items:
            return True
        one_line = "\n" not in self._text[item.span.start : item.span.end]
        return one_line and len(_INDENT) * depth + len(item_text(item)) <= ONE_LINE_WIDTH

    def _long(self, item: Item, body: Body, depth: int, rows: list[_Row]) -> None:
        if isinstance(item, Block):
            head = head_text(item)
        else:
            assert isinstance(item, Setting)
            head = f"{item.key.text} = {value_text(item.value)}"
        rows.append(_Row(kind="open", depth=depth, text=f"{_INDENT * depth}{head} {{"))
        if "\n" in self._text[item.span.start : item.span.end]:
            self._body(body.items, body.span.start + 1, body.span.end - 1, depth + 1, rows)
        else:
            # Too long for its line: one entry a line.
            for i, inner in enumerate(body.items):
                self._item(inner, depth + 1, rows, same_line=False, comma=comma_after(body.items, i))
        rows.append(_Row(kind="close", depth=depth, text=_INDENT * depth + "}"))

    def _value(self, item: Setting, depth: int) -> str:
        """The value; a list too long for its line is filled over several."""
        text = value_text(item.value)
        value = item.value
        indent = _INDENT * depth
        if not isinstance(value, Sequence) or len(indent) + len(item.key.text) + 3 + len(text) <= WIDTH:
            return text
        lines, line = [], ""
        for i, inner in enumerate(value.items):
            word = value_text(inner) + ("," if i + 1 < len(value.items) else "")
            if line and len(indent) + 2 + len(line) + 1 + len(word) > WIDTH:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
        filled = "".join(f"\n{indent}{_INDENT}{part}" for part in lines)
        return f"{value.bracket}{filled}\n{indent}{')' if value.bracket == '(' else ']'}"


# -- alignment of neighbouring rows


def _align(rows: list[_Row]) -> None:
    i = 0
    while i < len(rows):
        j = i + 1
        if rows[i].kind == "cells":
            while j < len(rows) and _single(rows[i]) and _single(rows[j]) and rows[j].depth == rows[i].depth:
                j += 1
            _align_keys(rows[i:j])
        elif rows[i].kind == "block":
            while j < len(rows) and _alike(rows[i], rows[j]):
                j += 1
            _align_blocks(rows[i:j])
        i = j
    _align_comments(rows)


def _single(row: _Row) -> bool:
    return row.kind == "cells" and len(row.cells) == 1 and row.cells[0].key is not None


def _align_keys(rows: list[_Row]) -> None:
    width = max(len(row.cells[0].key or "") for row in rows)
    for row in rows:
        indent = _INDENT * row.depth
        if len(rows) > 1:
            cell = row.cells[0]
            row.text = f"{indent}{(cell.key or '').ljust(width)} = {cell.text}"
        else:
            row.text = indent + _GAP.join(cell.plain() for cell in row.cells)


def _alike(first: _Row, row: _Row) -> bool:
    if row.kind != "block" or row.depth != first.depth or first.block is None or row.block is None:
        return False
    same = row.block.keyword.text == first.block.keyword.text
    return same and (row.block.value is None) == (first.block.value is None)


def _align_blocks(rows: list[_Row]) -> None:
    blocks = [row.block for row in rows if row.block is not None]
    names = [b.keyword.text if b.label is None else f"{b.keyword.text} {b.label.text}" for b in blocks]
    width = max(len(name) for name in names)
    if blocks[0].value is not None:
        for row, block, name in zip(rows, blocks, names, strict=True):
            body = "" if block.body is None else f" {body_text(block.body)}"
            assert block.value is not None
            row.text = f"{_INDENT * row.depth}{name.ljust(width)} = {value_text(block.value)}{body}"
        return
    bodies = [block.body for block in blocks]
    tables = _columns([b for b in bodies if b is not None])
    for row, name in zip(rows, names, strict=True):
        row.text = f"{_INDENT * row.depth}{name.ljust(width)} {tables.pop(0)}"


def _columns(bodies: list[Body]) -> list[str]:
    """Bodies on one line each; leading entries stand in columns as long as their keys agree."""
    rows = [[item_text(item) + comma_after(b.items, i) for i, item in enumerate(b.items)] for b in bodies]
    keys = [[_column_key(item) for item in b.items] for b in bodies]
    column = 0
    while True:
        longer = [i for i, row in enumerate(rows) if len(row) > column + 1]
        if len(longer) < 2 or len({keys[i][column] for i in longer}) != 1 or keys[longer[0]][column] == "":
            break
        width = max(len(rows[i][column]) for i in longer)
        for i in longer:
            rows[i][column] = rows[i][column].ljust(width)
        column += 1
    return [f"{{ {_GAP.join(row)} }}" if row else "{}" for row in rows]


def _column_key(item: Item) -> str:
    if not isinstance(item, Setting):
        return ""
    return "backend" if item.key.text == "engine" else item.key.text


def _align_comments(rows: list[_Row]) -> None:
    """Trailing comments of neighbouring rows start in one column."""
    i = 0
    while i < len(rows):
        if rows[i].kind in ("comment", "blank"):
            i += 1
            continue
        j = i + 1
        while j < len(rows) and rows[j].kind == rows[i].kind and rows[j].depth == rows[i].depth:
            j += 1
        with_comment = [row for row in rows[i:j] if row.comment]
        widths = [len(row.text.rsplit("\n", 1)[-1]) for row in with_comment]
        for row, width in zip(with_comment, widths, strict=True):
            row.comment = " " * (max(widths) - width) + row.comment
        i = j
