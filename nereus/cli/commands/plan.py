"""``nereusc plan``: the best layouts for the stages of a plan on the GPUs that they have, with what each takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import CommandError, UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import write_text
from nereus.cli.measurements import read_calibration
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, table
from nereus.ir.units import format_gb

if TYPE_CHECKING:
    from nereus.ir.plan import Plan
    from nereus.models.memory import MemoryReport
    from nereus.planner.search import Found, Searched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="plan; one that does not fit is fine")
    parser.add_argument("--calibration", metavar="FILE", help="what nereusc fit wrote (default: data sheets, priors)")
    parser.add_argument("--best", type=int, default=3, metavar="N", help="how many plans (default: 3)")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="STAGE", help="a stage whose layout stays as it is (repeatable)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the best plan, as a variant of the given one")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.api import load_plan
    from nereus.models.memory import steady_state
    from nereus.planner.calibration import calibrate
    from nereus.planner.search import search

    if args.best < 1:
        raise UsageError(f"--best {args.best}: at least 1")
    calibration = calibrate(()) if args.calibration is None else read_calibration(args.calibration)
    loaded = load_plan(args.file)
    out.diagnostics(loaded.diagnostics)
    plan = loaded.plan
    if plan is None:
        return for_diagnostics(loaded.diagnostics)
    names = [stage.name for stage in plan.stages]
    for name in args.pin:
        if name not in names:
            raise UsageError(f"--pin {name}: the plan has {', '.join(names)}")
    found = search(plan, calibration, count=args.best, pinned=args.pin)
    reports = [steady_state(each.plan) for each in found.best]
    if args.output is not None and found.best:
        if args.file == args.output:
            raise CommandError(f"{args.output}: a variant of a plan cannot take its place")
        write_text(args.output, _variant(args.file, args.output, found.best[0]))
    if out.json:
        out.document("plan", _json(args, found, reports))
    else:
        _print(args, plan, found, reports, out)
    return ExitCode.OK if found.best else ExitCode.INFEASIBLE


def _variant(base: str, target: str, found: Found) -> str:
    import os

    from nereus.lang.printer import quote

    relative = os.path.relpath(base, os.path.dirname(os.path.abspath(target)))
    lines = [f"extends {quote(relative)}"]
    lines += [f"stage {stage} {{ {text} }}" for stage, text in found.changes.items() if text]
    return "\n".join(lines) + "\n"


def _json(args: argparse.Namespace, found: Searched, reports: list[MemoryReport]) -> dict[str, Any]:
    return {
        "plan": args.file,
        "calibration": args.calibration,
        "present_seconds": None if found.present is None else found.present.seconds,
        "num_candidates": dict(found.num_candidates),
        "best": [
            {
                "seconds": each.seconds,
                "changes": {stage: text for stage, text in each.changes.items() if text},
                "stages": [
                    {
                        "stage": stage,
                        "seconds": seconds,
                        "num_gpus": len(each.plan.stage(stage).devices),
                        "peak_bytes": report.worst(stage).need_bytes,
                        "capacity_bytes": report.worst(stage).capacity_bytes,
                    }
                    for stage, seconds in each.stage_seconds.items()
                ],
            }
            for each, report in zip(found.best, reports, strict=True)
        ],
    }


def _print(args: argparse.Namespace, plan: Plan, found: Searched, reports: list[MemoryReport], out: Output) -> None:
    present = "does not fit" if found.present is None else f"{found.present.seconds:.1f} s a step"
    out.print(f"{args.file}: {present}")
    if args.calibration is None:
        out.print("from data sheets and priors alone: --calibration names what nereusc fit learned")
    if not found.best:
        out.print("no layout of these stages fits on their GPUs; nereusc check says what does not")
    for number, (each, report) in enumerate(zip(found.best, reports, strict=True), 1):
        out.print()
        gain = f", {100 * (1 - each.seconds / found.present.seconds):.1f}% less" if found.present is not None else ""
        same = "  the plan as it is" if not any(each.changes.values()) else ""
        out.print(out.style(f"{number}. {each.seconds:.1f} s a step{gain}{same}", "bold"))
        rows = []
        for stage in each.plan.stages:
            if stage.name not in each.stage_seconds:
                continue
            worst = report.worst(stage.name)
            rows.append(
                (
                    stage.name,
                    str(len(stage.devices)),
                    _degrees(stage),
                    f"{each.stage_seconds[stage.name]:.1f}",
                    f"{format_gb(worst.need_bytes)} of {format_gb(worst.capacity_bytes)}",
                    each.changes.get(stage.name, ""),
                )
            )
        out.print("\n".join(table(("stage", "GPUs", "layout", "s", "peak GB", "write"), rows, right=(1, 3))))
    if args.output is not None and found.best:
        out.print(f"\nwrote {args.output}: nereusc diff {args.file} {args.output} says what the change costs")


def _degrees(stage: Any) -> str:
    degrees = [("dp", stage.dp), ("tp", stage.tp), ("pp", stage.pp)]
    degrees += [(name, value) for name, value in (("cp", stage.cp), ("ep", stage.ep)) if value > 1]
    return " ".join(f"{name} {value}" for name, value in degrees)
