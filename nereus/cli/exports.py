"""What a framework wrote down of a run: read for ``nereusc replay``, and learned from (``nereusc fit --plan``)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from nereus.cli.errors import CommandError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import STDIN, display_name, keep_inputs, write_text
from nereus.cli.measurements import percent
from nereus.cli.output import Output, table

if TYPE_CHECKING:
    from nereus.planner.exports.read import Export


def load_export(file: str) -> Export:
    from nereus.planner.exports.read import read_export

    try:
        return read_export(display_name(file), sys.stdin.buffer.read() if file == STDIN else None)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None


def fit_export(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.api import load_plan
    from nereus.planner.calibration import calibrate, to_document
    from nereus.planner.exports.learn import learn_export

    loaded = load_plan(args.plan)
    out.diagnostics(loaded.diagnostics)
    if loaded.plan is None:
        return for_diagnostics(loaded.diagnostics)
    keep_inputs(args.output, [source.path for source in loaded.sources])
    export = load_export(args.file)
    online, fits = learn_export(export, loaded.plan, calibrate(()))
    write_text(args.output, json.dumps(to_document(online.calibration())) + "\n")
    if out.json:
        content = {
            "framework": export.framework,
            "steps": len(export.steps),
            "between_s": online.between_s(),
            "stages": [asdict(fit) for fit in fits],
            "output": args.output,
        }
        out.document("fit-export", content)
        return ExitCode.OK
    out.print(f"{display_name(args.file)}: {len(export.steps)} steps of {export.framework}, run as {args.plan}")
    rows = [(fit.stage, str(fit.num), f"{fit.measured_s:.4g}", percent(fit.before), percent(fit.after)) for fit in fits]
    if rows:
        out.print("\n".join(table(("stage", "steps", "median s", "off before", "off now"), rows, right=(1, 2, 3, 4))))
    else:
        out.print("no stage was timed: whole steps were dealt to the stages")
    out.print(f"{online.between_s():.4g} s of a step belong to no stage")
    out.print(f"wrote {args.output}")
    return ExitCode.OK
