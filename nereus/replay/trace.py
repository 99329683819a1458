"""A trace: what happened to a job, step by step, whatever plan it ran under.

As a CSV file one step a row, in order. ``response_mean`` is needed; the rest may be absent or empty:

    response_mean   tokens, over the batch of the step
    response_max    tokens, the longest of the batch; sets how long the tail of generation is
    gpus            that are there while the step runs; whole nodes, the first ones of the plan's cluster
    notice_s        how long ago it was said that GPUs would leave with this step; empty or 0: they failed
    efficiency      of the machines, 1 = as usual; a step takes 1 / efficiency times as long
    step_s          measured, of the plan that is replayed: sets the efficiency where that is not given

Exports of verl, OpenRLHF and TRL are read under their own names of the lengths and of the step's time.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass

from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity

#: Our column -> what others call it.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "response_mean": ("response_length/mean", "response_length", "completions/mean_length", "train/response_length"),
    "response_max": ("response_length/max", "completions/max_length"),
    "gpus": (),
    "notice_s": (),
    "efficiency": (),
    "step_s": ("timing_s/step", "perf/time_per_step", "step_time"),
}
_LARGEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step. ``notice_s``: None where nothing leaves or what leaves fails."""

    response_mean: float
    response_max: float | None = None
    gpus: int | None = None
    notice_s: float | None = None
    efficiency: float = 1.0
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    rows: tuple[Row, ...]


def read_trace(text: str, path: str) -> Trace:
    """Raises DiagnosticError (NRS7005)."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        columns = {name: _column(name, header) for name in ALIASES}
        if columns["response_mean"] is None:
            raise DiagnosticError([no_trace(path, "it has no column response_mean")])
        rows = [_row(cells, columns, path, reader.line_num) for cells in reader]
    except csv.Error as error:
        raise DiagnosticError([no_trace(path, f"line {reader.reader.line_num}: {error}")]) from None
    if not rows:
        raise DiagnosticError([no_trace(path, "it has no steps")])
    return Trace(name=path, rows=tuple(rows))


def no_trace(path: str, why: str) -> Diagnostic:
    return Diagnostic(
        code="NRS7005",
        severity=Severity.ERROR,
        headline=f"{path} is no trace that can be replayed: {why}",
        help="one step a row, with the column response_mean; docs/trace-study.md lists the others",
    )


def _column(name: str, header: list[str]) -> str | None:
    return next((known for known in (name, *ALIASES[name]) if known in header), None)


def _row(cells: Mapping[str, str], columns: Mapping[str, str | None], path: str, line: int) -> Row:
    def number(name: str, *, least: float) -> float | None:
        column = columns[name]
        text = (cells.get(column) or "").strip() if column is not None else ""
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _LARGEST:
            raise DiagnosticError([no_trace(path, f"line {line}: {column} is '{text}'")])
        return value

    mean = number("response_mean", least=1.0)
    if mean is None:
        raise DiagnosticError([no_trace(path, f"line {line}: response_mean is empty")])
    gpus, efficiency = number("gpus", least=1.0), number("efficiency", least=1e-3)
    if gpus is not None and gpus != int(gpus):
        raise DiagnosticError([no_trace(path, f"line {line}: {gpus} gpus")])
    most = number("response_max", least=1.0)
    if most is not None and most < mean:
        raise DiagnosticError([no_trace(path, f"line {line}: response_max {most:g} is below the mean {mean:g}")])
    return Row(
        response_mean=mean,
        response_max=most,
        gpus=None if gpus is None else int(gpus),
        notice_s=number("notice_s", least=0.0) or None,
        efficiency=1.0 if efficiency is None else efficiency,
        step_s=number("step_s", least=1e-6) if efficiency is None else None,
    )


def write_trace(trace: Trace) -> str:
    """As ``read_trace`` reads it."""
    lines = [",".join(("step", *ALIASES))]
    for step, row in enumerate(trace.rows):
        # Where both were written, the efficiency would count.
        efficiency = row.efficiency if row.step_s is None else None
        cells = (row.response_mean, row.response_max, row.gpus, row.notice_s, efficiency, row.step_s)
        lines.append(",".join((str(step), *("" if cell is None else f"{cell:.6g}" for cell in cells))))
    return "\n".join(lines) + "\n"
