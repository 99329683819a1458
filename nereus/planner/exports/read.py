"""An export of a run -> its steps: seconds of whole and parts, mean lengths, peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.planner.exports.console import read_console
from nereus.planner.exports.events import event_files, read_events
from nereus.planner.exports.names import FRAMEWORKS, Framework, framework_of
from nereus.planner.exports.tables import NotRead, Steps, read_csv, read_json

_GIB = 2**30
_STEPS = tuple(dict.fromkeys(name for framework in FRAMEWORKS for name in framework.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Of one RL step. ``parts_s``: (roles, seconds that they took together). ``peak_bytes``: allocated at most on a
    GPU."""

    number: int
    step_s: float | None
    response_len: float | None
    prompt_len: float | None
    parts_s: tuple[tuple[tuple[str, ...], float], ...]
    peak_bytes: float | None = None
    response_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """``steps``: in order, those of which something was measured."""

    framework: str
    steps: tuple[Step, ...]


def read_export(path: str, data: bytes | None = None) -> Export:
    """``data``: of a file that was read already. A folder is one of event files. Raises DiagnosticError (NRS7006), or
    OSError."""
    try:
        found = _metrics(Path(path), data)
    except NotRead as problem:
        raise DiagnosticError([no_export(path, str(problem))]) from None
    framework = framework_of({name for of_step in found.values() for name in of_step})
    if framework is None:
        raise DiagnosticError([no_export(path, "it has none of the names that verl, NeMo-RL and OpenRLHF use")])
    steps = tuple(step for number in sorted(found) if (step := _step(number, found[number], framework)) is not None)
    if not steps:
        raise DiagnosticError([no_export(path, f"none of its {len(found)} steps has a time of {framework.name}'s")])
    return Export(framework=framework.name, steps=steps)


def no_export(path: str, why: str) -> Diagnostic:
    return Diagnostic(
        code="NRS7006",
        severity=Severity.ERROR,
        headline=f"{path} is no export of a run: {why}",
        help="a W&B history (CSV, JSON), TensorBoard event files or their folder, or a console log",
    )


def _metrics(path: Path, data: bytes | None) -> Steps:
    if data is None and (path.is_dir() or "tfevents" in path.name):
        found: Steps = {}
        files = event_files(path)
        if not files:
            raise NotRead("the folder has no event files")
        for file in files:
            for step, values in read_events(file).items():
                found.setdefault(step, {}).update(values)
        return found
    try:
        text = (path.read_bytes() if data is None else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotRead(f"it is no text (byte {error.start})") from None
    if path.suffix in (".json", ".jsonl", ".ndjson") or text.lstrip()[:1] in ("[", "{"):
        return read_json(text, _STEPS)
    if printed := read_console(text):
        return printed
    return read_csv(text, _STEPS)


def _step(number: int, metrics: Mapping[str, float], framework: Framework) -> Step | None:
    def first(names: tuple[str, ...]) -> float | None:
        return next((metrics[name] for name in names if metrics.get(name, 0.0) > 0), None)

    parts = tuple((roles, metrics[name]) for name, roles in framework.parts.items() if metrics.get(name, 0.0) > 0)
    total, peak_gib = first(framework.total), first(framework.peaks)
    if total is None and not parts:
        return None
    return Step(
        number=number,
        step_s=total,
        response_len=first(framework.lengths),
        prompt_len=first(framework.prompts),
        parts_s=parts,
        response_max=first(framework.longest),
        peak_bytes=peak_gib * _GIB if peak_gib is not None else None,
    )
