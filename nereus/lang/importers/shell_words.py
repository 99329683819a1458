"""Words of a launch script: quotes, ``$`` expansions and continuations, kept as parts."""

from __future__ import annotations

import re

from nereus.lang.importers.shell_tree import Arithmetic, Literal, Parameter, Part, Substitution, Word

MAX_DEPTH = 40  # nesting of groups, expansions and quotes; deeper input is hostile, not a launch script


class ShellError(ValueError):
    """The text is no shell script; ``start``/``end`` are character offsets of the offender."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


BLANK = " \t\r"
META = " \t\r\n;&|()<>"
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_BRACED = re.compile(r"(#|!)?([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?")
_OPERATORS = (":-", ":=", ":+", ":?", "##", "%%", "//", ",,", "^^", *"-=+?#%/,^:@")


class WordReader:
    """Reads words from a position on. Raises ``ShellError`` for what never closes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.depth = 0

    def _word(self) -> Word | None:
        """The word at the position, or None at a metacharacter."""
        start = self.pos
        parts = self._parts(META, quoted=False)
        if self.pos == start:
            return None
        return Word(parts=tuple(parts), start=start, end=self.pos)

    def _parts(self, stop: str, *, quoted: bool) -> list[Part]:
        """Parts up to an unquoted character of ``stop`` (not consumed) or the end."""
        self._enter()
        text = self.text
        parts: list[Part] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                parts.append(Literal(text="".join(plain), quoted=quoted))
                plain.clear()

        while self.pos < len(text) and text[self.pos] not in stop:
            char = text[self.pos]
            if char == "\\":
                following = text[self.pos + 1 : self.pos + 2]
                if following == "\n":
                    self.pos += 2
                elif text.startswith("\r\n", self.pos + 1):
                    self.pos += 3
                elif quoted and following not in ('"', "$", "`", "\\"):
                    plain.append(char)
                    self.pos += 1
                else:
                    flush()
                    parts.append(Literal(text=following, quoted=True))
                    self.pos += 1 + len(following)
            elif char == "'" and not quoted:
                flush()
                end = text.find("'", self.pos + 1)
                if end < 0:
                    raise ShellError("this quote is never closed", self.pos, self.pos + 1)
                parts.append(Literal(text=text[self.pos + 1 : end], quoted=True))
                self.pos = end + 1
            elif char == '"' and not quoted:
                flush()
                opened = self.pos
                self.pos += 1
                inner = self._parts('"', quoted=True)
                if self.pos >= len(text):
                    raise ShellError("this quote is never closed", opened, opened + 1)
                self.pos += 1
                parts.extend(inner or [Literal(text="", quoted=True)])
            elif char == "`":
                flush()
                end = text.find("`", self.pos + 1)
                if end < 0:
                    raise ShellError("this backquote is never closed", self.pos, self.pos + 1)
                parts.append(Substitution(start=self.pos, end=end + 1))
                self.pos = end + 1
            elif char == "$":
                part = self._dollar(quoted)
                if part is None:
                    plain.append(char)
                    self.pos += 1
                else:
                    flush()
                    parts.append(part)
            else:
                plain.append(char)
                self.pos += 1
        flush()
        self.depth -= 1
        return parts

    def _dollar(self, quoted: bool) -> Part | None:
        start = self.pos
        text = self.text
        if text.startswith("$((", start):
            self.pos = self._balanced(start + 3, "))")
            inner = WordReader(text[: self.pos - 2])
            inner.pos, inner.depth = start + 3, self.depth
            expression = Word(parts=tuple(inner._parts("", quoted=True)), start=start + 3, end=self.pos - 2)
            return Arithmetic(expression=expression, quoted=quoted, start=start, end=self.pos)
        if text.startswith("$(", start):
            self.pos = self._balanced(start + 2, ")")
            return Substitution(start=start, end=self.pos)
        if text.startswith("${", start):
            return self._braced(start, quoted)
        if text.startswith("$'", start) and not quoted:
            self.pos += 1
            return None if text.find("'", self.pos + 1) < 0 else Literal(text="", quoted=True)
        found = _NAME.match(text, start + 1)
        if not found:
            return None
        self.pos = found.end()
        return Parameter(name=found[0], quoted=quoted, start=start, end=self.pos)

    def _braced(self, start: int, quoted: bool) -> Parameter:
        text = self.text
        found = _BRACED.match(text, start + 2)
        if not found:
            # `${}` and friends: bash calls it a bad substitution; here its value is simply unknown.
            self.pos = self._balanced(start + 2, "}")
            return Parameter(name=text[start : self.pos], op="bad", quoted=quoted, start=start, end=self.pos)
        prefix, name, index = found[1], found[2], found[3]
        self.pos = found.end()
        if prefix == "#" and text.startswith("}", self.pos):
            self.pos += 1
            return Parameter(name=name, op="length", index=index, quoted=quoted, start=start, end=self.pos)
        if prefix:
            self.pos = self._balanced(start + 2, "}")
            return Parameter(name=name, op="bad", quoted=quoted, start=start, end=self.pos)
        op = next((o for o in _OPERATORS if text.startswith(o, self.pos)), "")
        self.pos += len(op)
        arg_start = self.pos
        parts = self._brace_argument(quoted)
        if self.pos >= len(text):
            raise ShellError("this `${` is never closed", start, start + 2)
        arg = Word(parts=tuple(parts), start=arg_start, end=self.pos)
        self.pos += 1
        return Parameter(name=name, op=op, arg=arg, index=index, quoted=quoted, start=start, end=self.pos)

    def _brace_argument(self, quoted: bool) -> list[Part]:
        """Inside ``${x:-...}`` quotes open again even where the whole stands in double quotes."""
        if not quoted:
            return self._parts("}", quoted=False)
        parts: list[Part] = []
        while self.pos < len(self.text) and self.text[self.pos] != "}":
            if self.text[self.pos] == '"':
                opened = self.pos
                self.pos += 1
                parts.extend(self._parts('"', quoted=True))
                if self.pos >= len(self.text):
                    raise ShellError("this quote is never closed", opened, opened + 1)
                self.pos += 1
            else:
                parts.extend(self._parts('}"', quoted=True))
        return parts

    def _enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ShellError(f"nested more than {MAX_DEPTH} deep", self.pos, min(self.pos + 1, len(self.text)))

    def _balanced(self, start: int, close: str) -> int:
        """Offset behind the ``close`` that ends what was opened before ``start``."""
        text, pos, level = self.text, start, 0
        opener = "{" if close == "}" else "("
        closer = close[0]
        while pos < len(text):
            char = text[pos]
            if char == "\\":
                pos += 2
                continue
            if char in "'\"" and close != "))":
                end = pos + 1
                while end < len(text) and text[end] != char:
                    end += 2 if text[end] == "\\" and char == '"' else 1
                pos = end + 1
                continue
            if char == opener:
                level += 1
            elif char == closer:
                if level == 0:
                    if text.startswith(close, pos):
                        return pos + len(close)
                    if close == ")" or close == "}":
                        return pos + 1
                    break
                level -= 1
            pos += 1
        raise ShellError(f"`{close}` is missing for what opens here", max(0, start - len(close) - 1), start)

    def _skip_blanks(self) -> None:
        """Blanks, continuations and comments; stays before a newline."""
        text = self.text
        while self.pos < len(text):
            if text[self.pos] in BLANK:
                self.pos += 1
            elif text.startswith("\\\n", self.pos):
                self.pos += 2
            elif text.startswith("\\\r\n", self.pos):
                self.pos += 3
            elif text[self.pos] == "#":
                end = text.find("\n", self.pos)
                self.pos = len(text) if end < 0 else end
            else:
                return
