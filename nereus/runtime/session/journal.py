"""A process's own diary of the changes it took part in: one line each, on disk before anything depends on it.

    {"at": 1790000000.1, "epoch": 4, "event": "voted", ...}

Read after a crash it tells which plan the process served and how far a change had come. A line that was cut off by the
crash is the last one, and is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

#: In the order in which a change goes through them; ``committed`` and ``aborted`` end it.
EVENTS = (
    "begun",
    "quiesced",
    "prepared",
    "moved",
    "voted",
    "committed",
    "aborted",
    "undecided",
    "released",
    "lost",
    "left",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    at: float  # seconds since 1970
    epoch: int
    event: str
    more: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Appends to ``path`` (made with its folders). None: nothing is kept."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._file: int | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _end_line(path, self._file)

    def write(self, epoch: int, event: str, **more: Any) -> None:
        assert event in EVENTS, event
        if self._file is None:
            return
        line = json.dumps({"at": time.time(), "epoch": epoch, "event": event, **more})
        os.write(self._file, line.encode() + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _end_line(path: str | os.PathLike[str], file: int) -> None:
    """After a crash in the middle of a line the next one begins anew."""
    with open(path, "rb") as reader:
        reader.seek(0, os.SEEK_END)
        if reader.tell() and (reader.seek(-1, os.SEEK_END), reader.read(1))[1] != b"\n":
            os.write(file, b"\n")


def read_journal(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """Whole lines of the file, in order."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                said = json.loads(line)
                yield Entry(at=said.pop("at"), epoch=said.pop("epoch"), event=said.pop("event"), more=said)
            except (ValueError, KeyError, AttributeError):
                continue
