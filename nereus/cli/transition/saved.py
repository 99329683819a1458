"""A saved transition: both placed plans, how they were compiled, the certificate, the digest and the whole schedule.

Reading one compiles its plans again and compares: a file that this version of Nereus would not write itself is
refused, be it damaged, edited, or older than a change of the compiler, the presets or the data sheets.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import nereus
from nereus.cli.output import FORMAT_VERSION
from nereus.cli.transition.document import certificate_json
from nereus.cli.transition.saved_file import (
    KIND,
    damaged,
    entry_of,
    file_error,
    model_fingerprints,
    read_saved,
    text_fingerprint,
)
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, has_errors
from nereus.ir.intervals import Intervals
from nereus.ir.plan import Plan
from nereus.ir.transition import LINKS
from nereus.lang.api import placed_plan_text, resolve_text
from nereus.passes.atoms import AtomTable
from nereus.passes.bound import GPU_IN, GPU_OUT, NIC_IN, NIC_OUT
from nereus.passes.compiled import Transition
from nereus.passes.links import rail_names
from nereus.passes.manager import Pipeline, parse_pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.place import Choice


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
        "options": {
            "allow_destroy": allow_destroy,
            **({"same": [list(pair) for pair in transition.same]} if transition.same else {}),
        },
        "digest": transition.digest,
        "certificate": certificate,
        "choices": choices,
        "bound": {"prices": prices_document(transition)},
        "schedule": schedule_document(transition),
        "lifecycle": lifecycle_document(transition),
        "memory": memory_document(transition),
    }


def choices_fingerprint(choices: list[Any]) -> str:
    """SHA-256 of the reasons of placement: placed plans are pinned, so compiling them again does not give these."""
    return text_fingerprint(json.dumps(choices, sort_keys=True))


def schedule_document(transition: Transition) -> dict[str, Any]:
    """Columnar. Place p is GPU ``devices[p]``, or the host memory of that GPU's process at ``len(devices) + p``;
    ``region`` numbers rows of ``regions``; ``slots`` is a bit mask over its table's slots, -1 for all."""
    schedule, diff = transition.schedule, transition.diff
    moves = schedule.moves
    # Numbered as moves name them, equal ones once.
    numbers: dict[bytes, int] = {}
    unique: list[Intervals] = []
    known: dict[int, int] = {}
    for number in moves.region.tolist():
        if number not in known:
            region = moves.regions[number]
            content = b"|".join(c.tobytes() for c in (region.cell, region.start, region.stop))
            known[number] = numbers.setdefault(content, len(unique))
            if known[number] == len(unique):
                unique.append(region)
    return {
        "mode": schedule.mode,
        "num_waves": schedule.num_waves,
        "window_bytes": schedule.window_bytes,
        "devices": [str(device) for device in transition.topology.devices],
        "tables": [
            {
                "model": t.model,
                "slots": list(t.slots),
                "dtypes": _dtypes(transition, t),
                "slot_bytes": list(t.slot_bytes),
                "cells": g,
            }
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
            "src": moves.src.tolist(),
            "dst": moves.dst.tolist(),
            "table": moves.table.tolist(),
            "region": [known[number] for number in moves.region.tolist()],
            "bytes": moves.num_bytes.tolist(),
            "wave": schedule.wave.tolist(),
            "slices": schedule.slices.tolist(),
            "link": moves.link.tolist(),
            "slots": moves.slots.tolist(),
            "after_counts": moves.after_counts.tolist(),
            "after": moves.after.tolist(),
        },
        "links": list(LINKS),
        "acquire": [[*key, wave] for key, wave in sorted(schedule.acquire.items())],
        "release": [[*key, wave] for key, wave in sorted(schedule.release.items())],
        **({"staged": [[*key, *waves] for key, waves in sorted(schedule.staged.items())]} if schedule.staged else {}),
    }


def _dtypes(transition: Transition, table: AtomTable) -> list[str]:
    """Of the table's slots: what the state sets that want them say."""
    geometry = transition.geometry_of(table)
    found = []
    for name in table.slots:
        slots = (geometry.new_sets[group.state_set].slot(name) for group in table.new_groups)
        found.append(next(slot.dtype for slot in slots if slot is not None))
    return found


def prices_document(transition: Transition) -> list[list[Any]]:
    """What proves the bound on the transfer: [kind of port, GPU, NIC or node, weight]."""
    topology = transition.topology
    devices, rails = [str(device) for device in topology.devices], rail_names(topology)
    names = {GPU_IN: devices, GPU_OUT: devices, NIC_IN: rails, NIC_OUT: rails}
    nodes = [node.name for node in topology.nodes]
    return [[kind, names.get(kind, nodes)[number], weight] for kind, number, weight in transition.bound.prices]


def lifecycle_document(transition: Transition) -> list[dict[str, Any]]:
    """What processes do, in order; ``devices`` by number."""
    return [
        {
            "kind": op.kind,
            "stage": op.stage,
            "devices": list(op.devices),
            "seconds": op.seconds,
            "start_s": start,
            "background": op.background,
            "running_bytes": list(op.running_bytes),
            "after_bytes": list(op.after_bytes),
        }
        for op, start in zip(transition.life.ops, _starts(transition), strict=True)
    ]


def _starts(transition: Transition) -> list[float]:
    """When each life-cycle operation starts: seconds after the boundary, or (background) after the preparation
    begins. What ends does so at the commit."""
    timeline = transition.timeline
    known = {id(op.source): at for op, at in zip(timeline.ops, timeline.start_s, strict=True) if op.source is not None}
    return [known.get(id(op), timeline.stop_s) for op in transition.life.ops]


def memory_document(transition: Transition) -> dict[str, Any]:
    """Bytes per device that the schedule counts on beside the state itself, and capacities."""
    memory, topology = transition.memory, transition.topology
    num_devices = topology.num_devices
    return {
        "staging": memory.staging.tolist(),
        "before": list(transition.life.before_bytes),
        "after": list(transition.life.after_bytes),
        "capacity": memory.capacity[:num_devices].tolist(),
        "hosts": {
            node.name: int(memory.capacity[num_devices + number])
            for number, node in enumerate(topology.nodes)
            if topology.alive[number]
        },
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
    document = read_saved(path)
    plans = {side: entry_of(document, path, "plans", side, "text", kind=str) for side in ("old", "new")}
    names = {side: entry_of(document, path, "plans", side, "path", kind=str) for side in ("old", "new")}
    for side, text in plans.items():
        if entry_of(document, path, "fingerprints", f"{side}_plan", kind=str) != text_fingerprint(text):
            raise DiagnosticError(
                [
                    file_error(
                        "NRS5510",
                        f"{path}: the {side} plan inside is not the one that was saved",
                        notes=("its text and its fingerprint do not match, so the file was edited or damaged",),
                        help="Compile the transition again from your plans.",
                    )
                ]
            )
    digest = entry_of(document, path, "digest", kind=str)
    try:
        pipeline = parse_pipeline(entry_of(document, path, "pipeline", kind=str))
    except ValueError as error:
        raise DiagnosticError([_stale(document, path, [f"the pipeline is not accepted any more: {error}"])]) from None
    allow_destroy = entry_of(document, path, "options", "allow_destroy", kind=bool)
    same = _same(document, path)
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
        if entry_of(document, path, "fingerprints", name, kind=str) != value
    ]
    try:
        transition = compile_transition(old, new, pipeline, allow_destroy=allow_destroy, same=same)
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


def _same(document: Mapping[str, Any], path: str) -> tuple[tuple[str, str], ...]:
    """Pairs of models that the job stated to be equal; none in most files."""
    options = entry_of(document, path, "options", kind=dict)
    pairs = options.get("same", [])
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in pairs
    ):
        raise DiagnosticError([damaged(path, "options.same: not what Nereus writes")])
    return tuple((one, other) for one, other in pairs)


def _as_saved(transition: Transition, document: Mapping[str, Any], path: str, names: Mapping[str, str]) -> Transition:
    """Placed plans are pinned, so why they lie as they do only the file knows; what it says must be what was saved."""
    choices = []
    stored = entry_of(document, path, "choices", kind=list)
    for entry in stored:
        try:
            values = {f.name: entry[f.name] for f in fields(Choice)}
            values["best_node_in_bytes"] = tuple(values["best_node_in_bytes"])
            values["best_device_in_bytes"] = tuple((int(d), int(n)) for d, n in values["best_device_in_bytes"])
            choices.append(Choice(**values))
        except (KeyError, TypeError, ValueError):
            raise DiagnosticError([damaged(path, "choices: not what Nereus writes")]) from None
    if entry_of(document, path, "fingerprints", "choices", kind=str) != choices_fingerprint(stored):
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
    stored = entry_of(document, path, "certificate", kind=dict)
    now = json.loads(json.dumps(certificate))
    changed = [name for name in now if stored.get(name) != now[name]]
    if changed:
        notes.append(f"the certificate differs in {', '.join(changed)}")
    for name, kind, compiled in (
        ("schedule", dict, schedule_document(transition)),
        ("lifecycle", list, lifecycle_document(transition)),
        ("memory", dict, memory_document(transition)),
    ):
        if entry_of(document, path, name, kind=kind) != json.loads(json.dumps(compiled)):
            notes.append(f"the {name} is not the one that its plans compile to")
    return notes


def _stale(document: Mapping[str, Any], path: str, notes: list[str]) -> Diagnostic:
    version = document.get("nereus")
    if isinstance(version, str) and version != nereus.__version__:
        notes = [*notes, f"written by nereusc {version}, read by {nereus.__version__}"]
    return file_error(
        "NRS5511",
        f"{path} is stale: compiling its plans now gives another transition",
        notes=tuple(notes),
        help="Compile the transition again, look at the new one, and use that.",
    )
