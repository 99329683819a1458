"""Checks that no linter makes: files stay short (one idea each) and source stays ASCII. Exit status 1 if any fails."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
FOLDERS = ("nereus", "tests", "benchmarks", "tools", "grammar", "examples")
SUFFIXES = (".py", ".lark", ".sh", ".plan")


def problems(root: Path = ROOT) -> list[str]:
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            name = path.relative_to(root)
            data = path.read_bytes()
            num_lines = data.count(b"\n")
            if folder == "nereus" and num_lines > MAX_LINES:
                found.append(f"{name}: {num_lines} lines, at most {MAX_LINES}: split it")
            for number, line in enumerate(data.split(b"\n"), start=1):
                if not line.isascii():
                    found.append(f"{name}:{number}: not ASCII")
                    break
    return found


def main() -> int:
    found = problems()
    print("\n".join(found) if found else f"file sizes and ASCII: ok ({', '.join(FOLDERS)})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
