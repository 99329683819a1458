"""``nereusc import``: a plan from what the user launches today."""

from __future__ import annotations

import argparse

from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import display_name, read_text, write_text
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("framework", choices=("verl",), help="whose configuration it is")
    parser.add_argument(
        "file", metavar="FILE", help="launch script or resolved YAML; read, never executed; - reads stdin"
    )
    parser.add_argument("--gpu", metavar="ID", help="data-sheet id of the GPUs, e.g. h100-sxm-80gb")
    parser.add_argument(
        "--nodes", type=_positive, metavar="N", help="number of nodes, instead of the one written there"
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file instead of stdout")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.importers.verl import import_verl
    from nereus.lang.render import to_json

    text = read_text(args.file)
    result = import_verl(text, path=display_name(args.file), gpu=args.gpu, nodes=args.nodes)
    out.diagnostics(result.diagnostics)
    if result.plan_text is not None and args.output:
        write_text(args.output, result.plan_text)
        out.message(f"wrote {args.output}")
    if out.json:
        content = {
            "framework": args.framework,
            "file": display_name(args.file),
            "plan_text": result.plan_text,
            "diagnostics": [to_json(d) for d in result.diagnostics],
        }
        out.document("import", content)
    elif result.plan_text is not None and not args.output:
        out.raw(result.plan_text)
    code = for_diagnostics(result.diagnostics)
    return ExitCode.INPUT_ERROR if result.plan_text is None and code is ExitCode.OK else code


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return int(text)
