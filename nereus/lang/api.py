"""The front end's surface. Nothing here raises on bad input: mistakes come back as diagnostics."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nereus.ir.diagnostic import Diagnostic, Source
from nereus.ir.plan import Plan
from nereus.lang.formatter import format_file
from nereus.lang.load import ReadError, load_chain, read_source
from nereus.lang.parser import parse
from nereus.lang.placed import pinned, placed_plan_text
from nereus.lang.resolve import resolve
from nereus.lang.sink import Sink

__all__ = ["FormatResult", "LoadResult", "format_text", "load_plan", "pinned", "placed_plan_text", "resolve_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """``plan`` is None exactly when ``diagnostics`` has an error; ``sources`` are the files read, base first."""

    plan: Plan | None
    diagnostics: tuple[Diagnostic, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatResult:
    """``text`` is None when the input has syntax errors."""

    text: str | None
    diagnostics: tuple[Diagnostic, ...]


def load_plan(path: str) -> LoadResult:
    sink = Sink()
    try:
        source = read_source(path)
    except ReadError as error:
        sink.error(error.code, str(error), error.span)
        return LoadResult(plan=None, diagnostics=sink.diagnostics(), sources=())
    return _load(source, os.path.dirname(path), sink)


def resolve_text(text: str, *, path: str = "<text>", base_dir: str | None = None) -> LoadResult:
    """``base_dir``: where relative ``extends`` and ``hf`` paths start; by default the folder of ``path``."""
    return _load(Source(path=path, text=text), base_dir, Sink())


def format_text(text: str, path: str = "<text>") -> FormatResult:
    result = parse(Source(path=path, text=text))
    if result.diagnostics:
        return FormatResult(text=None, diagnostics=result.diagnostics)
    return FormatResult(text=format_file(result.file), diagnostics=())


def _load(source: Source, base_dir: str | None, sink: Sink) -> LoadResult:
    chain = load_chain(source, base_dir, sink)
    plan = resolve(chain, source.path, sink, base_dir)
    return LoadResult(plan=plan, diagnostics=sink.diagnostics(), sources=tuple(f.source for f in chain.files))
