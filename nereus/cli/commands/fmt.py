"""``nereusc fmt``: plans in the standard form."""

from __future__ import annotations

import argparse
import difflib

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import STDIN, display_name, read_text, write_text
from nereus.cli.options import add_output_format
from nereus.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="plan to rewrite in place; - reads stdin, writes stdout"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 5 if a file would change")
    parser.add_argument("--diff", action="store_true", help="write nothing; print what would change")
    add_output_format(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.api import format_text

    if args.files.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read once only")
    worst = ExitCode.OK
    num_changed = 0
    for path in args.files:
        name = display_name(path)
        old = read_text(path)
        result = format_text(old, path=name)
        out.diagnostics(result.diagnostics)
        if result.text is None:
            worst = for_diagnostics(result.diagnostics) or ExitCode.INPUT_ERROR
            continue
        if path == STDIN and not (args.check or args.diff):
            out.raw(result.text)
            continue
        if result.text == old:
            continue
        num_changed += 1
        if args.diff:
            out.raw(_diff(old, result.text, name, out))
        if args.check:
            out.message(f"would change {name}")
        elif not args.diff:
            write_text(path, result.text)
            out.message(f"rewrote {name}")
    if worst is not ExitCode.OK:
        return worst
    return ExitCode.UNFORMATTED if args.check and num_changed else ExitCode.OK


def _diff(old: str, new: str, name: str, out: Output) -> str:
    """Unified diff of one file, coloured where stdout has colour."""
    lines = []
    for line in difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} (formatted)"):
        body, newline = (line[:-1], "\n") if line.endswith("\n") else (line, "\n\\ No newline at end of file\n")
        style = {"+": ("green",), "-": ("red",), "@": ("cyan",)}.get(body[:1], ())
        lines.append(out.style(body, *style) + newline)
    return "".join(lines)
