"""``nereusc diff --coarse``: an estimate, and said to be one."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import display_name
from nereus.cli.output import Output, table
from nereus.cli.transition.compiling import errors_first, load_sides
from nereus.ir.diagnostic import has_errors
from nereus.ir.units import format_bytes, format_gb, format_seconds

if TYPE_CHECKING:
    from nereus.passes.coarse import CoarseEstimate

#: Options that say how to compile, or what to do with what was compiled.
_COMPILING = ("horizon", "mode", "pass_pipeline", "detail", "detailed_exitcode", "time_passes", "allow_destroy", "same")


def report_estimate(args: argparse.Namespace, out: Output) -> ExitCode:
    """UsageError for options that only a compilation has."""
    given = [name for name in _COMPILING if getattr(args, name)] + (["print_ir_after"] if args.print_ir_after else [])
    if given:
        raise UsageError(f"--coarse compiles nothing: it cannot be used with --{given[0].replace('_', '-')}")
    sides = load_sides(args)
    diagnostics = errors_first(d for side in sides for d in side.diagnostics)
    old, new = sides[0].plan, sides[1].plan
    found: CoarseEstimate | None = None
    if old is not None and new is not None and not has_errors(diagnostics):
        from nereus.ir.diagnostic import DiagnosticError
        from nereus.passes.coarse import coarse
        from nereus.passes.refusals import check_experts, check_models

        try:
            refused = [*check_models(old, new), *check_experts(old, new)]
        except DiagnosticError as error:
            refused = list(error.diagnostics)
        diagnostics = errors_first((*refused, *diagnostics))
        if not has_errors(diagnostics):
            found = coarse(old, new)
    out.diagnostics(diagnostics)
    if out.json:
        from nereus.lang.render import to_json

        out.document(
            "coarse",
            {
                "ok": found is not None,
                "old": display_name(args.old),
                "new": display_name(args.new),
                "estimate": None if found is None else {**asdict(found), "fresh": list(found.fresh)},
                "diagnostics": [to_json(d) for d in diagnostics],
            },
        )
    elif found is not None:
        out.print(f"{display_name(args.old)} -> {display_name(args.new)}")
        out.print("\n".join(estimate_lines(found)))
    return for_diagnostics(diagnostics)


def estimate_lines(found: CoarseEstimate) -> list[str]:
    if found.mode == "none":
        return ["estimate: no differences that move or start anything"]
    rows = [
        ("moved", f"{format_bytes(found.moved_bytes)}, at most {format_bytes(found.node_in_bytes_max)} into a node"),
        ("transfer", f"{format_seconds(found.transfer_s)}, limited by {found.limited_by}"),
        ("stop", f"{format_seconds(found.stop_s)}: {_terms(found)}"),
        ("memory", f"{found.mode}, peak {format_gb(found.peak_bytes_max)} of {format_gb(found.capacity_bytes)} a GPU"),
    ]
    if found.background_s:
        rows.insert(3, ("before", f"{format_seconds(found.background_s)} of starts beside training"))
    if not found.fresh and found.fits:
        notes = []
    else:
        notes = [f"not held before: {', '.join(found.fresh)}"] if found.fresh else []
        notes += [] if found.fits else ["estimated not to fit"]
    return [
        "estimate, for the placement as listed: nothing was compiled, placed or checked",
        *table(("", ""), rows, indent=0)[1:],
        *notes,
    ]


def _terms(found: CoarseEstimate) -> str:
    terms = (
        ("drain", found.drain_s),
        ("set-up", found.setup_s),
        ("groups", found.groups_s),
        ("transfer", found.transfer_s),
        ("commit", found.commit_s),
    )
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in terms if seconds)
