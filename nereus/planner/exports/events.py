"""Scalars of TensorBoard's event files, read without TensorBoard.

A file is a row of records: length (8 bytes), its checksum (4), the record, its checksum (4). A record is an ``Event``
message: ``step`` = 2, ``summary`` = 5; a summary has ``value`` = 1, each with ``tag`` = 1 and ``simple_value`` = 2 or
``tensor`` = 8 (``dtype`` = 1, ``tensor_content`` = 4, ``float_val`` = 5, ``double_val`` = 6). Checksums are not
compared; a file that is still written ends in the middle of a record, which is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from nereus.planner.exports.tables import NotRead, Steps, number_of

_LENGTH, _CRC = 8, 4
#: No record of scalars is larger.
_LONGEST = 1 << 28
_FLOAT, _DOUBLE = 1, 2


def event_files(path: Path) -> list[Path]:
    """``path`` itself, or all below it, oldest first (their names have the time)."""
    return sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]


def read_events(data: bytes) -> Steps:
    """Raises NotRead where the first record is none."""
    found: Steps = {}
    for record in _records(data):
        step, values = _event(record)
        if values:
            found.setdefault(step, {}).update(values)
    return found


def _records(data: bytes) -> Iterator[memoryview]:
    view, at = memoryview(data), 0
    while at + _LENGTH + _CRC <= len(view):
        (length,) = struct.unpack_from("<Q", view, at)
        if length > _LONGEST:
            raise NotRead("it is no event file, or a damaged one")
        begin = at + _LENGTH + _CRC
        if begin + length + _CRC > len(view):
            return
        yield view[begin : begin + length]
        at = begin + length + _CRC


def _event(record: memoryview) -> tuple[int, dict[str, float]]:
    step, values = 0, {}
    for field, value in _fields(record):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, memoryview):
            for inner, summary in _fields(value):
                if inner == 1 and isinstance(summary, memoryview):
                    tag, number = _value(summary)
                    if number_of(number) is not None and number is not None:
                        values[tag] = number
    return step, values


def _value(message: memoryview) -> tuple[str, float | None]:
    tag, number = "", None
    for field, value in _fields(message):
        if isinstance(value, int):
            continue
        if field == 1:
            tag = bytes(value).decode("utf-8", "replace")
        elif field == 2:
            number = _number("<f", bytes(value))
        elif field == 8:
            number = _tensor(value)
    return tag, number


def _tensor(message: memoryview) -> float | None:
    """Of one number."""
    kind, content = _FLOAT, b""
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, memoryview):
            content, kind = bytes(value), {5: _FLOAT, 6: _DOUBLE}.get(field, kind)
    format = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    return _number(format, content) if format is not None else None


def _number(format: str, content: bytes) -> float | None:
    return float(struct.unpack(format, content)[0]) if len(content) == struct.calcsize(format) else None


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, varint or bytes) of every field. Raises NotRead."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise NotRead("it is no event file, or a damaged one")
        if at + length > len(message):
            raise NotRead("it is no event file, or a damaged one")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotRead("it is no event file, or a damaged one")
