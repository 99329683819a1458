"""``nereusc import verl FILE``: a plan from a verl launch script or resolved configuration. Read, never executed."""

from __future__ import annotations

from pathlib import PurePath

from nereus.ir.diagnostic import Diagnostic, Severity, Source, has_errors
from nereus.lang.importers.result import ImportResult, Reports, closest
from nereus.lang.importers.verl_launch import read_launch
from nereus.lang.importers.verl_plan import PlanWriter
from nereus.models.hardware import gpu_ids

MAX_INPUT = 1_000_000  # characters; launch scripts have some thousands


def import_verl(text: str, *, path: str, gpu: str | None = None, nodes: int | None = None) -> ImportResult:
    """Plan text with a comment on each assumption. Never raises on bad input: what is wrong is in ``diagnostics``.

    ``gpu`` is a data-sheet id (default: assumed, with a comment); ``nodes`` replaces ``trainer.nnodes``.
    """
    reports = Reports(source=Source(path=path, text=text))
    _check_arguments(reports, text, gpu, nodes)
    launch = None if has_errors(reports.diagnostics) else read_launch(text, path, reports)
    if launch is None:
        return ImportResult(plan_text=None, diagnostics=_ordered(reports))
    writer = PlanWriter(launch, reports, gpu=gpu, nodes=nodes)
    name = PurePath(path).name.replace("\n", " ").encode("ascii", "replace").decode()[:100] or "a launch script"
    header = [
        f"Imported from {name} (verl).",
        "What the launch does not say is assumed; the comments tell where.",
        "Stages that share devices take turns, as verl's one pool of workers does." if launch.kind == "sync" else "",
    ]
    plan = writer.text([line for line in header if line])
    if has_errors(reports.diagnostics):
        return ImportResult(plan_text=None, diagnostics=_ordered(reports))
    plan = _finish(plan, reports, check=not writer.models.placeholder)
    return ImportResult(plan_text=plan, diagnostics=_ordered(reports))


def _check_arguments(reports: Reports, text: str, gpu: str | None, nodes: int | None) -> None:
    if len(text) > MAX_INPUT:
        reports.add("NRS2501", Severity.ERROR, f"{len(text):,} characters are no launch script ({MAX_INPUT:,} at most)")
    if gpu is not None and gpu not in gpu_ids():
        near = [i for i in gpu_ids() if i.startswith(gpu.lower())][:1] or closest(gpu, gpu_ids())
        reports.add(
            "NRS2510",
            Severity.ERROR,
            f"no data sheet is called `{gpu[:60]}`",
            notes=[f"known: {', '.join(gpu_ids())}"],
            help=f"did you mean `{near[0]}`?" if near else None,
        )
    if nodes is not None and nodes < 1:
        reports.add("NRS2510", Severity.ERROR, f"--nodes is {nodes}; at least one node is needed")


def _finish(plan: str, reports: Reports, *, check: bool) -> str:
    """Formatted as ``nereusc fmt`` would; says where the launch asks for what the plan checks refuse."""
    from nereus.lang.api import format_text, resolve_text

    plan = format_text(plan, path="<imported plan>").text or plan
    if check:
        found = resolve_text(plan, path="<imported plan>").diagnostics
        errors = [d for d in found if d.severity is Severity.ERROR]
        if errors:
            reports.add(
                "NRS2513",
                Severity.WARNING,
                f"the launch describes a layout that `nereusc check` refuses ({len(errors)} of them)",
                notes=[f"{d.code}: {d.headline}" for d in errors[:8]],
                help="the plan is written as the launch has it; `nereusc check` shows each place in it",
            )
    return plan


def _ordered(reports: Reports) -> tuple[Diagnostic, ...]:
    return tuple(sorted(reports.diagnostics, key=lambda d: d.severity is not Severity.ERROR))
