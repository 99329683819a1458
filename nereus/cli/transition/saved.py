"""A saved transition: both placed plans, how they were compiled, the certificate, the digest and the whole schedule.

Reading one compiles its plans again and compares: a file that this version of Nereus would not write itself is
refused, be it damaged, edited, or older than a change of the compiler, the presets or the data sheets.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import nereus
from nereus.cli.errors import CommandError
from nereus.cli.output import FORMAT_VERSION
from nereus.cli.transition.document import certificate_json
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity, has_errors
from nereus.ir.intervals import Intervals
from nereus.ir.plan import Plan
from nereus.ir.transition import HOST, INTER, INTRA, LOCAL
from nereus.lang.api import placed_plan_text, resolve_text
from nereus.lang.files import read_file
from nereus.passes.compiled import Transition
from nereus.passes.manager import Pipeline, parse_pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.place import Choice

KIND = "transition"
LINKS = (LOCAL, HOST, INTRA, INTER)
_GZIP_MAGIC = b"\x1f\x8b"


def saved_bytes(
    transition: Transition, *, pipeline: Pipeline, allow_destroy: bool, old_path: str, new_path: str, compress: bool
) -> bytes:
    """The file's content: JSON with one line per entry at the top, gzipped where ``compress``."""
    document = saved_document(
        transition, pipeline=pipeline, allow_destroy=allow_destroy, old_path=old_path, new_path=new_path
    )
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in document.items()
    )
    data = ("{\n" + lines + "\n}\n").encode()
    return gzip.compress(data, mtime=0) if compress else data


def saved_document(
    transition: Transition, *, pipeline: Pipeline, allow_destroy: bool, old_path: str, new_path: str
) -> dict[str, Any]:
    texts = {"old": placed_plan_text(transition.old), "new": placed_plan_text(transition.new)}
    certificate = certificate_json(transition.certificate)
    del certificate["compile_s"]  # equal inputs, equal bytes
    choices = [asdict(choice) for choice in transition.choices]
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "nereus": nereus.__version__,
        "plans": {
            "old": {"path": old_path, "text": texts["old"]},
            "new": {"path": new_path, "text": texts["new"]},
        },
        "fingerprints": {
            "old_plan": text_fingerprint(texts["old"]),
            "new_plan": text_fingerprint(texts["new"]),
            **model_fingerprints(transition.old, transition.new),
            "choices": choices_fingerprint(choices),
        },
        "pipeline": str(pipeline),
        "options": {"allow_destroy": allow_destroy},
        "digest": transition.digest,
        "certificate": certificate,
        "choices": choices,
        "schedule": schedule_document(transition),
    }


def text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model_fingerprints(old: Plan, new: Plan) -> dict[str, str]:
    """SHA-256 of what plan texts only name: data sheets behind the clusters, shapes behind the models."""
    return {
        "cluster": text_fingerprint(repr((old.cluster, new.cluster))),
        "models": text_fingerprint(repr([(m.name, m.arch, m.head, m.precision) for p in (old, new) for m in p.models])),
    }


def choices_fingerprint(choices: list[Any]) -> str:
    """SHA-256 of the reasons of placement: placed plans are pinned, so compiling them again does not give these."""
    return text_fingerprint(json.dumps(choices, sort_keys=True))


def schedule_document(transition: Transition) -> dict[str, Any]:
    """Columnar. Place p is GPU ``devices[p]``, or the host memory of that GPU's process at ``len(devices) + p``;
    ``region`` numbers rows of ``regions``; ``slots`` is a bit mask over its table's slots, -1 for all."""
    schedule, diff = transition.schedule, transition.diff
    regions: dict[bytes, int] = {}
    by_id: dict[int, int] = {}
    unique: list[Intervals] = []
    region_of_move = []
    for move in schedule.moves:
        number = by_id.get(id(move.intervals))
        if number is None:
            columns = (move.intervals.cell, move.intervals.start, move.intervals.stop)
            number = regions.setdefault(b"|".join(c.tobytes() for c in columns), len(unique))
            if number == len(unique):
                unique.append(move.intervals)
            by_id[id(move.intervals)] = number
        region_of_move.append(number)
    moves = schedule.moves
    return {
        "mode": schedule.mode,
        "num_waves": schedule.num_waves,
        "window_bytes": schedule.window_bytes,
        "devices": [str(device) for device in transition.topology.devices],
        "tables": [
            {"model": t.model, "slots": list(t.slots), "slot_bytes": list(t.slot_bytes), "cells": g}
            for t, g in zip(diff.tables, diff.geometry_of, strict=True)
        ],
        "cells": [
            {
                "tensors": [tensor.name for tensor in g.cells.tensors],
                **{
                    name: getattr(g.cells, name).tolist() for name in ("tensor", "row_lo", "row_hi", "col_lo", "col_hi")
                },
            }
            for g in diff.geometries
        ],
        "regions": {
            "counts": [len(region) for region in unique],
            **{
                name: [value for region in unique for value in getattr(region, name).tolist()]
                for name in ("cell", "start", "stop")
            },
        },
        "moves": {
            "src": [m.src for m in moves],
            "dst": [m.dst for m in moves],
            "table": [m.table for m in moves],
            "region": region_of_move,
            "bytes": [m.num_bytes for m in moves],
            "wave": list(schedule.wave),
            "link": [LINKS.index(m.link) for m in moves],
            "slots": [-1 if m.slots is None else sum(1 << i for i in m.slots) for m in moves],
            "after_counts": [len(m.after) for m in moves],
            "after": [number for m in moves for number in m.after],
        },
        "links": list(LINKS),
        "acquire": [[*key, wave] for key, wave in sorted(schedule.acquire.items())],
        "release": [[*key, wave] for key, wave in sorted(schedule.release.items())],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A transition compiled again from its file, with the names and the reasons of placement that it was saved
    with."""

    transition: Transition
    pipeline: Pipeline
    old_path: str
    new_path: str


def load_saved(path: str) -> Saved:
    """DiagnosticError: NRS550x where ``path`` is no saved transition, NRS551x where it does not hold any more."""
    document = _read(path)
    plans = {side: _entry(document, path, "plans", side, "text", kind=str) for side in ("old", "new")}
    names = {side: _entry(document, path, "plans", side, "path", kind=str) for side in ("old", "new")}
    for side, text in plans.items():
        if _entry(document, path, "fingerprints", f"{side}_plan", kind=str) != text_fingerprint(text):
            raise DiagnosticError(
                [
                    _error(
                        "NRS5510",
                        f"{path}: the {side} plan inside is not the one that was saved",
                        notes=("its text and its fingerprint do not match, so the file was edited or damaged",),
                        help="Compile the transition again from your plans.",
                    )
                ]
            )
    digest = _entry(document, path, "digest", kind=str)
    try:
        pipeline = parse_pipeline(_entry(document, path, "pipeline", kind=str))
    except ValueError as error:
        raise DiagnosticError([_stale(document, path, [f"the pipeline is not accepted any more: {error}"])]) from None
    allow_destroy = _entry(document, path, "options", "allow_destroy", kind=bool)
    sides: dict[str, Plan] = {}
    found: list[Diagnostic] = []
    for side, text in plans.items():
        result = resolve_text(text, path=f"{path} ({side} plan)")
        found += [d for d in result.diagnostics if has_errors([d])]
        if result.plan is not None:
            sides[side] = result.plan
    if found:
        raise DiagnosticError([*found, _stale(document, path, ["a plan inside is not accepted any more"])])
    old, new = sides["old"], sides["new"]
    notes = [
        f"what the plans name as {name} has changed (presets or data sheets of another version)"
        for name, value in model_fingerprints(old, new).items()
        if _entry(document, path, "fingerprints", name, kind=str) != value
    ]
    try:
        transition = compile_transition(old, new, pipeline, allow_destroy=allow_destroy)
    except DiagnosticError as error:
        notes.append("its plans do not compile any more")
        raise DiagnosticError([*error.diagnostics, _stale(document, path, notes)]) from None
    if transition.digest != digest:
        notes += [f"digest in the file  {digest}", f"digest compiled now {transition.digest}"]
        raise DiagnosticError([_stale(document, path, notes)])
    transition = _as_saved(transition, document, path, names)
    notes += _differences(transition, document, path)
    if notes:
        raise DiagnosticError([_stale(document, path, notes)])
    return Saved(transition=transition, pipeline=pipeline, old_path=names["old"], new_path=names["new"])


def _as_saved(transition: Transition, document: Mapping[str, Any], path: str, names: Mapping[str, str]) -> Transition:
    """Placed plans are pinned, so why they lie as they do only the file knows; what it says must be what was saved."""
    choices = []
    stored = _entry(document, path, "choices", kind=list)
    for entry in stored:
        try:
            values = {f.name: entry[f.name] for f in fields(Choice)}
            values["best_node_in_bytes"] = tuple(values["best_node_in_bytes"])
            values["best_device_in_bytes"] = tuple((int(d), int(n)) for d, n in values["best_device_in_bytes"])
            choices.append(Choice(**values))
        except (KeyError, TypeError, ValueError):
            raise DiagnosticError([_damaged(path, "choices: not what Nereus writes")]) from None
    if _entry(document, path, "fingerprints", "choices", kind=str) != choices_fingerprint(stored):
        note = "the reasons of its placements and their fingerprint do not match, so the file was edited or damaged"
        raise DiagnosticError([_stale(document, path, [note])])
    now = {c.stage: c.moved_bytes for c in transition.choices}
    if now != {c.stage: c.moved_bytes for c in choices}:
        raise DiagnosticError([_stale(document, path, ["the placements in it are not those of its plans"])])
    return replace(
        transition,
        old=replace(transition.old, path=names["old"]),
        new=replace(transition.new, path=names["new"]),
        choices=tuple(choices),
    )


def _differences(transition: Transition, document: Mapping[str, Any], path: str) -> list[str]:
    """What the digest does not cover: figures, and the stored form of the schedule."""
    notes = []
    certificate = certificate_json(transition.certificate)
    del certificate["compile_s"]
    stored = _entry(document, path, "certificate", kind=dict)
    now = json.loads(json.dumps(certificate))
    changed = [name for name in now if stored.get(name) != now[name]]
    if changed:
        notes.append(f"the certificate differs in {', '.join(changed)}")
    if _entry(document, path, "schedule", kind=dict) != json.loads(json.dumps(schedule_document(transition))):
        notes.append("the schedule is not the one that its plans compile to")
    return notes


def _read(path: str) -> dict[str, Any]:
    try:
        data = read_file(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot read {path}: {reason}") from None
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DiagnosticError([_damaged(path, f"it cannot be unpacked: {error}")]) from None
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if data.lstrip().startswith(b"{") and b'"format_version"' in data[:200]:
            reason = str(error) or type(error).__name__
            raise DiagnosticError([_damaged(path, f"it is not JSON: {reason}")]) from None
        raise DiagnosticError([_foreign(path, "it is not JSON")]) from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        kind = document.get("kind") if isinstance(document, dict) else None
        what = f"it is a document of kind {kind!r}" if isinstance(kind, str) else "it is JSON of some other kind"
        raise DiagnosticError([_foreign(path, what)])
    version = document.get("format_version")
    major = FORMAT_VERSION.split(".")[0]
    if not isinstance(version, str) or version.split(".")[0] != major:
        raise DiagnosticError(
            [
                _error(
                    "NRS5503",
                    f"{path}: format version {version} is not one that this Nereus reads",
                    notes=(f"nereusc {nereus.__version__} reads versions {major}.x",),
                    help="Compile the transition again, or read it with the Nereus that wrote it.",
                )
            ]
        )
    return document


def _entry(document: Mapping[str, Any], path: str, *keys: str, kind: type) -> Any:
    value: Any = document
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, kind):
        raise DiagnosticError([_damaged(path, f"{'.'.join(keys)} is missing or of a wrong kind")])
    return value


def _error(code: str, headline: str, *, notes: tuple[str, ...], help: str) -> Diagnostic:
    return Diagnostic(code=code, severity=Severity.ERROR, headline=headline, notes=notes, help=help)


def _foreign(path: str, why: str) -> Diagnostic:
    return _error(
        "NRS5501",
        f"{path} is not a saved transition",
        notes=(why,),
        help="Give it a file that `nereusc compile OLD NEW -o FILE` wrote.",
    )


def _damaged(path: str, why: str) -> Diagnostic:
    return _error(
        "NRS5502", f"{path} is damaged", notes=(why,), help="Compile the transition again from its two plans."
    )


def _stale(document: Mapping[str, Any], path: str, notes: list[str]) -> Diagnostic:
    version = document.get("nereus")
    if isinstance(version, str) and version != nereus.__version__:
        notes = [*notes, f"written by nereusc {version}, read by {nereus.__version__}"]
    return _error(
        "NRS5511",
        f"{path} is stale: compiling its plans now gives another transition",
        notes=tuple(notes),
        help="Compile the transition again, look at the new one, and use that.",
    )
