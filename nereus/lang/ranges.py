"""Bracket ranges: ``n[0-2,5]`` -> names, and lists of devices -> a short text that names them in the same order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from nereus.ir.cluster import Device

#: Names that one word may stand for.
MAX_NAMES = 65_536

_PART = re.compile(r"\[([^\[\]]*)\]")
_ITEM = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


class RangeError(ValueError):
    """A range that cannot be read; the message is a plain sentence without the word it stands in."""


def indices(text: str) -> tuple[str, ...]:
    """``'0-2,5' -> ('0', '1', '2', '5')``; leading zeros keep their width. Raises RangeError."""
    found: list[str] = []
    for part in text.split(","):
        match = _ITEM.fullmatch(part)
        if match is None:
            raise RangeError(f"'[{text}]' is no list of numbers and ranges such as [0-3] or [0,2]")
        first, last = match[1], match[2] if match[2] is not None else match[1]
        if int(last) < int(first):
            raise RangeError(f"range {first}-{last} runs backwards")
        if len(found) + int(last) - int(first) >= MAX_NAMES:
            raise RangeError(f"'[{text}]' stands for more than {MAX_NAMES:,} names")
        width = len(first) if first.startswith("0") else 0
        found.extend(str(i).zfill(width) for i in range(int(first), int(last) + 1))
    return tuple(found)


def expand(word: str) -> tuple[str, ...]:
    """``'n[0-1]' -> ('n0', 'n1')``; several brackets multiply, the last one fastest. Raises RangeError."""
    if "[" not in word:
        return (word,)
    pieces = _PART.split(word)  # plain, inside, plain, inside, ..., plain
    lists = [indices(piece) if i % 2 else (piece,) for i, piece in enumerate(pieces)]
    total = 1
    for items in lists:
        total *= len(items)
    if total > MAX_NAMES:
        raise RangeError(f"'{word}' stands for more than {MAX_NAMES:,} names")
    return tuple("".join(parts) for parts in product(*lists))


def compress_names(names: Sequence[str]) -> list[str]:
    """Neighbours that count up become one range: ``('n0', 'n1', 'n3') -> ['n[0-1]', 'n3']``. Order is kept."""
    out: list[str] = []
    i = 0
    while i < len(names):
        head, number = _split(names[i])
        j = i + 1
        if number is not None:
            while j < len(names) and _split(names[j]) == (head, number + j - i):
                j += 1
        out.append(names[i] if j == i + 1 else f"{head}[{number}-{_split(names[j - 1])[1]}]")
        i = j
    return out


def compress_indices(numbers: Sequence[int]) -> str:
    """``(0, 1, 2, 5, 4) -> '0-2,5,4'``."""
    parts: list[str] = []
    i = 0
    while i < len(numbers):
        j = i + 1
        while j < len(numbers) and numbers[j] == numbers[i] + j - i:
            j += 1
        parts.append(str(numbers[i]) if j == i + 1 else f"{numbers[i]}-{numbers[j - 1]}")
        i = j
    return ",".join(parts)


def compress_devices(devices: Iterable[Device], num_gpus: dict[str, int]) -> list[str]:
    """Words that name ``devices`` in their order; nodes named whole (``num_gpus`` says when) lose their ``.gpu``."""
    runs: list[tuple[str, list[int]]] = []
    for device in devices:
        if runs and runs[-1][0] == device.node:
            runs[-1][1].append(device.index)
        else:
            runs.append((device.node, [device.index]))
    # Nodes with the same GPUs one after another share a word.
    out: list[str] = []
    i = 0
    while i < len(runs):
        node, gpus = runs[i]
        j = i + 1
        while j < len(runs) and runs[j][1] == gpus:
            j += 1
        text = compress_indices(gpus)
        whole = gpus == list(range(num_gpus.get(node, -1))) and all(
            num_gpus.get(name) == len(gpus) for name, _ in runs[i:j]
        )
        suffix = "" if whole else f".gpu{text}" if len(gpus) == 1 else f".gpu[{text}]"
        out.extend(name + suffix for name in compress_names([name for name, _ in runs[i:j]]))
        i = j
    return out


def _split(name: str) -> tuple[str, int | None]:
    """A name and the number it ends in, where writing that number back gives the same name."""
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    if not tail or len(tail) > 9 or (len(tail) > 1 and tail[0] == "0") or not head:
        return name, None
    return head, int(tail)
