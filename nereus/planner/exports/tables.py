"""Histories in tables: what W&B's page and its API export, and verl's own file of JSON lines.

* a CSV or JSON of ``run.history()`` or ``run.scan_history()``: a column for each metric, ``_step`` among them;
* the CSV that a chart or a panel downloads: a column ``Step`` and columns ``RUN - METRIC`` (``..__MIN``, ``..__MAX``);
* JSON lines, one step each, as they are or below ``data`` (verl's file logger).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

#: Metrics by step.
Steps = dict[int, dict[str, float]]


class NotRead(Exception):
    """Why a text is no export that is known."""


def read_csv(text: str, steps: Iterable[str]) -> Steps:
    """``steps``: columns that number the steps, best first; then W&B's own. Raises NotRead."""
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise NotRead(str(error)) from None
    return of_rows([_plain(row) for row in rows], steps)


def read_json(text: str, steps: Iterable[str]) -> Steps:
    """An array of steps, or one a line. Raises NotRead."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in _lines(text)]
    except (ValueError, RecursionError) as error:
        raise NotRead(f"it is no JSON that could be read: {error}") from None
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise NotRead("it is no list of steps")
    return of_rows([_inside(row) for row in found], steps)


def of_rows(rows: Iterable[Mapping[str, Any]], steps: Iterable[str]) -> Steps:
    """Rows of one step are put together: a framework may log several times a step."""
    rows = list(rows)
    columns = {name for row in rows for name in row}
    numbers = [name for name in (*steps, "_step", "Step", "step", "global_step") if name in columns]
    if not numbers:
        raise NotRead("no column numbers its steps")
    found: Steps = {}
    for row in rows:
        number = next((value for name in numbers if (value := number_of(row.get(name))) is not None), None)
        if number is None:
            continue
        values = {name: value for name in row if (value := number_of(row[name])) is not None}
        found.setdefault(int(number), {}).update(values)
    return found


def number_of(cell: object) -> float | None:
    """Finite, or None."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return None
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and abs(value) < 1e15 else None


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _inside(row: Mapping[str, Any]) -> Mapping[str, Any]:
    data = row.get("data")
    return {**data, "step": row.get("step")} if isinstance(data, dict) else row


def _plain(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """``RUN - METRIC`` -> ``METRIC``. Raises NotRead for several runs in one table."""
    named = [name for name in row if name and " - " in name]
    runs = {name.partition(" - ")[0] for name in named}
    if len(runs) > 1:
        raise NotRead(f"it has {len(runs)} runs ({', '.join(sorted(runs)[:3])}, ...): export one of them")
    short = {name: name.partition(" - ")[2] for name in named}
    return {short.get(name, name): cell for name, cell in row.items() if name and not name.endswith(("__MIN", "__MAX"))}
