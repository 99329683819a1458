"""``nereusc predict``: step time and peak memory of training runs, with the error where they were measured; or the RL
step of a plan, stage by stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import display_name, read_text
from nereus.cli.measurements import bad_rows, percent, read_calibration, show, within_90
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, table
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.units import GB

if TYPE_CHECKING:
    from nereus.planner.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="runs, one a row (CSV; - is standard input), or a plan (*.plan)")
    parser.add_argument(
        "--calibration", metavar="FILE", help="what nereusc fit wrote (default: data sheets and priors alone)"
    )
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.planner.calibration import calibrate
    from nereus.planner.rows import no_table, read_rows

    calibration: Calibration = calibrate(()) if args.calibration is None else read_calibration(args.calibration)
    if args.file.endswith(".plan"):
        return _plan(args, calibration, out)
    name = display_name(args.file)
    rows = read_rows(read_text(args.file), name)
    out.diagnostics(bad_rows(rows, name))
    runs = [row.run for row in rows if row.run is not None]
    if not runs:
        raise DiagnosticError([no_table(name, "none of its rows can be used")])
    step, memory = calibration.predict_step_time(runs), calibration.predict_peak_memory(runs)
    step_low, step_high = step.within_90()
    memory_low, memory_high = memory.within_90()
    predicted: list[dict[str, Any]] = []
    number = 0
    for row in rows:
        entry: dict[str, Any] = {"row_id": row.id, "line": row.line, "problem": row.problem or None}
        if row.run is not None:
            unit = row.run.gb_bytes
            entry |= {
                "step_time_s": float(step.value[number]),
                "step_time_s_within_90": [float(step_low[number]), float(step_high[number])],
                "peak_mem_gb": float(memory.value[number] / unit),
                "peak_mem_gb_within_90": [float(memory_low[number] / unit), float(memory_high[number] / unit)],
                "fits": bool(memory_high[number] <= row.run.machine.mem_gb * GB),
                "measured_step_time_s": row.run.step_time_s,
                "measured_peak_mem_gb": row.run.peak_mem_gb,
                "out_of_memory": row.run.out_of_memory,
                "assumed": list(row.assumed),
            }
            entry |= {
                f"{what}_error": entry[what] / entry[f"measured_{what}"] - 1
                for what in ("step_time_s", "peak_mem_gb")
                if entry[f"measured_{what}"]
            }
            number += 1
        predicted.append(entry)
    summary = {what: _summary(predicted, what) for what in ("step_time_s", "peak_mem_gb")}
    if out.json:
        out.document("predict", {"calibration": args.calibration, "rows": predicted, "accuracy": summary})
        return ExitCode.OK
    _print(predicted, summary, out)
    if args.calibration is None:
        out.print("from data sheets and priors alone: --calibration names what nereusc fit learned")
    return ExitCode.OK


def _plan(args: argparse.Namespace, calibration: Calibration, out: Output) -> int:
    from nereus.lang.api import load_plan
    from nereus.planner.weight_sync import synced_step_time

    loaded = load_plan(args.file)
    out.diagnostics(loaded.diagnostics)
    if loaded.plan is None:
        return for_diagnostics(loaded.diagnostics)
    found = synced_step_time(loaded.plan, calibration)
    low, high = within_90(found.seconds, found.deviation)
    if out.json:
        stages = [
            {
                "stage": time.stage,
                "start_s": time.start_s,
                "seconds": time.seconds,
                "seconds_within_90": list(within_90(time.seconds, time.deviation)),
                "critical": time.stage in found.critical,
            }
            for time in found.stages
        ]
        content = {"plan": args.file, "calibration": args.calibration, "seconds": found.seconds}
        out.document("predict-plan", {**content, "seconds_within_90": [low, high], "stages": stages})
        return ExitCode.OK
    out.print(f"{args.file}: {found.seconds:.1f} s a step, 90 in 100 between {low:.1f} and {high:.1f}")
    if args.calibration is None:
        out.print("from data sheets and priors alone: --calibration names what nereusc fit learned")
    lines = []
    for time in found.stages:
        low, high = within_90(time.seconds, time.deviation)
        mark = "*" if time.stage in found.critical else ""
        lines.append((time.stage, f"{time.start_s:.1f}", f"{time.seconds:.1f}", f"{low:.1f} - {high:.1f}", mark))
    out.print("\n".join(table(("stage", "starts", "s", "90 in 100", ""), lines, right=(1, 2, 3))))
    out.print("* on the critical path; offloading, waking and set-up between stages are not counted")
    return ExitCode.OK


def _summary(predicted: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    import numpy as np

    from nereus.planner.accuracy import accuracy

    with_both = [entry for entry in predicted if f"{name}_error" in entry and not entry["out_of_memory"]]
    if not with_both:
        return None
    low, high = (np.array([entry[f"{name}_within_90"][side] for entry in with_both]) for side in (0, 1))
    return show(
        accuracy(
            np.array([entry[name] for entry in with_both]),
            np.array([entry[f"measured_{name}"] for entry in with_both]),
            low,
            high,
        )
    )


def _print(predicted: list[dict[str, Any]], summary: dict[str, dict[str, Any] | None], out: Output) -> None:
    lines = []
    for entry in predicted:
        if entry["problem"]:
            continue
        cells = [entry["row_id"]]
        for name, digits in (("step_time_s", 4), ("peak_mem_gb", 3)):
            low, high = entry[f"{name}_within_90"]
            measured, error = entry[f"measured_{name}"], entry.get(f"{name}_error")
            cells += [f"{entry[name]:.{digits}g}", f"{low:.{digits}g} - {high:.{digits}g}"]
            cells += [f"{measured:.{digits}g}" if measured else "", f"{100 * error:+.1f}%" if error is not None else ""]
        lines.append([*cells, "yes" if entry["fits"] else "no"])
    header = ("row", "step s", "90 in 100", "measured", "", "peak GB", "90 in 100", "measured", "", "fits")
    for line in table(header, lines, right=tuple(range(1, 9))):
        out.print(line)
    out.print("fits: the upper end of the range is within the GPU's memory")
    for name, title in (("step_time_s", "step time"), ("peak_mem_gb", "peak memory")):
        of = summary[name]
        if of is not None:
            out.print(
                f"{title}: {of['num']} measured, mean error {percent(of['mean'])}, median {percent(of['median'])}, "
                f"{percent(of['within_90'])} inside the range"
            )
