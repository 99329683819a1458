"""Rows of accuracy tables, and where they are written: common to cost_model.py and decode.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from nereus.planner.accuracy import Accuracy

HEADER = "| runs | mean error | median | inside the 90 % range |"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cost-model.md"


def header(what: str) -> list[str]:
    return [f"| {what} {HEADER}", "|---|---|---|---|---|"]


def line(name: str, found: Accuracy) -> str:
    return f"| {name} | {found.num} | {found.mean:.1%} | {found.median:.1%} | {found.within_90 or 0:.0%} |"


def write(section: str, text: str) -> None:
    """Between the marks of ``section`` in docs/cost-model.md."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin)
    DOCUMENT.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main(about: str | None, section: str, report: Callable[[], str]) -> None:
    """Print the report; with --write also put it into the document."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = report()
    print(text)
    if args.write:
        write(section, text)
