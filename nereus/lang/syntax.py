"""The syntax tree of a plan. Every node has its span; spans take no part in comparison: equal trees, equal text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nereus.ir.diagnostic import Source, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A bare word, ranges included: ``vllm``, ``n[0-1]``, ``n0.gpu[4-7]``, ``actor.train``, ``tp-cp-pp-dp``."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A quoted string; ``value`` is without quotes and escapes."""

    value: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """``text`` is the number as written; None ``value`` marks one that is too large to mean anything."""

    text: str
    value: int | float | None
    unit: Word | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """``8 x "h100-sxm-80gb"``."""

    count: Number
    of: Text | Word
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """``fp32 @host``, or ``fp32 @host(0.5)`` with a share."""

    word: Word
    place: Word
    share: Number | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``hf("config.json")``."""

    name: str
    args: tuple[Value, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """``(17, 15)`` or ``[n0, n1]``; ``bracket`` is the opening one."""

    bracket: str
    items: tuple[Value, ...]
    span: Span = field(compare=False, repr=False)


Value = Word | Text | Number | Repeat | At | Call | Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    items: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``key = value`` with an optional block behind the value: ``mode = async { staleness = 1 }``."""

    key: Word
    value: Value
    body: Body | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``keyword label = value { ... }``; label, value and body may each be missing, but not both of the last two."""

    keyword: Word
    label: Word | None
    value: Value | None
    body: Body | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extends:
    path: Text
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """``remove stage ref.infer``."""

    kind: Word
    name: Word
    span: Span = field(compare=False, repr=False)


Item = Setting | Block | Extends | Removal


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    items: tuple[Item, ...]
    source: Source = field(compare=False, repr=False)
    comments: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    #: Stretches that held syntax errors and were skipped: nobody should complain about what is missing there.
    skipped: tuple[Span, ...] = field(default=(), compare=False, repr=False)


def walk(items: tuple[Item, ...]) -> Iterator[Item]:
    for item in items:
        yield item
        body = item.body if isinstance(item, Setting | Block) else None
        if body is not None:
            yield from walk(body.items)
