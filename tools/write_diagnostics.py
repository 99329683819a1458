"""Writes docs/diagnostics.md from the catalogue: `python tools/write_diagnostics.py`. A test keeps the two equal."""

from __future__ import annotations

from pathlib import Path

from nereus.lang.catalog import CATALOG

PHASES = {
    "1": "Syntax",
    "2": "Names, values and imports",
    "3": "Layout",
    "4": "Memory",
    "5": "Transitions",
    "6": "Execution",
    "7": "Cost model and search",
    "9": "Internal",
}


def document() -> str:
    lines = [
        "# Diagnostics",
        "",
        "Every message of `nereusc` has a code; `nereusc explain CODE` prints it with an example. A code is",
        "never reused. This file is written by `tools/write_diagnostics.py` from `nereus/lang/catalog/`.",
    ]
    phase = ""
    for code in sorted(CATALOG):
        entry = CATALOG[code]
        if code[3] != phase:
            phase = code[3]
            lines += ["", f"## {PHASES[phase]} (NRS{phase}xxx)"]
        lines += ["", f"### {code}: {entry.title}", "", entry.cause, "", f"*What to do:* {entry.fix}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(__file__).resolve().parent.parent / "docs" / "diagnostics.md"
    target.write_text(document())
    print(f"wrote {target}")
