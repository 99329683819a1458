"""``nereusc show``: a saved transition, after compiling its plans again to see that it still holds."""

from __future__ import annotations

import argparse

from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output
from nereus.cli.transition.options import add_detail
from nereus.ir.diagnostic import DiagnosticError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what nereusc compile wrote")
    add_detail(parser)
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.cli.transition.document import diff_document
    from nereus.cli.transition.saved import load_saved
    from nereus.cli.transition.text import transition_text

    try:
        saved = load_saved(args.file)
    except DiagnosticError as error:
        out.diagnostics(error.diagnostics)
        if out.json:
            document = diff_document(
                old_path=None,
                new_path=None,
                transition=None,
                diagnostics=error.diagnostics,
                pipeline=None,
                timings=False,
                file=args.file,
            )
            out.document("diff", document)
        return for_diagnostics(error.diagnostics)
    if out.json:
        document = diff_document(
            old_path=saved.old_path,
            new_path=saved.new_path,
            transition=saved.transition,
            diagnostics=(),
            pipeline=str(saved.pipeline),
            timings=False,
            file=args.file,
        )
        out.document("diff", document)
    else:
        out.print(transition_text(saved.transition, out, detail=args.detail))
    return ExitCode.OK if saved.transition.certificate.safe else ExitCode.INFEASIBLE
