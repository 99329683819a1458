"""``nereusc plan``: the best layouts for the stages of a plan on the GPUs that they have, with what each takes."""

from __future__ import annotations

import argparse
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import keep_inputs, write_text
from nereus.cli.measurements import read_calibration
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, table
from nereus.cli.plan_limits import limits_of
from nereus.ir.units import format_gb

if TYPE_CHECKING:
    from nereus.ir.plan import Plan, Stage
    from nereus.models.memory import MemoryReport
    from nereus.planner.calibration import Calibration
    from nereus.planner.limits import Limits
    from nereus.planner.search import Found
    from nereus.planner.smallest import Smallest
    from nereus.planner.targets import Target, Targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="plan; one that does not fit is fine")
    parser.add_argument("--calibration", metavar="FILE", help="what nereusc fit wrote (default: data sheets, priors)")
    parser.add_argument("--best", type=int, default=3, metavar="N", help="how many plans (default: 3)")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="the plan runs now and goes on for N steps: the stop of a change counts (default: it does not run yet)",
    )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="STAGE", help="a stage whose layout stays as it is (repeatable)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STAGE.KEY=V,V",
        help="values that a stage may have: tp, pp, dp, ep, micro_batch, zero, recompute (repeatable)",
    )
    parser.add_argument("--move", action="store_true", help="stages may go to other GPUs of the cluster, shared or not")
    parser.add_argument(
        "--gpus", action="append", default=[], metavar="STAGE=N", help="with --move: N or N-M GPUs for it (repeatable)"
    )
    parser.add_argument(
        "--free", action="append", default=[], metavar="NODE", help="with --move: a node for no stage (repeatable)"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="with --move: also the fewest GPUs that hold all stages, in node order"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the best plan, as a variant of the given one")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.api import load_plan
    from nereus.models.memory import steady_state
    from nereus.planner.calibration import calibrate
    from nereus.planner.smallest import smallest

    if args.best < 1:
        raise UsageError(f"--best {args.best}: at least 1")
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps {args.steps}: at least 1")
    calibration = calibrate(()) if args.calibration is None else read_calibration(args.calibration)
    loaded = load_plan(args.file)
    out.diagnostics(loaded.diagnostics)
    plan = loaded.plan
    if plan is None:
        return for_diagnostics(loaded.diagnostics)
    limits = limits_of(plan, args)
    if args.output is not None:
        keep_inputs(args.output, [args.file, *(source.path for source in loaded.sources)])
    found = _find(plan, calibration, args, limits)
    fewest = smallest(plan, calibration, limits=limits) if args.smallest else None
    reports = [steady_state(target.found.plan) for target in found.best]
    if args.output is not None and found.best:
        write_text(args.output, _variant(args.file, args.output, found.best[0].found))
    if out.json:
        out.document("plan", _json(args, found, reports, fewest))
    else:
        _print(args, plan, found, reports, out)
        if args.smallest:
            out.print("\n" + _fewest(plan, fewest))
    return ExitCode.OK if found.best else ExitCode.INFEASIBLE


def _find(plan: Plan, calibration: Calibration, args: argparse.Namespace, limits: Limits) -> Targets:
    """Without ``--steps`` a plan is to be started, and no stop counts."""
    from nereus.planner.search import search
    from nereus.planner.targets import Target, Targets, targets

    if args.steps is not None:
        return targets(plan, calibration, steps=args.steps, count=args.best, limits=limits)
    searched = search(plan, calibration, count=args.best, limits=limits)
    best = (Target(found=found, stop_s=0.0, total_s=found.cost, payback_steps=0.0) for found in searched.best)
    return Targets(best=tuple(best), searched=searched, exact=True)


def _variant(base: str, target: str, found: Found) -> str:
    import os

    from nereus.lang.printer import quote

    relative = os.path.relpath(base, os.path.dirname(os.path.abspath(target)))
    lines = [f"extends {quote(relative)}"]
    lines += [f"stage {stage} {{ {text} }}" for stage, text in found.changes.items() if text]
    return "\n".join(lines) + "\n"


def _fewest(plan: Plan, fewest: Smallest | None) -> str:
    if fewest is None:
        return "no number of this cluster's GPUs holds all stages"
    text = (
        f"the smallest pool that holds all stages: the first {fewest.num_gpus} of {len(plan.cluster.devices)} GPUs, "
        f"{fewest.found.seconds:.1f} s a step"
    )
    if fewest.too_few is not None:
        return f"{text}; on {fewest.too_few} no plan fits"
    return f"{text}; the plan's pool has no fewer" if plan.cluster.pool and plan.cluster.pool.min_gpus else text


def _json(
    args: argparse.Namespace, found: Targets, reports: list[MemoryReport], fewest: Smallest | None
) -> dict[str, Any]:
    searched = found.searched
    smallest = None
    if fewest is not None:
        changes = {stage: text for stage, text in fewest.found.changes.items() if text}
        smallest = {"num_gpus": fewest.num_gpus, "seconds": fewest.found.seconds, "changes": changes}
    return {
        "plan": args.file,
        "calibration": args.calibration,
        "steps": args.steps,
        "present_seconds": None if searched.present is None else searched.present.seconds,
        "num_candidates": dict(searched.num_candidates),
        "num_placements": searched.num_placements,
        "smallest": smallest,
        "best": [
            {
                "seconds": target.found.seconds,
                "stop_s": target.stop_s,
                "payback_steps": target.payback_steps if isfinite(target.payback_steps) else None,
                "changes": {stage: text for stage, text in target.found.changes.items() if text},
                "stages": [
                    {
                        "stage": stage,
                        "seconds": seconds,
                        "num_gpus": len(target.found.plan.stage(stage).devices),
                        "peak_bytes": report.worst(stage).need_bytes,
                        "capacity_bytes": report.worst(stage).capacity_bytes,
                    }
                    for stage, seconds in target.found.stage_seconds.items()
                ],
            }
            for target, report in zip(found.best, reports, strict=True)
        ],
    }


def _print(args: argparse.Namespace, plan: Plan, found: Targets, reports: list[MemoryReport], out: Output) -> None:
    present = found.searched.present
    out.print(f"{args.file}: {'does not fit' if present is None else f'{present.seconds:.1f} s a step'}")
    if args.calibration is None:
        out.print("from data sheets and priors alone: --calibration names what nereusc fit learned")
    if not found.best:
        if args.only or args.pin or args.gpus or args.free:
            out.print("no plan that keeps to these limits fits")
        elif args.move:
            out.print("no plan fits on the GPUs of this cluster that its pool leaves")
        else:
            out.print("no layout of these stages fits on their GPUs; nereusc check says what does not")
    for number, (target, report) in enumerate(zip(found.best, reports, strict=True), 1):
        each = target.found
        out.print()
        out.print(out.style(f"{number}. {_headline(target, present, args.steps)}", "bold"))
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


def _headline(target: Target, present: Found | None, steps: int | None) -> str:
    found = target.found
    parts = [f"{found.seconds:.1f} s a step"]
    if not any(found.changes.values()):
        return f"{parts[0]}: the plan as it is"
    if present is not None:
        share = found.seconds / present.seconds - 1
        parts.append(f"{100 * abs(share):.1f}% {'more' if share > 0 else 'less'}")
    if steps is not None and not target.stop_s:
        parts.append("without a stop")
    elif steps is not None:
        parts.append(f"a stop of about {target.stop_s:.2g} s")
        if present is not None:
            parts.append(_payback(target.payback_steps))
    return ", ".join(parts)


def _payback(steps: float) -> str:
    if not isfinite(steps):
        return "never pays"
    return f"pays after {ceil(steps)} step{'' if ceil(steps) == 1 else 's'}"


def _degrees(stage: Stage) -> str:
    degrees = [("dp", stage.dp), ("tp", stage.tp), ("pp", stage.pp)]
    degrees += [(name, value) for name, value in (("cp", stage.cp), ("ep", stage.ep)) if value > 1]
    return " ".join(f"{name} {value}" for name, value in degrees)
