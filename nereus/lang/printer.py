"""Syntax tree -> text on one line, in the canonical form."""

from __future__ import annotations

from nereus.lang.syntax import (
    At,
    Block,
    Body,
    Call,
    Extends,
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

#: Block keywords that a number before them never takes for its unit (see UNIT in the grammar).
_SAFE_KEYWORDS = ("node", "model", "stage")


def quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def value_text(value: Value) -> str:
    match value:
        case Word(text=text):
            return text
        case Text(value=string):
            return quote(string)
        case Number():
            return value.text if value.unit is None else f"{value.text} {value.unit.text}"
        case Repeat():
            return f"{value.count.text} x {value_text(value.of)}"
        case At():
            share = "" if value.share is None else f"({value.share.text})"
            return f"{value.word.text} @{value.place.text}{share}"
        case Call():
            return f"{value.name}({', '.join(value_text(a) for a in value.args)})"
        case Sequence():
            closer = ")" if value.bracket == "(" else "]"
            return f"{value.bracket}{', '.join(value_text(v) for v in value.items)}{closer}"


def head_text(block: Block) -> str:
    """A block without its body: ``stage actor.train``, ``model ref = actor``."""
    head = block.keyword.text if block.label is None else f"{block.keyword.text} {block.label.text}"
    return head if block.value is None else f"{head} = {value_text(block.value)}"


def body_text(body: Body) -> str:
    if not body.items:
        return "{}"
    texts = [item_text(item) + comma_after(body.items, i) for i, item in enumerate(body.items)]
    return f"{{ {'  '.join(texts)} }}"


def item_text(item: Item) -> str:
    match item:
        case Extends():
            return f"extends {quote(item.path.value)}"
        case Removal():
            return f"remove {item.kind.text} {item.name.text}"
        case Setting():
            text = f"{item.key.text} = {value_text(item.value)}"
            return text if item.body is None else f"{text} {body_text(item.body)}"
        case Block():
            return head_text(item) if item.body is None else f"{head_text(item)} {body_text(item.body)}"


def comma_after(items: tuple[Item, ...], i: int) -> str:
    """A comma where the first word of the next item would otherwise read as the unit of this item's number."""
    if i + 1 == len(items):
        return ""
    item, following = items[i], items[i + 1]
    value = item.value if isinstance(item, Setting | Block) and item.body is None else None
    bare = isinstance(value, Number) and value.unit is None
    labelled = isinstance(following, Block) and following.label is not None
    if bare and labelled and isinstance(following, Block) and following.keyword.text not in _SAFE_KEYWORDS:
        return ","
    return ""
