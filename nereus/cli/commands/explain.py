"""``nereusc explain``: what a code means, a plan that shows it, and the cure."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode
from nereus.cli.options import add_json
from nereus.cli.output import Output, table, wrap

if TYPE_CHECKING:
    from nereus.lang.catalog import CodeEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("codes", nargs="*", metavar="CODE", help="e.g. NRS4001")
    parser.add_argument("--all", action="store_true", help="list every code; with --json, everything about every code")
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.lang.catalog import CATALOG

    if args.all == bool(args.codes):
        raise UsageError("name the codes to explain, or --all")
    entries = [CATALOG[code] for code in sorted(CATALOG)] if args.all else [_find(code) for code in args.codes]
    if out.json:
        out.document("explain", {"codes": [_entry_json(entry) for entry in entries]})
    elif args.all:
        for line in table(("code", "meaning"), [(e.code, e.title) for e in entries], indent=0):
            out.print(line)
    else:
        out.print("\n\n".join(_entry_text(entry, out) for entry in entries))
    return ExitCode.OK


def _find(text: str) -> CodeEntry:
    from nereus.lang.catalog import CATALOG

    code = text.upper()
    if code.isascii() and code.isdigit():
        code = f"NRS{code}"
    if code in CATALOG:
        return CATALOG[code]
    from difflib import get_close_matches

    near = get_close_matches(code, CATALOG, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"no code {text}{hint} (nereusc explain --all lists them)")


def _entry_text(entry: CodeEntry, out: Output) -> str:
    parts = [
        f"{out.style(entry.code, 'bold')}: {out.style(entry.title, 'bold')}",
        "",
        wrap(entry.cause, width=out.width),
        "",
        f"Example; `{_command_line(entry)}` {'says' if entry.shown else 'might say'} {entry.code}:",
    ]
    for name, text in entry.example.items():
        parts += ["", out.style(f"    # {name}", "dim")]
        parts += [f"    {line}".rstrip() for line in text.strip("\n").split("\n")]
    parts += ["", wrap(f"Cure: {entry.fix}", width=out.width)]
    return "\n".join(parts)


def _command_line(entry: CodeEntry) -> str:
    """What to type, in a folder with the example's files, to see the message."""
    files = [entry.compiles] if entry.compiles else list(entry.example)
    if entry.command == "check":
        return f"nereusc check {files[0]}"
    if entry.command == "import":
        return f"nereusc import verl {files[0]}"
    return f"nereusc {' '.join((entry.command, *files[:2], *entry.options))}"


def _entry_json(entry: CodeEntry) -> dict[str, Any]:
    return {
        "code": entry.code,
        "title": entry.title,
        "cause": entry.cause,
        "command": _command_line(entry),
        "example": dict(entry.example),
        "fix": entry.fix,
    }
