"""What a launch script would run: variables, arrays, arithmetic and decidable ``if``s followed, nothing executed.

The script is read as if started with no arguments and an empty environment: ``${X:-8}`` is 8, and a name that it never
sets stays in the text as ``$X`` with a ``Missing`` that says why. Where a condition depends on files or on the output
of commands no branch is believed: what its branches assign becomes unknown, and its commands are marked conditional.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nereus.lang.importers import shell_tree as syntax
from nereus.lang.importers.shell_arith import ArithmeticFault, evaluate
from nereus.lang.importers.shell_syntax import Parser
from nereus.lang.importers.shell_tree import Word
from nereus.lang.importers.shell_values import Field, Missing, as_empty, compare, merge, modify
from nereus.lang.importers.shell_words import ShellError

MAX_STEPS = 20_000  # commands followed; functions that call each other would never end otherwise
MAX_TEXT = 40_000  # characters of one value
MAX_FIELDS = 20_000  # words of one command or array

__all__ = ["Command", "Field", "Missing", "Script", "ShellError", "read_script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    fields: tuple[Field, ...]
    start: int
    end: int
    #: (start, end) of the undecidable condition it stands under.
    conditional: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    commands: tuple[Command, ...]
    #: Files that the script sources and that are therefore not seen.
    sourced: tuple[Field, ...]
    #: Last value of every plain variable.
    variables: dict[str, Field]


def read_script(text: str) -> Script:
    """Raises ``ShellError`` if ``text`` cannot be read as shell at all."""
    reader = _Reader()
    reader.run(Parser(text).parse())
    plain = {name: value for name, value in reader.variables.items() if isinstance(value, Field)}
    return Script(commands=tuple(reader.commands), sourced=tuple(reader.sourced), variables=plain)


_Value = Field | tuple[Field, ...]


@dataclass(slots=True)
class _Reader:
    variables: dict[str, _Value] = field(default_factory=dict)
    functions: dict[str, tuple[syntax.Node, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    sourced: list[Field] = field(default_factory=list)
    conditional: tuple[int, int] | None = None
    pinned: tuple[int, int] | None = None  # inside `bash -c "..."`: where the string stands
    active: list[str] = field(default_factory=list)  # functions being followed; recursion is not
    depth: int = 0
    steps: int = 0

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, nodes: Sequence[syntax.Node]) -> None:
        for node in nodes:
            self.steps += 1
            if self.steps > MAX_STEPS:
                return
            self._node(node)

    def _node(self, node: syntax.Node) -> None:
        match node:
            case syntax.Simple():
                self._simple(node)
            case syntax.AndOr():
                self._and_or(node)
            case syntax.If():
                self._if(node)
            case syntax.Case():
                self._case(node)
            case syntax.Loop():
                why = f"changes in the loop of line {{line:{node.start}}}, which is not followed"
                if node.variable:
                    self.variables[node.variable] = self._unknown(node.variable, why, node.start, node.end)
                self._undecided((node.body,), why, node.start, node.end)
            case syntax.Function():
                self.functions[node.name] = node.body
            case syntax.Group(subshell=True):
                saved = dict(self.variables)
                self.run(node.body)
                self.variables = saved
            case syntax.Group():
                self.run(node.body)
            case syntax.Test():
                pass

    def _simple(self, node: syntax.Simple) -> None:
        first = node.words[0].bare if node.words else None
        if not node.words or first in ("export", "declare", "local", "readonly", "typeset"):
            for assign in node.assigns:
                self._assign(assign)
            return
        fields = self._fields(node.words)  # before the assignments, which are for the command alone
        if not node.assigns:
            self._dispatch(node, fields)
            return
        saved = dict(self.variables)
        for assign in node.assigns:
            self._assign(assign)
        self._dispatch(node, fields)
        self.variables = saved

    def _dispatch(self, node: syntax.Simple, fields: list[Field]) -> None:
        if not fields:
            return
        name, rest = fields[0].text, fields[1:]
        if name in ("source", "."):
            self.sourced.extend(rest[:1])
        elif name == "unset":
            for item in rest:
                self.variables.pop(item.text, None)
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for item in rest:
                if item.text.isidentifier():
                    why = f"is read at run time by `{name}`"
                    self.variables[item.text] = self._unknown(item.text, why, node.start, node.end)
        elif name in self.functions:
            if name not in self.active and len(self.active) < 20:
                self.active.append(name)
                self.run(self.functions[name])
                self.active.pop()
        elif name == "eval" or (name in ("bash", "sh", "zsh") and any(_is_command_flag(f.text) for f in rest)):
            self._nested(fields, rest if name == "eval" else rest[-1:])
        else:
            if len(fields) > MAX_FIELDS:
                fields = fields[:MAX_FIELDS]
            self.commands.append(
                Command(fields=tuple(fields), start=node.start, end=node.end, conditional=self.conditional)
            )

    def _nested(self, fields: list[Field], scripts: list[Field]) -> None:
        """``eval ...`` and ``bash -c '...'``: the string is a script of its own."""
        text = " ".join(f.text for f in scripts)
        if self.depth >= 5 or not scripts:
            return
        try:
            nodes = Parser(text).parse()
        except ShellError:
            return
        outer = self.pinned
        self.pinned = outer or (scripts[0].start, scripts[-1].end)
        self.depth += 1
        mark = len(self.commands)
        self.run(nodes)
        start, end = self.pinned
        kept = tuple(m for f in fields for m in f.missing)
        for i in range(mark, len(self.commands)):
            command = self.commands[i]
            placed = []
            for item in command.fields:
                missing = merge(item.missing, tuple(m for m in kept if f"${m.name}" in item.text))
                placed.append(replace(item, start=start, end=end, missing=missing))
            self.commands[i] = replace(command, fields=tuple(placed), start=start, end=end)
        self.depth -= 1
        self.pinned = outer

    def _assign(self, assign: syntax.Assign) -> None:
        old = self.variables.get(assign.name)
        new: _Value
        if "[" in assign.name:
            base = assign.name.partition("[")[0]
            why = "is filled element by element, which is not followed"
            self.variables[base] = self._unknown(base, why, assign.start, assign.end)
            return
        if isinstance(assign.value, tuple):
            items = tuple(self._fields(assign.value))[:MAX_FIELDS]
            before = old if isinstance(old, tuple) else (old,) if old is not None else ()
            new = (before + items)[:MAX_FIELDS] if assign.append else items
        else:
            value = self._single(assign.value)
            new = replace(value, start=assign.value.start, end=max(assign.value.end, assign.value.start))
            if assign.append and isinstance(old, tuple):
                new = (*old, new)[:MAX_FIELDS]
            elif assign.append and isinstance(old, Field):
                new = self._clip(replace(new, text=old.text + new.text, missing=merge(old.missing, new.missing)))
        self.variables[assign.name] = new

    def _and_or(self, node: syntax.AndOr) -> None:
        status = self._status(node.first)
        if status is None or not isinstance(node.first, syntax.Test):
            self._node(node.first)
        for op, command in node.rest:
            if status is None:
                start, end = _extent(node.first)
                self._undecided(((command,),), f"depends on the condition in line {{line:{start}}}", start, end)
            elif status == (op == "&&"):
                status = self._status(command)
                self._node(command)

    def _if(self, node: syntax.If) -> None:
        for i, (condition, body) in enumerate(node.branches):
            status = self._condition(condition)
            if status is None:
                start, end = _extent(condition[0]) if condition else (node.start, node.end)
                bodies = [b for _, b in node.branches[i:]] + [node.otherwise]
                why = f"is set under the condition of line {{line:{start}}}, which only a run decides"
                self._undecided(bodies, why, start, end)
                return
            if status:
                self.run(body)
                return
        self.run(node.otherwise)

    def _case(self, node: syntax.Case) -> None:
        subject = self._single(node.word)
        bodies = [body for _, body in node.arms]
        if any(not m.unset for m in subject.missing):
            why = f"is set in the `case` of line {{line:{node.start}}}, which only a run decides"
            self._undecided(bodies, why, node.start, node.end)
            return
        text = as_empty(subject)
        for patterns, body in node.arms:
            if any(fnmatch.fnmatchcase(text, as_empty(self._single(p))) for p in patterns):
                self.run(body)
                return

    def _undecided(self, bodies: Sequence[Sequence[syntax.Node]], why: str, start: int, end: int) -> None:
        before = dict(self.variables)
        outer = self.conditional
        self.conditional = outer or (start, end)
        changed: set[str] = set()
        for body in bodies:
            self.variables = dict(before)
            self.run(body)
            changed |= {n for n, v in self.variables.items() if before.get(n) != v}
            changed |= before.keys() - self.variables.keys()
        self.variables = before
        self.conditional = outer
        for name in sorted(changed):
            self.variables[name] = self._unknown(name, why, start, end)

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _condition(self, nodes: Sequence[syntax.Node]) -> bool | None:
        self.run(nodes[:-1])
        return self._status(nodes[-1]) if nodes else None

    def _status(self, node: syntax.Node) -> bool | None:
        """Whether a command succeeds; None where that depends on more than the script."""
        match node:
            case syntax.Test():
                return self._test(node.words, double=True)
            case syntax.AndOr():
                status = self._status(node.first)
                for op, command in node.rest:
                    if status is None:
                        return None
                    if status == (op == "&&"):
                        status = self._status(command)
                return status
            case syntax.Simple(words=()):
                return True
            case syntax.Simple():
                name = node.words[0].bare
                if name == "[":
                    return self._test(node.words[1:-1], double=False)
                if name == "test":
                    return self._test(node.words[1:], double=False)
                # Anything that runs a program is assumed to succeed in `a && b`; as an `if` condition it is unknown.
                return {"true": True, ":": True, "false": False}.get(name or "")
            case _:
                return None

    def _test(self, words: Sequence[Word], *, double: bool) -> bool | None:
        values = [self._single(w) for w in words]
        bare = [w.bare for w in words]
        for splitter, whole in (("||", any), ("&&", all)):
            if double and splitter in bare:
                at = bare.index(splitter)
                sides = [self._test(words[:at], double=True), self._test(words[at + 1 :], double=True)]
                decided = whole(bool(s) for s in sides)
                if None in sides:
                    return decided if decided == (splitter == "||") else None
                return decided
        if values and bare[0] == "!":
            inner = self._test(words[1:], double=double)
            return None if inner is None else not inner
        if any(not m.unset for v in values for m in v.missing):
            return None
        texts = [as_empty(v) for v in values]
        if len(texts) == 1:
            return bool(texts[0])
        if len(texts) == 2 and texts[0] in ("-z", "-n", "-v"):
            return (texts[1] == "") == (texts[0] == "-z") if texts[0] != "-v" else texts[1] in self.variables
        if len(texts) == 3:
            return compare(texts[0], texts[1], texts[2], pattern=double)
        return None

    # -- expansion -----------------------------------------------------------------------------------------------------

    def _fields(self, words: Sequence[Word]) -> list[Field]:
        fields: list[Field] = []
        for word in words:
            if len(fields) > MAX_FIELDS:
                break
            fields.extend(self._split(word))
        return fields

    def _split(self, word: Word) -> list[Field]:
        """A word as arguments: unquoted expansions are cut at blanks, ``"${A[@]}"`` gives one argument per element."""
        done: list[Field] = []
        current: Field | None = None

        def add(piece: Field) -> None:
            nonlocal current
            if current is None:
                current = replace(piece, start=word.start, end=word.end)
            else:
                current = self._clip(
                    replace(current, text=current.text + piece.text, missing=merge(current.missing, piece.missing))
                )

        for part in word.parts:
            if isinstance(part, syntax.Parameter) and part.name in ("@", "*"):
                continue  # the script is read as if started without arguments
            if isinstance(part, syntax.Parameter) and part.index in ("@", "*") and not part.op:
                items = self.variables.get(part.name)
                items = items if isinstance(items, tuple) else () if items is None else (items,)
                if current is None:
                    done.extend(items)
                else:
                    for item in items:
                        add(item)
                continue
            piece = self._part(part)
            quoted = part.quoted if isinstance(part, syntax.Literal | syntax.Parameter) else True
            if isinstance(part, syntax.Literal) or quoted or not any(c in piece.text for c in " \t\n"):
                if piece.text or piece.missing or quoted:
                    add(piece)
                continue
            home = piece if piece.start or piece.end else word
            chunks = piece.text.split()
            if piece.text[0] in " \t\n" and current is not None:
                done.append(current)
                current = None
            for i, chunk in enumerate(chunks):
                missing = tuple(m for m in piece.missing if m.name in chunk)
                add(Field(text=chunk, missing=missing, start=home.start, end=home.end))
                assert current is not None
                if len(word.parts) == 1:
                    current = replace(current, start=home.start, end=home.end)
                if i < len(chunks) - 1 or piece.text[-1] in " \t\n":
                    done.append(current)
                    current = None
        if current is not None:
            done.append(current)
        return done

    def _single(self, word: Word) -> Field:
        """A word as one value, without cutting (assignments, conditions, defaults)."""
        text: list[str] = []
        missing: tuple[Missing, ...] = ()
        for part in word.parts:
            piece = self._part(part)
            text.append(piece.text)
            missing = merge(missing, piece.missing)
        return self._clip(Field(text="".join(text), missing=missing, start=word.start, end=word.end))

    def _part(self, part: syntax.Part) -> Field:
        match part:
            case syntax.Literal():
                return Field(text=part.text, start=0, end=0)
            case syntax.Substitution():
                return self._unknown("(...)", "is the output of a command, known only in a run", part.start, part.end)
            case syntax.Arithmetic():
                return self._arithmetic(part)
            case syntax.Parameter():
                self.depth += 1
                try:
                    return self._parameter(part)
                finally:
                    self.depth -= 1

    def _parameter(self, part: syntax.Parameter) -> Field:
        name, op = part.name, part.op
        if name == "#" and not op:
            return Field(text="0", start=part.start, end=part.end)
        if op == "bad" or (part.index is not None and part.index not in ("@", "*", "0")):
            return self._unknown(name, "is expanded in a way that is not followed", part.start, part.end)
        stored = self.variables.get(name)
        if isinstance(stored, tuple):
            chosen = stored if part.index in ("@", "*") else stored[:1]
            missing = tuple(m for f in chosen for m in f.missing)[:5]
            stored = self._clip(
                Field(text=" ".join(f.text for f in chosen), missing=missing, start=part.start, end=part.end)
            )
        unset = stored is None or (not stored.text and not stored.missing)
        if op in (":-", ":=", "-", "="):
            use_default = unset if op[0] == ":" else stored is None
            value = self._single(part.arg) if use_default and part.arg is not None else stored
            value = value or Field(text="", start=part.start, end=part.end)
            if op in (":=", "=") and use_default:
                self.variables[name] = value
            return value
        if op in (":+", "+"):
            empty = Field(text="", start=part.start, end=part.end)
            return empty if unset or part.arg is None else self._single(part.arg)
        if stored is None:
            why = "is not set before it is used" if name not in "0123456789" else "is an argument of the script"
            return self._unknown(name, why, part.start, part.end, unset=True)
        if not op or op in (":?", "?"):
            return stored
        if op == "length":
            return Field(text=str(len(stored.text)), missing=stored.missing, start=part.start, end=part.end)
        changed = modify(op, stored.text, self._single(part.arg).text if part.arg is not None else "")
        if changed is None:
            return self._unknown(name, "is expanded in a way that is not followed", part.start, part.end)
        return self._clip(replace(stored, text=changed))

    def _arithmetic(self, part: syntax.Arithmetic) -> Field:
        inner = self._single(part.expression)
        missing = list(inner.missing)

        def lookup(name: str, depth: int = 0) -> int:
            stored = self.variables.get(name)
            if stored is None:
                missing.append(
                    Missing(name=name, why="is not set before it is used", start=part.start, end=part.end, unset=True)
                )
                return 0
            value = stored if isinstance(stored, Field) else stored[0] if stored else Field(text="0", start=0, end=0)
            missing.extend(value.missing)
            if value.missing:
                return 0
            if depth > 10:
                raise ArithmeticFault(f"`{name}` refers to itself")
            return evaluate(value.text, lambda inner_name: lookup(inner_name, depth + 1))

        try:
            number = 0 if inner.missing else evaluate(inner.text, lookup)
        except ArithmeticFault as fault:
            if missing:  # the fault may be that of the 0 that stands in for them
                return Field(
                    text="$((" + ",".join(m.name for m in missing) + "))",
                    missing=merge((), tuple(missing)),
                    start=part.start,
                    end=part.end,
                )
            return self._unknown(f"(({inner.text}))", f"does not evaluate: {fault}", part.start, part.end)
        if missing:
            kept = merge((), tuple(missing))
            return Field(text=f"$(({''.join(inner.text.split())}))", missing=kept, start=part.start, end=part.end)
        return Field(text=str(number), start=part.start, end=part.end)

    def _unknown(self, name: str, why: str, start: int, end: int, *, unset: bool = False) -> Field:
        if self.pinned is not None:
            start, end = self.pinned
        name = "".join(name.split())[:200]  # no blanks, so that word splitting keeps it whole
        gap = Missing(name=name, why=why, start=start, end=end, unset=unset)
        return Field(text=f"${name}", missing=(gap,), start=start, end=end)

    def _clip(self, value: Field) -> Field:
        if len(value.text) <= MAX_TEXT:
            return value
        return self._unknown("(...)", "grows beyond any launch script's size", value.start, value.end)


def _is_command_flag(text: str) -> bool:
    """``-c``, ``-lc``: the next argument is a script."""
    return text.startswith("-") and not text.startswith("--") and text.endswith("c")


def _extent(node: syntax.Node) -> tuple[int, int]:
    match node:
        case syntax.AndOr():
            return _extent(node.first)
        case syntax.Group():
            return _extent(node.body[0]) if node.body else (0, 0)
        case syntax.Function():
            return 0, 0
        case _:
            return node.start, node.end
