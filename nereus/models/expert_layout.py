"""Layouts of experts that no framework fixes: a plan with one is legal, and no change to or from it is known."""

from __future__ import annotations

from nereus.ir.diagnostic import Diagnostic, Label, Severity
from nereus.ir.plan import Plan


def unknown_expert_layouts(plan: Plan, severity: Severity = Severity.ERROR) -> list[Diagnostic]:
    """NRS5006 for stages that spread experts over ep inside FSDP: an error of a transition. ``check`` warns of it,
    since the job itself may run so."""
    found = []
    for stage in plan.owners():
        if plan.model(stage.model).arch.moe is None or stage.fsdp <= 1 or stage.ep <= 1:
            continue
        span = stage.key_span("ep")
        notes = ["frameworks shard such experts by expert, by row or not at all: it would be a guess"]
        if severity is not Severity.ERROR:
            notes.insert(0, "the job can run so, but diff, compile and run refuse every change from and to this plan")
        found.append(
            Diagnostic(
                code="NRS5006",
                severity=severity,
                headline=f"{stage.name}: experts over ep = {stage.ep} inside FSDP have no layout that is known",
                primary=None if span is None else Label(span=span, message=""),
                notes=tuple(notes),
                help="Write ep = 1 with fsdp, or zero = 1 with ep (Megatron's expert data parallelism).",
            )
        )
    return found
