"""Syntax tree of a launch script; every node keeps its character offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """``$name`` or ``${name op arg}``; ``index`` is the text in ``[...]``."""

    name: str
    op: str = ""
    arg: Word | None = None
    index: str | None = None
    quoted: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    expression: Word
    quoted: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """``$(command)``: its output exists at run time only."""

    start: int
    end: int


Part: TypeAlias = Literal | Parameter | Arithmetic | Substitution


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    parts: tuple[Part, ...]
    start: int
    end: int

    @property
    def bare(self) -> str | None:
        """Its text if it is one unquoted literal (the only form that can be a keyword)."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Literal) and not self.parts[0].quoted:
            return self.parts[0].text
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    name: str
    value: Word | tuple[Word, ...]  # a tuple for NAME=( ... )
    append: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple:
    assigns: tuple[Assign, ...]
    words: tuple[Word, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """``[[ ... ]]``."""

    words: tuple[Word, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AndOr:
    first: Node
    rest: tuple[tuple[str, Node], ...]  # ("&&" | "||", command)


@dataclass(frozen=True, slots=True, kw_only=True)
class If:
    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]  # (condition, body)
    otherwise: tuple[Node, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    variable: str | None
    body: tuple[Node, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    word: Word
    arms: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    body: tuple[Node, ...]
    subshell: bool


Node: TypeAlias = Simple | Test | AndOr | If | Loop | Case | Function | Group
