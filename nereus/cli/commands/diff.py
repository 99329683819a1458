"""``nereusc diff``: what going from one plan to another moves, costs and risks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nereus.cli.exit_codes import ExitCode
from nereus.cli.output import Output
from nereus.cli.transition.options import add_compile_options

if TYPE_CHECKING:
    from nereus.cli.transition.compiling import Compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_compile_options(parser)
    parser.add_argument(
        "--coarse",
        action="store_true",
        help="estimate bytes, transfer and stop from the layouts alone; nothing is compiled, placed or checked",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    if args.coarse:
        from nereus.cli.transition.coarse import report_estimate

        return report_estimate(args, out)
    from nereus.cli.transition.compiling import compile_files

    return report(compile_files(args, out), args, out)


def report(result: Compiled, args: argparse.Namespace, out: Output, *, file: str | None = None) -> ExitCode:
    """Print a compiled transition; ``file``: where it was saved. The exit code, ``--detailed-exitcode`` included."""
    from nereus.cli.transition.document import diff_document
    from nereus.cli.transition.facts import differs
    from nereus.cli.transition.text import transition_text

    if out.json:
        document = diff_document(
            old_path=result.old_path,
            new_path=result.new_path,
            transition=result.transition,
            diagnostics=result.diagnostics,
            pipeline=str(result.pipeline),
            timings=args.time_passes,
            file=file,
        )
        out.document("diff", document)
    elif result.transition is not None:
        out.print(transition_text(result.transition, out, detail=args.detail))
    if result.code is ExitCode.OK and args.detailed_exitcode and result.transition and differs(result.transition):
        return ExitCode.DIFFERENT
    return result.code
