"""``nereusc fit``: what measured runs, or a run that wrote down its steps, teach of time and memory, as a file."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from nereus.cli.exit_codes import ExitCode
from nereus.cli.exports import fit_export
from nereus.cli.files import display_name, keep_inputs, read_text, write_text
from nereus.cli.measurements import bad_rows, percent, show
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, table
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity

if TYPE_CHECKING:
    from nereus.planner.accuracy import Accuracy
    from nereus.planner.learned import Learned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="measured runs, one a row (CSV; - reads standard input)")
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="FILE is what a run of this plan wrote: a W&B history, TensorBoard events or their folder, a console log "
        "of verl, NeMo-RL or OpenRLHF",
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write the calibration")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.planner.calibration import calibrate, to_document
    from nereus.planner.rows import read_rows

    keep_inputs(args.output, [args.file])
    if args.plan is not None:
        return fit_export(args, out)
    name = display_name(args.file)
    rows = read_rows(read_text(args.file), name)
    out.diagnostics(bad_rows(rows, name))
    runs = [row.run for row in rows if row.run is not None]
    calibration = calibrate(runs)
    models = {"step_time": calibration.step_time, "peak_memory": calibration.peak_memory}
    if not any(len(model.left_out) for model in models.values()):
        raise DiagnosticError([_nothing_measured(name, len(runs))])
    write_text(args.output, json.dumps(to_document(calibration)) + "\n")
    found = {kind: _accuracy(model) for kind, model in models.items()}
    content: dict[str, Any] = {"rows": len(rows), "used": len(runs), "output": args.output}
    content |= {kind: {cluster: show(a) for cluster, a in of.items()} for kind, of in found.items()}
    if out.json:
        out.document("fit", content)
        return ExitCode.OK
    out.print(f"{name}: {len(rows)} rows, {len(runs)} of use")
    for kind, title in (("step_time", "step time"), ("peak_memory", "peak memory")):
        if not found[kind]:
            out.print(f"\n{title}: no row measured it; predictions rest on data sheets and priors")
            continue
        out.print(f"\n{title}, each run predicted from all the others:")
        lines = [
            (cluster, str(a.num), percent(a.mean), percent(a.median), percent(a.largest))
            for cluster, a in found[kind].items()
        ]
        for line in table(("cluster", "runs", "mean error", "median", "largest"), lines, right=(1, 2, 3, 4)):
            out.print(line)
    out.print(f"\nwrote {args.output}")
    return ExitCode.OK


def _accuracy(model: Learned) -> dict[str, Accuracy]:
    """By cluster, the largest first, after all of them together."""
    import numpy as np

    from nereus.planner.accuracy import accuracy

    if not len(model.left_out):
        return {}
    clusters = [next(label for label in labels if label.startswith("cluster:")) for labels in model.seen.labels]
    groups: dict[str, list[int]] = {}
    for number, cluster in enumerate(clusters):
        groups.setdefault(cluster.partition(":")[2].strip() or "(no source)", []).append(number)
    ratio, ones = np.exp(-model.left_out), np.ones(len(model.left_out))
    found = {"all": accuracy(ratio, ones)}
    for cluster, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        found[cluster] = accuracy(ratio[members], ones[members])
    return found


def _nothing_measured(path: str, num_runs: int) -> Diagnostic:
    return Diagnostic(
        code="NRS7004",
        severity=Severity.ERROR,
        headline=f"none of the {num_runs} usable rows of {path} has a measured step_time_s or peak_mem_gb",
        help="a calibration needs measured rows; `nereusc predict` works without one",
    )
