"""A transition as JSON: the certificate, every change, and what was decided. Equal inputs give equal bytes, but for
seconds that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from nereus.cli.transition import facts
from nereus.ir.diagnostic import Diagnostic
from nereus.ir.plan import Stage
from nereus.ir.transition import Certificate
from nereus.lang.render import to_json
from nereus.models.memory import MemoryRow
from nereus.passes.compiled import Transition
from nereus.passes.lifecycle import LifecycleOp
from nereus.passes.lower import StageChange
from nereus.passes.place import Choice


def diff_document(
    *,
    old_path: str | None,
    new_path: str | None,
    transition: Transition | None,
    diagnostics: Iterable[Diagnostic],
    pipeline: str | None,
    timings: bool,
    file: str | None = None,
) -> dict[str, Any]:
    """``transition`` None: there is none, and ``diagnostics`` say why."""
    document: dict[str, Any] = {
        "ok": transition is not None and transition.certificate.safe,
        "old": old_path,
        "new": new_path,
        "file": file,
        "pipeline": pipeline,
        "different": None if transition is None else facts.differs(transition),
        "certificate": None,
    }
    if transition is not None:
        document |= _transition(transition)
        if timings:
            document["timings"] = [{"pass": name, "seconds": seconds} for name, seconds in transition.timings]
    document["diagnostics"] = [to_json(d) for d in diagnostics]
    return document


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """All fields under their names."""
    document = {entry.name: getattr(certificate, entry.name) for entry in fields(certificate)}
    document["bytes_by_link"] = dict(certificate.bytes_by_link)
    document["checks"] = [
        {"name": name, "holds": holds, "evidence": evidence} for name, holds, evidence in certificate.checks
    ]
    return document


def _transition(transition: Transition) -> dict[str, Any]:
    flows = facts.stage_flows(transition)
    found = facts.fits(transition.old, transition.new)
    return {
        "certificate": certificate_json(transition.certificate),
        "plan_changes": [
            {"part": c.part, "what": c.what, "old": c.old, "new": c.new}
            for c in facts.plan_changes(transition.old, transition.new)
        ],
        "stages": [_stage(transition, change, flows.get(change.stage)) for change in transition.changes],
        "choices": [_choice(transition, choice) for choice in transition.choices],
        "lifecycle": [_operation(transition, op) for op in transition.life.ops],
        "memory": [
            {
                "devices": [str(device) for device in entry.devices],
                "hosts": list(entry.hosts),
                "peak_bytes": entry.peak_bytes,
                "capacity_bytes": entry.capacity_bytes,
                "phase": entry.phase,
            }
            for entry in facts.peak_classes(transition)
        ],
        "fits": {
            "seq_len": found.seq_len,
            "training": [_row(row) for row in found.training],
            "old_misfits": None if found.old_misfits is None else [_row(row) for row in found.old_misfits],
        },
        "destroyed": [{"stage": stage, "slots": list(slots)} for stage, slots in facts.destroyed(transition)],
        "transfer_limited_by": transition.bound.limited_by,
        "same": [list(pair) for pair in transition.same],
    }


def _stage(transition: Transition, change: StageChange, flow: facts.StageFlow | None) -> dict[str, Any]:
    topology = transition.topology
    engines = facts.engines_of(transition, change.new) if change.new is not None else None
    return {
        "name": change.stage,
        "marks": list(change.marks),
        "changed": change.changed,
        "old": None if change.old is None else _side(change.old),
        "new": None if change.new is None else _side(change.new),
        "follows": facts.follows(transition, change),
        "primitives": [
            {
                "kind": p.kind,
                "count": p.count,
                "before": {"tp": p.before[0], "pp": p.before[1]},
                "after": {"tp": p.after[0], "pp": p.after[1]},
                "devices": [str(device) for device in p.devices],
            }
            for p in change.primitives
        ],
        "settings": list(change.notes),
        "fresh_slots": [slot for stage, slot in transition.diff.fresh if stage == change.stage],
        "cache": change.stage in transition.new_holdings.caches,
        "engines": None
        if engines is None
        else {
            "started": engines.started,
            "in_background": engines.in_background,
            "kept": engines.kept,
            "total": engines.total,
        },
        "state": None
        if flow is None
        else {
            "moved_bytes": flow.moved_bytes,
            "bound_moved_bytes": flow.bound_moved_bytes,
            "bytes_by_link": dict(sorted(flow.bytes_by_link.items())),
            "node_in_bytes": {topology.nodes[node].name: n for node, n in sorted(flow.node_in.items())},
            "bound_node_in_bytes_max": flow.bound_node_in_bytes_max,
            "kept_bytes": flow.kept_bytes,
            "untouched_bytes": flow.untouched_bytes,
            "derived_bytes": flow.derived_bytes,
            "local_bytes": flow.local_bytes,
        },
    }


def _side(stage: Stage) -> dict[str, Any]:
    return {
        "devices": [str(device) for device in stage.ranks] if stage.service is None else [],
        "with": stage.with_,
        "service": stage.service,
        **{axis: getattr(stage, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp", "vp")},
        "pp_split": list(stage.pp_split),
        "zero": stage.zero,
        "fsdp": stage.fsdp,
        "order": stage.order,
        "expert_dp": stage.expert_dp,
        "num_emus": stage.num_emus,
    }


def _choice(transition: Transition, choice: Choice) -> dict[str, Any]:
    document = {entry.name: getattr(choice, entry.name) for entry in fields(choice)}
    nodes, devices = transition.topology.nodes, transition.topology.devices
    document["best_node_in_bytes"] = {
        node.name: n for node, n in zip(nodes, choice.best_node_in_bytes, strict=True) if n
    }
    document["best_device_in_bytes"] = {str(devices[d]): n for d, n in choice.best_device_in_bytes if n}
    return document


def _operation(transition: Transition, op: LifecycleOp) -> dict[str, Any]:
    return {
        "kind": op.kind,
        "stage": op.stage,
        "devices": [str(transition.topology.devices[number]) for number in op.devices],
        "seconds": op.seconds,
        "background": op.background,
        "running_bytes": list(op.running_bytes),
        "after_bytes": list(op.after_bytes),
    }


def _row(row: MemoryRow) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "device": str(row.device),
        "need_bytes": row.need_bytes,
        "capacity_bytes": row.capacity_bytes,
        "fits": row.fits,
    }
