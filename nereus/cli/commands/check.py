"""``nereusc check``: all that is wrong with plans, what was assumed, and which GPU needs what in which stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import STDIN, STDIN_NAME, read_text
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output
from nereus.ir.diagnostic import Diagnostic, has_errors

if TYPE_CHECKING:
    from nereus.lang.api import LoadResult
    from nereus.models.memory import MemoryReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="plan; - is stdin")
    parser.add_argument("--quiet", "-q", action="store_true", help="print what is wrong and nothing else")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.cli.plan_summary import summary_json, summary_text
    from nereus.lang.render import to_json

    if args.files.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read once only")
    everything: list[Diagnostic] = []
    documents: list[dict[str, Any]] = []
    num_printed = 0
    for path in args.files:
        result, report, diagnostics = _check(path)
        out.diagnostics(diagnostics)
        everything += diagnostics
        plan = result.plan
        if out.json:
            document: dict[str, Any] = {
                "path": STDIN_NAME if path == STDIN else path,
                "ok": not has_errors(diagnostics),
                "plan": None if plan is None else summary_json(plan, report),
                "diagnostics": [to_json(d) for d in diagnostics],
            }
            documents.append(document)
        elif plan is not None and not args.quiet:
            out.print("\n" * bool(num_printed) + summary_text(plan, report, out))
            num_printed += 1
    code = for_diagnostics(everything)
    if out.json:
        out.document("check", {"ok": code is ExitCode.OK, "files": documents})
    return code


def _check(path: str) -> tuple[LoadResult, MemoryReport | None, tuple[Diagnostic, ...]]:
    """Memory is computed only for a plan whose degrees and devices are right."""
    from nereus.lang.api import load_plan, resolve_text

    result = resolve_text(read_text(STDIN), path=STDIN_NAME, base_dir=".") if path == STDIN else load_plan(path)
    if result.plan is None or has_errors(result.diagnostics):
        return result, None, result.diagnostics
    from nereus.ir.diagnostic import Severity
    from nereus.models.expert_layout import unknown_expert_layouts
    from nereus.models.memory import check_memory, steady_state

    report = steady_state(result.plan)
    # What only a change would stumble over is a warning here: the plan itself is legal.
    found = (*check_memory(result.plan, report), *unknown_expert_layouts(result.plan, Severity.WARNING))
    return result, report, (*(d for d in found if has_errors([d])), *result.diagnostics, *_rest(found))


def _rest(found: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    return tuple(d for d in found if not has_errors([d]))
