"""Files: reading one, and following ``extends`` down to the base."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nereus.ir.diagnostic import Label, Source, Span
from nereus.lang.files import read_file
from nereus.lang.parser import MAX_CHARS, parse
from nereus.lang.sink import Sink, show
from nereus.lang.syntax import Extends, File

MAX_CHAIN = 64


class ReadError(Exception):
    """Why a file has no text, as a plain sentence; ``source`` and offsets where there is something to point at."""

    def __init__(self, sentence: str, source: Source | None = None, at: int = 0, code: str = "NRS1001") -> None:
        super().__init__(sentence)
        self.code = code
        self.span = None if source is None else Span(source=source, start=at, end=min(at + 1, len(source.text)))


def read_source(path: str) -> Source:
    """Raises ReadError."""
    try:
        raw = read_file(path, 4 * MAX_CHARS + 1)
    except FileNotFoundError:
        raise ReadError(f"there is no file '{show(path, 200)}'") from None
    except IsADirectoryError:
        raise ReadError(f"'{show(path, 200)}' is a directory, not a file") from None
    except PermissionError:
        raise ReadError(f"'{show(path, 200)}' may not be read") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReadError(f"'{show(path, 200)}' cannot be read: {reason}") from None
    if len(raw) > 4 * MAX_CHARS:
        raise ReadError(f"'{show(path, 200)}' is larger than any plan ({4 * MAX_CHARS:,} bytes)")
    try:
        return Source(path=path, text=raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        good = raw[: error.start].decode("utf-8")
        source = Source(path=path, text=raw.decode("utf-8", errors="replace"))
        sentence = f"byte {raw[error.start]:#04x} at offset {error.start:,} is no UTF-8: a plan is UTF-8 text"
        raise ReadError(sentence, source, len(good), code="NRS1002") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The files of a plan, base first. ``complete`` is False where a base could not be read."""

    files: tuple[File, ...]
    complete: bool


def load_chain(source: Source, base_dir: str | None, sink: Sink) -> Chain:
    """``base_dir``: where a relative ``extends`` of ``source`` starts; by default its own folder."""
    files: list[File] = []
    seen: dict[str, str] = {}
    here: Source | None = source
    folder = base_dir if base_dir is not None else os.path.dirname(source.path)
    came_from: Extends | None = None
    while here is not None:
        real = os.path.realpath(here.path) if "\0" not in here.path else here.path
        if came_from is not None and real in seen:
            where = came_from.path.span
            chain = [show(f.source.path) for f in reversed(files)]
            names = [*chain[chain.index(show(seen[real])) if show(seen[real]) in chain else 0 :], show(here.path)]
            note = " extends ".join(names)
            sink.error("NRS2017", "extends runs in a circle", where, "this file is already part of it", notes=(note,))
            break
        if len(files) >= MAX_CHAIN:
            assert came_from is not None
            sink.error("NRS2017", f"more than {MAX_CHAIN} files extend one another", came_from.path.span)
            break
        seen[real] = here.path
        result = parse(here)
        sink.extend(result.diagnostics)
        files.insert(0, result.file)
        came_from = _base_of(result.file, sink)
        here = None
        if came_from is not None:
            name = came_from.path.value
            path = os.path.normpath(os.path.join(folder, name)) if name else ""
            folder = os.path.dirname(path)
            here = _read_base(path, came_from, sink)
    return Chain(files=tuple(files), complete=came_from is None)


def _base_of(file: File, sink: Sink) -> Extends | None:
    """The file's one ``extends``, which must be its first statement."""
    found = [(i, item) for i, item in enumerate(file.items) if isinstance(item, Extends)]
    for _, item in found[1:]:
        first = found[0][1]
        label = Label(span=first.span, message="the first one")
        headline = "a plan extends one file only"
        sink.error("NRS1013", headline, item.span, "a second base", secondary=(label,))
    if not found:
        return None
    index, item = found[0]
    if index > 0:
        headline = "extends must be the first statement of its file"
        sink.error("NRS1012", headline, item.span, "move this to the top")
    return item


def _read_base(path: str, extends: Extends, sink: Sink) -> Source | None:
    try:
        return read_source(path)
    except ReadError as error:
        if error.span is not None:
            sink.error(error.code, str(error), error.span)
            return None
        note = "the path is relative to the file that says extends"
        sink.error("NRS2016", str(error), extends.path.span, "needed by this file", notes=(note,))
        return None
