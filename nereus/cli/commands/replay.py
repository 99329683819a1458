"""``nereusc replay``: what a job takes under one policy of adaptation or another, on a trace of lengths and pools."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.exports import load_export
from nereus.cli.files import display_name, keep_inputs, read_text, write_text
from nereus.cli.measurements import percent, read_calibration
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, table

if TYPE_CHECKING:
    from nereus.ir.plan import Plan
    from nereus.planner.calibration import Calibration
    from nereus.replay.recorded import Recorded
    from nereus.replay.run import Outcome
    from nereus.replay.study import Study
    from nereus.replay.trace import Trace

#: Darkness of a value between the least and the most of a chart's line.
_RAMP = " .:-=+*#%@"
_CHART_WIDTH = 60
_MOST_STEPS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="PLAN", help="the job; its cluster lists all nodes that may be there")
    parser.add_argument("trace", metavar="TRACE.csv", nargs="?", help="one step a row (default: a generated trace)")
    parser.add_argument(
        "--export", metavar="FILE",
        help="the trace is what a run of PLAN wrote: a W&B history, TensorBoard events or their folder, a console log "
        "of verl, NeMo-RL or OpenRLHF",
    )  # fmt: skip
    parser.add_argument("--calibration", metavar="FILE", help="what nereusc fit wrote (default: data sheets, priors)")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="only this one, and the optimum (repeatable)"
    )
    parser.add_argument("--lengths", default="growth", metavar="NAME", help="of a generated trace (default: growth)")
    parser.add_argument("--pool", default="fixed", metavar="NAME", help="of a generated trace (default: fixed)")
    parser.add_argument("--drift", action="store_true", help="the efficiency of the machines wanders")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a generated trace (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace and of the truth (default: 0)")
    parser.add_argument(
        "--model-error", type=float, default=0.05, metavar="X", help="by which predictions are off (default: 0.05)"
    )
    parser.add_argument("--noise", type=float, default=0.02, metavar="X", help="of each step's time (default: 0.02)")
    parser.add_argument("--write-trace", metavar="FILE", help="write the trace that is replayed, as CSV")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.api import load_plan
    from nereus.planner.calibration import calibrate
    from nereus.replay.study import AS_RUN, POLICIES, USUAL, study
    from nereus.replay.trace import write_trace

    if args.export is not None and args.trace is not None:
        raise UsageError("--export and TRACE.csv: one trace or the other")
    for name in args.policy:
        if name not in POLICIES:
            raise UsageError(f"--policy {name}: there are {', '.join(POLICIES)}")
    for option, value in (("--model-error", args.model_error), ("--noise", args.noise)):
        if not 0 <= value <= 1:
            raise UsageError(f"{option} {value}: from 0 to 1")
    calibration = calibrate(()) if args.calibration is None else read_calibration(args.calibration)
    loaded = load_plan(args.file)
    out.diagnostics(loaded.diagnostics)
    if loaded.plan is None:
        return for_diagnostics(loaded.diagnostics)
    ran = None if args.export is None else _recorded(args, loaded.plan, calibration)
    plan, trace = (ran.plan, ran.trace) if ran is not None else (loaded.plan, _trace(args, loaded.plan))
    calibration = calibration if ran is None else ran.calibration
    usual = USUAL if all(row.step_s is None for row in trace.rows) else (AS_RUN, *USUAL)
    found = study(
        plan, trace, calibration, policies=tuple(dict.fromkeys(args.policy)) or usual,
        model_error=args.model_error, noise=args.noise, seed=args.seed,
    )  # fmt: skip
    if args.write_trace is not None:
        inputs = [args.file, *(source.path for source in loaded.sources), *filter(None, (args.trace, args.export))]
        keep_inputs(args.write_trace, inputs)
        write_text(args.write_trace, write_trace(trace))
    if out.json:
        out.document("replay", _json(args, found, ran))
    else:
        _print(args, found, out, ran)
    return ExitCode.OK


def _recorded(args: argparse.Namespace, plan: Plan, calibration: Calibration) -> Recorded:
    from nereus.replay.recorded import recorded

    return recorded(load_export(args.export), plan, calibration, name=display_name(args.export))


def _trace(args: argparse.Namespace, plan: Plan) -> Trace:
    from nereus.replay.generator import LENGTHS, POOLS, Recipe, generate
    from nereus.replay.trace import read_trace

    if args.trace is not None:
        return read_trace(read_text(args.trace), display_name(args.trace))
    for option, value, known in (("--lengths", args.lengths, tuple(LENGTHS)), ("--pool", args.pool, POOLS)):
        if value not in known:
            raise UsageError(f"{option} {value}: there are {', '.join(known)}")
    if not 1 <= args.steps <= _MOST_STEPS:
        raise UsageError(f"--steps {args.steps}: from 1 to {_MOST_STEPS}")
    recipe = Recipe(lengths=args.lengths, pool=args.pool, drift=args.drift, steps=args.steps, seed=args.seed)
    return generate(recipe, [node.num_gpus for node in plan.cluster.nodes])


def _json(args: argparse.Namespace, found: Study, ran: Recorded | None) -> dict[str, Any]:
    return {
        "plan": args.file,
        "trace": found.world.trace.name,
        "calibration": args.calibration,
        "export": args.export,
        "drift": None if ran is None else list(ran.drift),
        "num_steps": found.world.num_steps,
        "model_error": args.model_error,
        "noise": args.noise,
        "seed": args.seed,
        "policies": [
            {
                "policy": outcome.policy,
                "total_s": outcome.total_s,
                "regret": found.regret(outcome),
                "num_changes": outcome.num_changes,
                "between_s": sum(outcome.between_s),
                "share_between": outcome.share_between,
                "worst_stall_s": outcome.worst_stall_s,
                "num_out_of_memory": outcome.overflows,
                "steps_s": list(outcome.steps_s),
                "plans": list(outcome.plans),
            }
            for outcome in found.outcomes
        ],
        "layouts": {str(number): _layout(found, number) for number in sorted(_used(found))},
    }


def _used(found: Study) -> set[int]:
    return {number for outcome in found.outcomes for number in outcome.plans}


def _layout(found: Study, number: int) -> str:
    plan = found.world.space.plans[number]
    return "; ".join(
        f"{owner.name} {len(owner.devices)} GPUs tp {owner.tp} pp {owner.pp} dp {owner.dp}" for owner in plan.owners()
    )


def _print(args: argparse.Namespace, found: Study, out: Output, ran: Recorded | None) -> None:
    world = found.world
    out.print(f"{args.file} on {world.trace.name}: {world.num_steps} steps")
    if ran is not None:
        out.print(_said_of(ran))
    elif args.calibration is None:
        out.print("from data sheets and priors alone: --calibration names what nereusc fit learned")
    first = found.outcomes[0]
    rows = []
    for outcome in found.outcomes:
        rows.append(
            (
                outcome.policy,
                f"{outcome.total_s:.0f}",
                f"{outcome.total_s / world.num_steps:.1f}",
                percent(1 - outcome.total_s / first.total_s),
                percent(found.regret(outcome)),
                str(outcome.num_changes),
                f"{sum(outcome.between_s):.0f}",
                f"{100 * outcome.share_between:.2f}%",
                f"{outcome.worst_stall_s:.0f}",
                str(outcome.overflows) if outcome.overflows else "",
            )
        )
    saved = f"saved to {first.policy}"
    header = ("policy", "s", "a step", saved, "regret", "changes", "between s", "share", "worst s", "out of memory")
    out.print("\n".join(table(header, rows, right=tuple(range(1, 10)))))
    out.print("regret: beyond the offline optimum, which knows the trace; between: stops, restarts, steps given up")
    out.print()
    out.print("\n".join(_chart(found)))


def _said_of(ran: Recorded) -> str:
    if not ran.drift:
        return "its stages calibrate the prediction; no whole step was timed"
    return f"its steps calibrate the prediction, and take {min(ran.drift):.2f} to {max(ran.drift):.2f} times that"


def _chart(found: Study) -> list[str]:
    """Lines over the steps: darker is more, from the least to the most of each line. ^ where the last policy changed
    its plan."""
    world = found.world
    last = found.outcomes[-2] if len(found.outcomes) > 1 else found.outcomes[-1]
    lines: list[tuple[str, list[float]]] = [
        ("response", [row.response_mean for row in world.trace.rows]),
        ("nodes", [float(number) for number in world.num_nodes]),
    ]
    shown = {outcome.policy: outcome for outcome in (found.outcomes[0], last, found.offline)}
    lines += [(f"s {name}", list(outcome.steps_s)) for name, outcome in shown.items()]
    seconds = [value for _, values in lines[2:] for value in values]
    chart = []
    for number, (name, values) in enumerate(lines):
        low, high = (min(values), max(values)) if number < 2 else (min(seconds), max(seconds))
        chart.append(f"  {name:13} {_shaded(values, low, high)}  {low:.4g} to {high:.4g}")
    chart.append(f"  {'changes ' + last.policy:13.13} {_marks(last)}")
    return chart


def _columns(num_steps: int) -> list[range]:
    width = min(num_steps, _CHART_WIDTH)
    return [range(c * num_steps // width, (c + 1) * num_steps // width) for c in range(width)]


def _shaded(values: list[float], low: float, high: float) -> str:
    means = [sum(values[step] for step in column) / len(column) for column in _columns(len(values))]
    span = high - low
    return "".join(_RAMP[min(int((mean - low) / span * len(_RAMP)), len(_RAMP) - 1) if span else 0] for mean in means)


def _marks(outcome: Outcome) -> str:
    plans = outcome.plans
    changed = [step > 0 and plans[step] != plans[step - 1] for step in range(len(plans))]
    return "".join("^" if any(changed[step] for step in column) else " " for column in _columns(len(plans))).rstrip()
