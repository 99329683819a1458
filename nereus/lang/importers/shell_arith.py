"""``$(( ... ))``: integer arithmetic of bash, evaluated on text. Names resolve through a callback."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!?:&|^~])")
#: Binary operators from loosest to tightest.
_LEVELS = tuple(
    tuple(row.split()) for row in ("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %")
)
_MAX = 2**63
_MAX_TOKENS = 400


class ArithmeticFault(ValueError):
    """Not an integer expression, or one that bash would refuse (division by zero)."""


def evaluate(text: str, lookup: Callable[[str], int]) -> int:
    """Value of ``text``; ``lookup`` gives a name's value or raises ``ArithmeticFault``."""
    tokens = _tokens(text)
    if not tokens:
        return 0
    value, at = _ternary(tokens, 0, lookup)
    if at != len(tokens):
        raise ArithmeticFault(f"`{tokens[at]}` is not understood in the arithmetic `{text.strip()}`")
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    pos = 0
    text = text.rstrip()
    while pos < len(text):
        found = _TOKEN.match(text, pos)
        if not found or len(tokens) >= _MAX_TOKENS or len(found[1]) > 40:
            raise ArithmeticFault(f"`{text.strip()[:60]}` is not an integer expression")
        tokens.append(found[1])
        pos = found.end()
    return tokens


def _ternary(tokens: list[str], at: int, lookup: Callable[[str], int]) -> tuple[int, int]:
    value, at = _binary(tokens, at, 0, lookup)
    if at < len(tokens) and tokens[at] == "?":
        then, at = _ternary(tokens, at + 1, lookup)
        if at >= len(tokens) or tokens[at] != ":":
            raise ArithmeticFault("`:` is missing behind `?`")
        other, at = _ternary(tokens, at + 1, lookup)
        value = then if value else other
    return value, at


def _binary(tokens: list[str], at: int, level: int, lookup: Callable[[str], int]) -> tuple[int, int]:
    if level == len(_LEVELS):
        return _power(tokens, at, lookup)
    value, at = _binary(tokens, at, level + 1, lookup)
    while at < len(tokens) and tokens[at] in _LEVELS[level]:
        op = tokens[at]
        right, at = _binary(tokens, at + 1, level + 1, lookup)
        value = _apply(op, value, right)
    return value, at


def _power(tokens: list[str], at: int, lookup: Callable[[str], int]) -> tuple[int, int]:
    value, at = _unary(tokens, at, lookup)
    if at < len(tokens) and tokens[at] == "**":
        exponent, at = _power(tokens, at + 1, lookup)
        if not 0 <= exponent <= 63:
            raise ArithmeticFault(f"exponent {exponent} is out of range")
        value = _bounded(value**exponent)
    return value, at


def _unary(tokens: list[str], at: int, lookup: Callable[[str], int]) -> tuple[int, int]:
    if at >= len(tokens):
        raise ArithmeticFault("the arithmetic ends too early")
    token = tokens[at]
    if token in ("-", "+", "!", "~"):
        value, at = _unary(tokens, at + 1, lookup)
        return {"-": -value, "+": value, "!": int(not value), "~": ~value}[token], at
    if token == "(":
        value, at = _ternary(tokens, at + 1, lookup)
        if at >= len(tokens) or tokens[at] != ")":
            raise ArithmeticFault("`)` is missing in the arithmetic")
        return value, at + 1
    if token[0].isdigit():
        # A leading zero is octal in bash; digits that are not octal are an error there.
        try:
            base = 16 if token[:2].lower() == "0x" else 8 if token[0] == "0" and len(token) > 1 else 10
            return _bounded(int(token, base)), at + 1
        except ValueError:
            raise ArithmeticFault(f"`{token}` is not a number") from None
    if token[0].isalpha() or token[0] == "_":
        return lookup(token), at + 1
    raise ArithmeticFault(f"`{token}` is out of place in the arithmetic")


def _apply(op: str, left: int, right: int) -> int:
    match op:
        case "+":
            return _bounded(left + right)
        case "-":
            return _bounded(left - right)
        case "*":
            return _bounded(left * right)
        case "/" | "%":
            if right == 0:
                raise ArithmeticFault("division by zero")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if op == "/" else left - quotient * right
        case "<<" | ">>":
            if not 0 <= right <= 63:
                raise ArithmeticFault(f"shift by {right} is out of range")
            return _bounded(left << right if op == "<<" else left >> right)
        case "&" | "|" | "^":
            return {"&": left & right, "|": left | right, "^": left ^ right}[op]
        case "&&" | "||":
            return int(bool(left) and bool(right)) if op == "&&" else int(bool(left) or bool(right))
        case _:
            return int({"==": left == right, "!=": left != right, "<": left < right,
                        "<=": left <= right, ">": left > right, ">=": left >= right}[op])  # fmt: skip


def _bounded(value: int) -> int:
    if abs(value) > _MAX:
        raise ArithmeticFault("the number does not fit into 64 bits")
    return value
