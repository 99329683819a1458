"""``nereusc compile``: a transition as a file, for later."""

from __future__ import annotations

import argparse

from nereus.cli.exit_codes import ExitCode
from nereus.cli.output import Output
from nereus.cli.transition.options import add_compile_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_compile_options(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="file to write; gzipped where its name ends in .gz"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.cli.commands.diff import report
    from nereus.cli.files import write_bytes
    from nereus.cli.transition.compiling import compile_files
    from nereus.cli.transition.saved import saved_bytes
    from nereus.ir.units import format_bytes

    result = compile_files(args, out)
    transition = result.transition
    written = result.code is ExitCode.OK and transition is not None
    if transition is not None and written:
        data = saved_bytes(
            transition,
            pipeline=result.pipeline,
            allow_destroy=args.allow_destroy,
            old_path=result.old_path,
            new_path=result.new_path,
            compress=args.output.endswith(".gz"),
        )
        write_bytes(args.output, data)
    code = report(result, args, out, file=args.output if written else None)
    if transition is not None and written:
        out.message(f"{args.output}: {format_bytes(len(data))}, digest {transition.digest[:16]}")
    return code
