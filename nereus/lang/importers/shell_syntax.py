"""Syntax of launch scripts: a tolerant reader for the part of bash that people write them in. Nothing is executed.

Only what cannot be read at all raises (``ShellError``: a quote, ``${`` or ``$((`` that never closes); stray keywords
are skipped.
"""

from __future__ import annotations

import re

from nereus.lang.importers.shell_tree import (
    AndOr,
    Assign,
    Case,
    Function,
    Group,
    If,
    Literal,
    Loop,
    Node,
    Simple,
    Test,
    Word,
)
from nereus.lang.importers.shell_words import META, ShellError, WordReader

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_REDIRECT = re.compile(r"(\d*|&)(<<<|<<-?|>>|<>|>\||>&|<&|>|<)")


class Parser(WordReader):
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._heredocs: list[tuple[str, bool]] = []

    def parse(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while True:
            nodes.extend(self._list(frozenset()))
            if self.pos >= len(self.text):
                return tuple(nodes)
            self.pos += 1  # a stray `)` or `;;`

    # -- commands ------------------------------------------------------------------------------------------------------

    def _list(self, stop: frozenset[str]) -> tuple[Node, ...]:
        """Commands up to a stop word, `)`, `;;` or the end; stray closing words are skipped."""
        self._enter()
        nodes: list[Node] = []
        while True:
            self._skip_separators()
            if self.pos >= len(self.text) or self.text[self.pos] == ")" or self.text.startswith(";;", self.pos):
                break
            keyword = self._peek_bare()
            if keyword in stop:
                break
            if keyword in _CLOSERS:
                self.pos += len(keyword)
                continue
            before = self.pos
            node = self._and_or()
            if node is not None:
                nodes.append(node)
            if self.pos == before:
                self.pos += 1
        self.depth -= 1
        return tuple(nodes)

    def _and_or(self) -> Node | None:
        first = self._command()
        if first is None:
            return None
        rest: list[tuple[str, Node]] = []
        while True:
            self._skip_blanks()
            op = self.text[self.pos : self.pos + 2]
            if op not in ("&&", "||"):
                break
            self.pos += 2
            self._skip_newlines()
            node = self._command()
            if node is None:
                break
            rest.append((op, node))
        return AndOr(first=first, rest=tuple(rest)) if rest else first

    def _command(self) -> Node | None:
        self._enter()
        try:
            self._skip_blanks()
            start = self.pos
            keyword = self._peek_bare()
            if keyword in ("!", "time"):
                self.pos += len(keyword)
                inner = self._command()
                # A negated command decides nothing that we could know; its body is kept for what it assigns.
                return None if inner is None else Group(body=(inner,), subshell=True)
            match keyword:
                case "if":
                    return self._if(start)
                case "for" | "select":
                    return self._for(start)
                case "while" | "until":
                    return self._while(start)
                case "case":
                    return self._case(start)
                case "function":
                    return self._function_keyword()
                case "{":
                    self.pos += 1
                    return Group(body=self._until(frozenset({"}"})), subshell=False)
                case "[[":
                    return self._test(start)
                case _:
                    pass
            if self.text.startswith("((", self.pos):
                end = self._balanced(self.pos + 2, "))")
                self.pos = end
                return None
            if self.text.startswith("(", self.pos):
                self.pos += 1
                body = self._list(frozenset())
                self.pos += self.text.startswith(")", self.pos)
                self._redirections()
                return Group(body=body, subshell=True)
            if (found := _FUNCTION.match(self.text, self.pos)) and found[1] not in _CLOSERS:
                self.pos = found.end()
                return self._function_body(found[1])
            return self._simple(start)
        finally:
            self.depth -= 1

    def _simple(self, start: int) -> Simple | None:
        assigns: list[Assign] = []
        words: list[Word] = []
        declares = False
        end = start
        while True:
            self._skip_blanks()
            if self._redirections():
                continue
            if self.pos >= len(self.text) or self.text[self.pos] in "\n;&|()#":
                break
            found = _ASSIGN.match(self.text, self.pos)
            if found and (not words or declares):
                assigns.append(self._assign(found))
                end = self.pos
                continue
            word = self._word()
            if word is None:
                break
            if not words:
                declares = word.bare in _DECLARE
            words.append(word)
            end = word.end
        if self.text.startswith("|", self.pos) and not self.text.startswith("||", self.pos):
            self.pos += 1 + self.text.startswith("|&", self.pos)
        if not assigns and not words:
            return None
        return Simple(assigns=tuple(assigns), words=tuple(words), start=start, end=end)

    def _assign(self, found: re.Match[str]) -> Assign:
        start = self.pos
        self.pos = found.end()
        name, append = found[1], bool(found[3])
        value: Word | tuple[Word, ...]
        if self.text.startswith("(", self.pos):
            self.pos += 1
            items: list[Word] = []
            while True:
                self._skip_newlines()
                if self.pos >= len(self.text) or self.text[self.pos] == ")":
                    break
                word = self._word()
                if word is None:
                    self.pos += 1
                else:
                    items.append(word)
            if self.pos >= len(self.text):
                raise ShellError("this array is never closed: `)` is missing", start, found.end() + 1)
            self.pos += 1
            value = tuple(items)
        else:
            value = self._word() or Word(parts=(), start=self.pos, end=self.pos)
        if found[2]:  # one element of an array: what the array holds as a whole is not tracked
            name, append = f"{name}{found[2]}", False
        return Assign(name=name, value=value, append=append, start=start, end=self.pos)

    def _until(self, stop: frozenset[str]) -> tuple[Node, ...]:
        """A list and the closing word behind it (or the end of the text)."""
        nodes = list(self._list(stop))
        while self.pos < len(self.text) and self._peek_bare() not in stop:
            self.pos += 1  # stray `)` or `;;`
            nodes.extend(self._list(stop))
        if keyword := self._peek_bare():
            self.pos += len(keyword)
        return tuple(nodes)

    def _if(self, start: int) -> If:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        otherwise: tuple[Node, ...] = ()
        self.pos += 2
        while True:
            condition = self._until(frozenset({"then"}))
            body = self._list(frozenset({"elif", "else", "fi"}))
            branches.append((condition, body))
            keyword = self._peek_bare()
            if keyword not in ("elif", "else", "fi"):
                break
            self.pos += len(keyword)
            if keyword == "else":
                otherwise = self._until(frozenset({"fi"}))
            if keyword != "elif":
                break
        return If(branches=tuple(branches), otherwise=otherwise, start=start, end=self.pos)

    def _for(self, start: int) -> Loop:
        self.pos += len(self._peek_bare() or "")
        self._skip_blanks()
        variable = None
        if self.text.startswith("((", self.pos):
            self.pos = self._balanced(self.pos + 2, "))")
        elif word := self._word():
            variable = word.bare
            while self.pos < len(self.text) and self.text[self.pos] not in "\n;":
                if self._word() is None:
                    self._skip_blanks()
                    if self.pos < len(self.text) and self.text[self.pos] in "&|()<>":
                        self.pos += 1
        self._until(frozenset({"do"}))
        return Loop(variable=variable, body=self._until(frozenset({"done"})), start=start, end=self.pos)

    def _while(self, start: int) -> Loop:
        self.pos += len(self._peek_bare() or "")
        condition = self._until(frozenset({"do"}))
        body = self._until(frozenset({"done"}))
        return Loop(variable=None, body=condition + body, start=start, end=self.pos)

    def _case(self, start: int) -> Case:
        self.pos += 4
        self._skip_blanks()
        word = self._word() or Word(parts=(), start=self.pos, end=self.pos)
        self._skip_newlines()
        if self._peek_bare() == "in":
            self.pos += 2
        arms: list[tuple[tuple[Word, ...], tuple[Node, ...]]] = []
        while True:
            self._skip_separators()
            if self.pos >= len(self.text):
                break
            if self._peek_bare() == "esac":
                self.pos += 4
                break
            patterns: list[Word] = []
            while self.pos < len(self.text) and self.text[self.pos] != ")":
                pattern = self._word()
                if pattern is None:
                    self.pos += 1
                else:
                    patterns.append(pattern)
            self.pos += 1
            body = self._list(frozenset({"esac"}))
            arms.append((tuple(patterns), body))
            while self.text.startswith(";", self.pos) or self.text.startswith("&", self.pos):
                self.pos += 1
        return Case(word=word, arms=tuple(arms), start=start, end=min(self.pos, len(self.text)))

    def _function_keyword(self) -> Node | None:
        self.pos += len("function")
        self._skip_blanks()
        name = self._word()
        self._skip_blanks()
        if self.text.startswith("(", self.pos):
            self.pos += 1
            self._skip_blanks()
            self.pos += self.text.startswith(")", self.pos)
        return self._function_body((name.bare if name else None) or "")

    def _function_body(self, name: str) -> Node:
        self._skip_newlines()
        body = self._command()
        return Function(name=name, body=() if body is None else (body,))

    def _test(self, start: int) -> Test:
        self.pos += 2
        words: list[Word] = []
        while self.pos < len(self.text):
            self._skip_newlines()
            if self.text.startswith("]]", self.pos):
                self.pos += 2
                break
            if self.pos < len(self.text) and self.text[self.pos] in "&|()<>;":
                size = 2 if self.text[self.pos : self.pos + 2] in ("&&", "||") else 1
                literal = Literal(text=self.text[self.pos : self.pos + size], quoted=False)
                words.append(Word(parts=(literal,), start=self.pos, end=self.pos + size))
                self.pos += size
                continue
            word = self._word()
            if word is None:
                break
            words.append(word)
        return Test(words=tuple(words), start=start, end=self.pos)

    # -- separators ----------------------------------------------------------------------------------------------------

    def _peek_bare(self) -> str:
        """The unquoted run of characters at the position: a keyword if anything."""
        pos = self.pos
        while pos < len(self.text) and self.text[pos] not in META and self.text[pos] not in "'\"$`\\":
            pos += 1
        if pos < len(self.text) and self.text[pos] in "'\"$`\\" and not self.text.startswith("\\\n", pos):
            return ""
        return self.text[self.pos : pos]

    def _skip_newlines(self) -> None:
        while True:
            self._skip_blanks()
            if self.pos < len(self.text) and self.text[self.pos] == "\n":
                self.pos += 1
                self._skip_heredocs()
            else:
                return

    def _skip_separators(self) -> None:
        while True:
            self._skip_newlines()
            if (
                self.pos < len(self.text)
                and (
                    self.text[self.pos] == "&"
                    or (self.text[self.pos] == ";" and not self.text.startswith(";;", self.pos))
                )
            ) or (self.pos < len(self.text) and self.text[self.pos] == "|"):
                self.pos += 1
            else:
                return

    def _redirections(self) -> bool:
        """Skips one redirection with its target; remembers here-documents."""
        found = _REDIRECT.match(self.text, self.pos)
        if not found or self.text.startswith(("<(", ">("), found.start(2)):
            if found and found[1] == "" and self.text.startswith(("<(", ">("), self.pos):
                self.pos = self._balanced(self.pos + 2, ")")
                return True
            return False
        self.pos = found.end()
        self._skip_blanks()
        target = self._word()
        if found[2] in ("<<", "<<-") and target is not None:
            delimiter = "".join(p.text for p in target.parts if isinstance(p, Literal))
            self._heredocs.append((delimiter, found[2] == "<<-"))
        return True

    def _skip_heredocs(self) -> None:
        for delimiter, tabs in self._heredocs:
            while self.pos < len(self.text):
                end = self.text.find("\n", self.pos)
                line = self.text[self.pos : len(self.text) if end < 0 else end]
                self.pos = len(self.text) if end < 0 else end + 1
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == delimiter:
                    break
        self._heredocs.clear()
