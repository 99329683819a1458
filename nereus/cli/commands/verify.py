"""``nereusc verify``: a saved transition proved from its document alone, by code that the compiler does not share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output, wrap
from nereus.ir.diagnostic import DiagnosticError

if TYPE_CHECKING:
    from nereus.verify.api import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what nereusc compile wrote")
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.cli.transition.saved_file import damaged, entry_of, read_saved
    from nereus.lang.render import to_json
    from nereus.verify.api import verify
    from nereus.verify.finding import DamagedDocument

    document: dict[str, Any] = {"ok": False, "file": args.file, "old": None, "new": None, "digest": None}
    document |= {"num_devices": None, "num_moves": None, "properties": [], "not_judged": [], "diagnostics": []}
    try:
        saved = read_saved(args.file)
        names = [entry_of(saved, args.file, "plans", side, "path", kind=str) for side in ("old", "new")]
        try:
            verdict = verify(saved)
        except DamagedDocument as error:
            raise DiagnosticError([damaged(args.file, str(error))]) from None
    except DiagnosticError as error:
        out.diagnostics(error.diagnostics)
        if out.json:
            out.document("verify", document | {"diagnostics": [to_json(d) for d in error.diagnostics]})
        return for_diagnostics(error.diagnostics)
    if out.json:
        out.document("verify", document | _json(verdict, names))
    else:
        out.print(_text(verdict, names, out))
    return ExitCode.OK if verdict.holds else ExitCode.INFEASIBLE


def _json(verdict: Verdict, names: list[str]) -> dict[str, Any]:
    from nereus.verify.api import PROPERTIES
    from nereus.verify.figures import NOT_JUDGED

    about = dict(PROPERTIES)
    return {
        "ok": verdict.holds,
        "old": names[0],
        "new": names[1],
        "digest": verdict.digest,
        "num_devices": verdict.num_devices,
        "num_moves": verdict.num_moves,
        "properties": [
            {"name": f.name, "about": about[f.name], "holds": f.holds, "evidence": f.evidence} for f in verdict.findings
        ],
        "not_judged": list(NOT_JUDGED),
    }


def _text(verdict: Verdict, names: list[str], out: Output) -> str:
    from nereus.verify.figures import NOT_JUDGED

    lines = [
        f"{names[0]} -> {names[1]}",
        f"{verdict.num_devices:,} GPUs, {verdict.num_moves:,} moves, digest {verdict.digest[:16]}",
    ]
    indent = " " * 19
    for finding in verdict.findings:
        mark = out.style("proved", "green") if finding.holds else out.style("BROKEN", "red", "bold")
        text = wrap(finding.evidence, width=out.width, indent=indent, first=indent)
        lines.append(f"{finding.name:<12}{mark} {text[len(indent) :]}")
    lines.append(wrap(", ".join(NOT_JUDGED), width=out.width, indent=indent, first=f"{'not judged':<19}"))
    broken = [finding.name for finding in verdict.findings if not finding.holds]
    if broken:
        lines.append(out.style(f"does not hold: {', '.join(broken)}", "red", "bold"))
    else:
        lines.append(out.style(f"all {len(verdict.findings)} properties hold", "green"))
    return "\n".join(lines)
