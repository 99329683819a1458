"""What can be known of a text without parsing it: comments, and which brackets belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A string hides ``#`` and brackets; an unclosed one ends with its line.
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"?|#[^\n]*|[][(){}]')
_PAIRS = {"}": "{", ")": "(", "]": "["}
CLOSERS = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    comments: tuple[tuple[int, int], ...]
    #: Offsets of brackets that have no partner: still open at the end; passed over by the closing of an outer one.
    unclosed: tuple[int, ...]
    forgotten: tuple[int, ...]
    unopened: tuple[int, ...]
    #: opening offset -> closing offset
    partner: dict[int, int]
    max_depth: int
    #: Where ``max_depth`` is first reached.
    deepest: int


def scan(text: str) -> Scan:
    comments: list[tuple[int, int]] = []
    stack: list[int] = []
    unopened: list[int] = []
    forgotten: list[int] = []
    partner: dict[int, int] = {}
    max_depth = deepest = 0
    for match in _TOKEN.finditer(text):
        token, at = match.group(), match.start()
        if token[0] == "#":
            comments.append((at, at + len(token.rstrip("\r"))))
        elif token in CLOSERS:
            stack.append(at)
            if len(stack) > max_depth:
                max_depth, deepest = len(stack), at
        elif token in _PAIRS:
            # A closing brace may close brackets that were forgotten inside it.
            fits = next((i for i in range(len(stack) - 1, -1, -1) if text[stack[i]] == _PAIRS[token]), None)
            if fits is None or (token != "}" and fits != len(stack) - 1):
                unopened.append(at)
                continue
            forgotten.extend(stack[fits + 1 :])
            partner[stack[fits]] = at
            del stack[fits:]
    return Scan(
        comments=tuple(comments),
        unclosed=tuple(stack),
        forgotten=tuple(sorted(forgotten)),
        unopened=tuple(unopened),
        partner=partner,
        max_depth=max_depth,
        deepest=deepest,
    )


def without_comments(text: str, comments: tuple[tuple[int, int], ...]) -> str:
    """The text with comments blanked out, so that all offsets stay."""
    pieces, last = [], 0
    for start, end in comments:
        pieces += [text[last:start], " " * (end - start)]
        last = end
    return "".join([*pieces, text[last:]])
