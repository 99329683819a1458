"""Plan text with its comments: what importers write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    text: str  # `tp = 2`
    comment: str = ""


@dataclass(slots=True)
class Block:
    header: str  # `stage actor.train`
    entries: list[Entry] = field(default_factory=list)
    comment: str = ""

    def add(self, key: str, value: object, comment: str = "") -> None:
        self.entries.append(Entry(text=f"{key} = {value}", comment=comment))

    def keys(self) -> dict[str, str]:
        """``key -> value`` of what was added, to compare the layouts of two stages."""
        pairs = (entry.text.partition(" = ") for entry in self.entries)
        return {key: value for key, _, value in pairs}


def write(header: Iterable[str], items: Iterable[Block | Entry | None]) -> str:
    """``None`` is a blank line. Long comments go above their line."""
    lines = [f"# {line}" for line in header]
    for item in items:
        if item is None:
            lines.append("")
        elif isinstance(item, Entry):
            lines.extend(_line(item.text, item.comment, ""))
        elif not item.entries:
            lines.extend(_line(f"{item.header} {{ }}", item.comment, ""))
        elif len(item.entries) <= 3 and not item.comment and not any(e.comment for e in item.entries):
            lines.append(f"{item.header} {{ {'  '.join(e.text for e in item.entries)} }}")
        else:
            lines.extend(_line(f"{item.header} {{", item.comment, ""))
            for entry in item.entries:
                lines.extend(_line(entry.text, entry.comment, "  "))
            lines.append("}")
    return "\n".join(lines) + "\n"


def _line(text: str, comment: str, indent: str) -> list[str]:
    # Text from the input lands in comments: one line, ASCII, whatever it was.
    comment = " ".join(comment.split()).encode("ascii", "replace").decode()
    if not comment:
        return [indent + text]
    if len(indent) + len(text) + len(comment) + 4 <= 118:
        return [f"{indent}{text}  # {comment}"]
    lines: list[str] = []
    current = f"{indent}#"
    for word in comment.split():
        if len(current) + len(word) > 116 and current != f"{indent}#":
            lines.append(current)
            current = f"{indent}#"
        current += f" {word}"
    return [*lines, current, indent + text]
